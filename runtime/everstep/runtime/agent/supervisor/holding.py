"""The lead serves a request: agree on a step, hold it, move it out of doomed memory, report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from everstep.controller.api.ids import HostId, Step
from everstep.controller.api.wire import Held, Request, RequestKind
from everstep.runtime.agent import agreement, rendezvous
from everstep.runtime.agent.agreement import Agreement, Stage
from everstep.runtime.agent.coverage import find_gaps, name_region
from everstep.runtime.agent.evacuation import plan_evacuation
from everstep.runtime.agent.events import RequestServed
from everstep.runtime.agent.supervisor.members import REPLY_TIMEOUT_S, Members
from everstep.runtime.agent.supervisor.scope import Scope
from everstep.runtime.agent.wire import Hold, Take
from everstep.runtime.errors import EverstepError, Fenced, PeerUnavailable
from everstep.runtime.layout.manifest import Holding, Inventory
from everstep.runtime.layout.tree import TreeSpec

if TYPE_CHECKING:
    from everstep.runtime.agent.supervisor.host import Host

RESERVE_S_MAX = 2.0
RESERVE_SHARE = 0.25
"""Of the time that is left, so much is kept for moving the step once it is known."""
HELD_WAIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The step that a request holds, and how it was found."""

    step: Step
    tree: TreeSpec | None
    """None: the step is in storage only, or nothing is held at all."""
    holdings: tuple[Holding, ...]
    is_in_storage: bool
    settled_because: str | None


async def serve_request(host: Host, scope: Scope, request: Request) -> None:
    """Serve one request to its end, which is the acknowledgement.

    Blocking: to the request's deadline at most, and a little for saying that it failed.
    """
    began_s = host.clock.unix_s()
    try:
        async with asyncio.timeout(max(0.05, request.deadline_s - began_s)):
            held = await _serve(host, scope, request)
    except TimeoutError:
        held = _failed(request, "the deadline is over")
    except Fenced:
        raise
    except EverstepError as error:
        held = _failed(request, str(error))
    now_s = host.clock.unix_s()
    held = replace(held, drain_s=now_s - began_s)
    host.log.info(
        "request served",
        id=request.id,
        step=held.step,
        complete=held.complete,
        durable=held.durable,
        bytes_moved=held.bytes_moved,
        message=held.message,
        drain_s=round(held.drain_s, 3),
    )
    host.feed(RequestServed(incarnation=scope.incarnation, held=held, at_s=now_s))


def _failed(request: Request, why: str) -> Held:
    return Held(
        request_id=request.id,
        step=Step(0),
        where=(),
        durable=False,
        bytes_moved=0,
        complete=False,
        message=why,
    )


async def _serve(host: Host, scope: Scope, request: Request) -> Held:
    members = scope.members
    left_s = request.deadline_s - host.clock.unix_s()
    reserve_s = min(RESERVE_S_MAX, RESERVE_SHARE * left_s)
    leave = request.kind is RequestKind.LEAVE
    outcome = await _Agreeing(host, members, request).run(max(0.0, left_s - reserve_s))
    decided = await _decide(host, members, outcome)
    if decided is None and any(p.step_done > 0 for p in outcome[0].progress.values()):
        return _failed(request, f"no step is held whole ({outcome[1]})")
    if decided is None:
        # Before the first step: a fresh start loses nothing.
        return Held(
            request_id=request.id,
            step=Step(0),
            where=(),
            durable=False,
            bytes_moved=0,
            complete=True,
            message="nothing to save: no step is finished",
        )
    if decided.settled_because is not None and leave:
        await _end_workers(members, request, decided.step)
    holdings, moved = decided.holdings, 0
    doomed = set(request.doomed)
    survivors = tuple(h for h in members.hosts if h.slice not in doomed)
    if doomed and decided.tree is not None:
        moved, holdings = await _evacuate(members, request, decided, survivors)
    safe = tuple(h for h in holdings if h.host.slice not in doomed)
    gaps = find_gaps(decided.tree, safe) if decided.tree is not None else ()
    is_whole = decided.tree is not None and not gaps
    is_durable = decided.is_in_storage
    if (request.durable or not is_whole) and not is_durable and decided.tree is not None:
        # Where memory alone cannot keep it, storage may: all slices doomed, or a copy failed.
        await host.checkpoints.commit_now(scope, decided.step, by_s=request.deadline_s)
        is_durable = True
    message = decided.settled_because or ""
    if gaps and not is_durable and decided.tree is not None:
        message = f"nobody outside the doomed slices holds {name_region(decided.tree, gaps[0])}"
    return Held(
        request_id=request.id,
        step=decided.step,
        where=tuple(sorted({h.host for h in safe})),
        durable=is_durable,
        bytes_moved=moved,
        complete=is_whole or is_durable,
        message=message,
    )


_Act = Callable[[HostId], Awaitable[None]]


class _Agreeing:
    """Carries an agreement's effects out and feeds it what comes of them."""

    def __init__(self, host: Host, members: Members, request: Request) -> None:
        self._host = host
        self._members = members
        self._request = request
        self._events: asyncio.Queue[agreement.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, wait_s: float) -> tuple[Agreement, str | None]:
        """Agree within `wait_s`; the final state, and why it settled if it did."""
        following = self._host.following
        rate = following.pace.steps_per_s if following is not None else None
        state = Agreement(
            members=self._members.hosts,
            leave=self._request.kind is RequestKind.LEAVE,
            step_s=1.0 / rate if rate else None,
        )
        why: str | None = None
        self._events.put_nowait(agreement.Begun())
        timer = asyncio.get_running_loop().call_later(
            wait_s, self._events.put_nowait, agreement.TimeUp()
        )
        try:
            while state.stage not in (Stage.AGREED, Stage.SETTLED):
                state, effects = agreement.step(state, await self._events.get())
                for effect in effects:
                    why = self._perform(effect) or why
        finally:
            timer.cancel()
            for task in set(self._tasks):
                task.cancel()
        return state, why

    def _perform(self, effect: agreement.Effect) -> str | None:
        match effect:
            case agreement.Ask():
                self._each(effect.hosts, self._ask)
            case agreement.Propose():
                self._each(
                    effect.hosts, lambda h: self._propose(h, effect.step, leave=effect.leave)
                )
            case agreement.EndAt():
                self._each(effect.hosts, lambda h: self._end_at(h, effect.step))
            case agreement.AwaitHeld():
                self._each(effect.hosts, lambda h: self._await_held(h, effect.step))
            case agreement.Agreed():
                self._host.log.info("step agreed", step=effect.step)
            case agreement.Settle():
                self._host.log.info("settling for what memory holds", why=effect.why)
                return effect.why
            case _:
                assert_never(effect)
        return None

    def _each(self, hosts: Iterable[HostId], act: _Act) -> None:
        for host in hosts:
            task = asyncio.create_task(self._guard(host, act))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _guard(self, host: HostId, act: _Act) -> None:
        try:
            await act(host)
        except (PeerUnavailable, Fenced) as error:
            self._host.log.warning("member is silent", member=str(host), why=str(error))
            self._events.put_nowait(agreement.MemberSilent(host=host))

    async def _ask(self, host: HostId) -> None:
        asked_s = self._host.clock.monotonic_s()
        progress = await self._members.progress(host)
        reply_s = self._host.clock.monotonic_s() - asked_s
        self._events.put_nowait(
            agreement.ProgressSeen(host=host, progress=progress, reply_s=reply_s)
        )

    async def _propose(self, host: HostId, step: Step, *, leave: bool) -> None:
        hold = Hold(request_id=self._request.id, step=step, leave=leave)
        answer = await self._members.hold(host, hold)
        self._events.put_nowait(agreement.HoldAnswered(host=host, step=step, answer=answer))

    async def _end_at(self, host: HostId, step: Step) -> None:
        hold = Hold(request_id=self._request.id, step=step, leave=True, settled=True)
        await self._members.hold(host, hold)

    async def _await_held(self, host: HostId, step: Step) -> None:
        while True:
            progress = await self._members.wait_held(host, step, HELD_WAIT_S)
            if progress.step_held == step:
                self._events.put_nowait(agreement.StepHeld(host=host, step=step))
                return
            if not progress.has_worker:
                self._events.put_nowait(agreement.WorkerGone(host=host))
                return


async def gather_inventories(
    members: Members, hosts: Iterable[HostId], step: Step | None
) -> tuple[Inventory, ...]:
    """What each member holds; one that does not answer holds nothing that counts."""

    async def ask(host: HostId) -> Inventory:
        try:
            return await members.holdings(host, step)
        except PeerUnavailable:
            return Inventory(holdings=(), trees={})

    return tuple(await asyncio.gather(*(ask(host) for host in hosts)))


async def _decide(
    host: Host, members: Members, outcome: tuple[Agreement, str | None]
) -> Decided | None:
    """Find the step and its holdings; None when nothing is held and nothing was ever done."""
    state, why = outcome
    agreed = state.target if state.stage is Stage.AGREED else None
    inventories = await gather_inventories(members, members.hosts, agreed)
    commits = () if agreed is not None else host.checkpoints.known_commits
    aside = members.directive.restore_set_aside
    choice = rendezvous.choose(inventories, commits, aside)
    if isinstance(choice, rendezvous.NoChoice):
        raise PeerUnavailable(choice.why)
    if choice.step is None:
        return None
    trees = {f: tree for one in inventories for f, tree in one.trees.items()}
    tree = trees[choice.fingerprint] if choice.fingerprint is not None else None
    return Decided(
        step=choice.step,
        tree=tree,
        holdings=choice.holdings,
        is_in_storage=choice.is_in_storage,
        settled_because=why,
    )


async def _end_workers(members: Members, request: Request, step: Step) -> None:
    """The step is decided from memory: what the workers do from here on would be lost anyway."""
    hold = Hold(request_id=request.id, step=step, leave=True, settled=True)

    async def tell(host: HostId) -> None:
        try:
            await members.hold(host, hold)
        except PeerUnavailable:
            return  # Its agent ends it with the next directive, or is gone.

    await asyncio.gather(*(tell(host) for host in members.hosts))


async def _evacuate(
    members: Members, request: Request, decided: Decided, survivors: Sequence[HostId]
) -> tuple[int, tuple[Holding, ...]]:
    """Copy what only doomed slices hold; returns bytes moved and all holdings afterwards."""
    tree = decided.tree
    if tree is None or not survivors:
        return 0, decided.holdings
    fingerprint = tree.fingerprint
    moved = 0
    holdings = decided.holdings
    silent: set[HostId] = set()
    # Again once: a survivor, or a source, may fail in the middle.
    for _ in range(2):
        takers = [host for host in survivors if host not in silent]
        plan = plan_evacuation(tree, holdings, doomed=set(request.doomed), takers=takers)
        if not plan.takes:
            break
        takes = {
            taker: Take(
                step=decided.step,
                fingerprint=fingerprint,
                parts=parts,
                deadline_s=request.deadline_s,
            )
            for taker, parts in plan.takes.items()
        }
        results = await asyncio.gather(
            *(_take(members, taker, take) for taker, take in takes.items())
        )
        moved += sum(bytes_moved for _, bytes_moved in results)
        silent |= {taker for taker, bytes_moved in results if not bytes_moved}
        inventories = await gather_inventories(members, members.hosts, decided.step)
        holdings = _same_group(inventories, decided.holdings)
    return moved, holdings


def _same_group(inventories: Iterable[Inventory], like: Collection[Holding]) -> tuple[Holding, ...]:
    groups = {(h.step, h.incarnation, h.fingerprint) for h in like}
    return tuple(
        holding
        for inventory in inventories
        for holding in inventory.holdings
        if (holding.step, holding.incarnation, holding.fingerprint) in groups
    )


async def _take(members: Members, taker: HostId, take: Take) -> tuple[HostId, int]:
    try:
        taken = await members.take(taker, take, timeout_s=REPLY_TIMEOUT_S + 600.0)
    except PeerUnavailable:
        return taker, 0
    return taker, taken.bytes_moved
