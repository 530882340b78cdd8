"""Durable checkpoints, written by the agents while training goes on.

The lead plans who writes what, gathers the parts, and commits; every member writes its part out of
its own memory. All storage work is in threads of its own: storage that never answers holds up
nothing but itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from everstep.controller.api.ids import HostId, Incarnation, Step
from everstep.controller.api.wire import Directive, Settings
from everstep.runtime.agent.coverage import find_gaps, name_region
from everstep.runtime.agent.rendezvous import Committed, rank_of
from everstep.runtime.agent.supervisor.scope import Scope
from everstep.runtime.agent.wire import CommittedStep, Part, WriteOrder
from everstep.runtime.errors import (
    EverstepError,
    Fenced,
    PeerUnavailable,
    StorageUnavailable,
)
from everstep.runtime.layout.manifest import Holding, Inventory, Region, SnapshotManifest
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.store import Store

if TYPE_CHECKING:
    from everstep.runtime.agent.supervisor.host import Host
    from everstep.runtime.agent.supervisor.snapshots import Snapshots
    from everstep.runtime.topology.ownership import WritePlan

HELD_IN = "everstep.held-in"
"""Key of a commit's `extra`: the incarnation whose snapshot was written."""
NOT_HELD = "is no longer held"
"""What a member says of a step that later ones have overwritten."""
THREADS = 4
HELD_WAIT_S = 5.0
WRITE_S_MAX = 3600.0
RETRY_S_MIN, RETRY_S_MAX = 0.5, 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Retention:
    latest: int
    every_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldStep:
    """One step as the members hold it: same incarnation, same tree, whole."""

    step: Step
    incarnation: Incarnation
    tree: TreeSpec
    holdings: tuple[Holding, ...]


class Checkpoints:
    """This host's writing to storage; the lead's planning and committing with it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="storage")
        self._ledgers: dict[str, tuple[Store, RunLedger]] = {}
        self._give_up = threading.Event()
        self._committing = asyncio.Lock()
        self._step_last: Step | None = None
        self._committed_at_s = 0.0
        self._claimed: Incarnation | None = None
        self.known_commits: tuple[Committed, ...] = ()
        self.error: str | None = None
        self.error_step: Step | None = None
        """The step that `error` is of, if of any."""

    async def _in_thread(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, act)

    def _open(self, uri: str) -> tuple[Store, RunLedger]:
        from everstep.runtime.storage.open import open_store

        if uri not in self._ledgers:
            store = open_store(uri)
            self._ledgers[uri] = (store, RunLedger(store))
        return self._ledgers[uri]

    # Lead: the claim.

    async def claim(self, directive: Directive) -> Sequence[Committed]:
        """Claim the run for an incarnation and read what is committed.

        Raises:
            Fenced: the run belongs to a newer incarnation, or to another job.
            StorageUnavailable, StorageRefused, ManifestCorrupt: it cannot be read; the reason is
                kept for the report.
        """
        settings = directive.settings

        def act() -> tuple[Committed, ...]:
            _, ledger = self._open(settings.checkpoint_uri)
            ledger.claim(directive.incarnation, directive.job_uid)
            found: list[Committed] = []
            for commit in ledger.commits():
                if settings.restart_fresh and commit.job_uid != directive.job_uid:
                    continue
                held_in = commit.extra.get(HELD_IN, "")
                found.append(
                    Committed(
                        step=commit.step,
                        held_in=Incarnation(int(held_in)) if held_in.isdigit() else None,
                    )
                )
                self._committed_at_s = commit.committed_at_s
            return tuple(found)

        try:
            commits = await self._in_thread(act)
        except Fenced:
            raise
        except EverstepError as error:
            self._report(str(error))
            raise
        self._claimed = directive.incarnation
        self.known_commits = commits
        self._report(None)
        usable = [c.step for c in commits if c.step not in directive.restore_set_aside]
        self._step_last = max(usable, default=None)
        if self._step_last is not None:
            self._host.note_committed(self._step_last, self._committed_at_s)
        return commits

    def _report(self, error: str | None, step: Step | None = None) -> None:
        if (error, step) != (self.error, self.error_step):
            if error is not None:
                self._host.log.error("storage failed", why=error)
            self.error, self.error_step = error, step
            self._host.publish_soon()

    # Lead: periodic and final checkpoints.

    async def keep_writing(self, scope: Scope) -> None:
        """Commit every step that is due, for as long as the incarnation lives."""
        snapshots = self._host.snapshots
        if snapshots is None:
            return
        seen: Step | None = None
        while True:
            seen = await snapshots.wait_newer(seen)
            if not self.is_due(seen, scope.directive.settings):
                continue
            by_s = self._host.clock.unix_s() + WRITE_S_MAX
            try:
                await self.commit_now(scope, seen, by_s=by_s)
            except Fenced:
                raise
            except PeerUnavailable as error:
                # The members copied different steps, or copy faster than is written: they are
                # asked to hold one together, and that one is committed.
                self._host.log.info("asking for a step", after=seen, why=str(error))
                self._host.hold_durably(scope)
            except EverstepError as error:
                # The step does not exist. The next snapshot is due as well, and tries again.
                self._report(f"step {seen} was not committed: {error}", seen)

    def is_due(self, step: Step, settings: Settings) -> bool:
        """Whether a held step is to be made durable."""
        last = self._step_last or Step(0)
        if step <= last:
            return False
        every = settings.checkpoint_every_steps
        if every is not None and step // every > last // every:
            return True
        every_s = settings.checkpoint_every_s
        since_s = self._committed_at_s or (self._host.scope.begun_at_s if self._host.scope else 0.0)
        return every_s is not None and self._host.clock.unix_s() - since_s >= every_s

    async def make_final(self, scope: Scope, step: Step) -> None:
        """Make the last step durable, however long it takes; nothing is written twice."""
        pause_s = RETRY_S_MIN
        while True:
            try:
                if self._claimed != scope.incarnation:
                    await self.claim(scope.directive)
                if step == 0 or any(c.step == step for c in self.known_commits):
                    await self._tell(scope, step, self._committed_at_s)
                    return
                by_s = self._host.clock.unix_s() + WRITE_S_MAX
                await self.commit_now(scope, step, by_s=by_s)
                return
            except Fenced:
                raise
            except EverstepError as error:
                self._report(f"the final step {step} was not committed: {error}", step)
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_S_MAX, pause_s * 2)

    async def commit_now(self, scope: Scope, step: Step, *, by_s: float) -> None:
        """Write a held step and commit it.

        Raises:
            Fenced: a newer incarnation has the run.
            EverstepError: the step is not durable; why, in words.

        Durability: on return the step exists on storage.
        Blocking: to `by_s` at most. Training goes on.
        """
        async with self._committing:
            if self._step_last is not None and any(c.step == step for c in self.known_commits):
                await self._tell(scope, step, self._committed_at_s)
                return
            if self._claimed != scope.incarnation:
                await self.claim(scope.directive)
            left_s = max(0.1, by_s - self._host.clock.unix_s())
            try:
                async with asyncio.timeout(left_s):
                    held = await self._find_held(scope, step)
                    await self._write_and_commit(scope, held, by_s)
            except TimeoutError:
                raise StorageUnavailable(f"step {step} was not written in time") from None
        self._report(None)

    async def _find_held(self, scope: Scope, step: Step) -> _HeldStep:
        members = scope.members

        async def ask(host: HostId) -> Inventory:
            try:
                await members.wait_held(host, step, HELD_WAIT_S)
                return await members.holdings(host, step)
            except PeerUnavailable:
                return Inventory(holdings=(), trees={})

        inventories = await asyncio.gather(*(ask(host) for host in members.hosts))
        groups: dict[tuple[Incarnation, str], list[Holding]] = {}
        trees = {f: tree for one in inventories for f, tree in one.trees.items()}
        for inventory in inventories:
            for holding in inventory.holdings:
                key = (holding.incarnation, holding.fingerprint)
                groups.setdefault(key, []).append(holding)
        why = f"no member holds step {step}"
        for (incarnation, fingerprint), holdings in sorted(groups.items(), reverse=True):
            tree = trees[fingerprint]
            gaps = find_gaps(tree, holdings)
            if not gaps:
                return _HeldStep(
                    step=step, incarnation=incarnation, tree=tree, holdings=tuple(holdings)
                )
            why = f"nobody holds {name_region(tree, gaps[0])} of step {step}"
        raise PeerUnavailable(why)

    async def _write_and_commit(self, scope: Scope, held: _HeldStep, by_s: float) -> None:
        from everstep.runtime.checkpoint import commit as committing

        store, ledger = self._open(scope.directive.settings.checkpoint_uri)
        extra = {**await self._extra(scope, held), HELD_IN: str(held.incarnation)}
        draft, parts = await self._write_draft(scope, held, store, ledger, by_s)
        now_s = self._host.clock.unix_s()
        numbered = [(_rank(scope.directive, part.host), part.regions) for part in parts]
        await self._in_thread(
            lambda: committing.commit(
                store,
                ledger,
                draft=draft,
                step=held.step,
                incarnation=scope.incarnation,
                tree=held.tree,
                parts=numbered,
                extra=extra,
                now_s=now_s,
            )
        )
        self._step_last, self._committed_at_s = held.step, now_s
        self.known_commits = (
            *(c for c in self.known_commits if c.step < held.step),
            Committed(step=held.step, held_in=held.incarnation),
        )
        self._host.log.info(
            "step committed",
            step=held.step,
            writers=len(parts),
            bytes=sum(part.bytes_written for part in parts),
        )
        await self._tell(scope, held.step, now_s)
        await self._retain(scope, store, ledger, now_s)

    async def _write_draft(
        self, scope: Scope, held: _HeldStep, store: Store, ledger: RunLedger, by_s: float
    ) -> tuple[str, list[Part]]:
        """A draft that covers the state, and who wrote what; tried anew without who failed."""
        from everstep.runtime.checkpoint import commit as committing
        from everstep.runtime.topology.ownership import plan_writes

        failed: dict[HostId, str] = {}
        while True:
            holdings = tuple(h for h in held.holdings if h.host not in failed)
            if find_gaps(held.tree, holdings):
                is_gone = all(why.endswith(NOT_HELD) for why in failed.values())
                raise (PeerUnavailable if is_gone else StorageUnavailable)(
                    "; ".join(failed.values())
                )
            plan = await self._in_thread(partial(plan_writes, held.tree, holdings))
            draft = await self._in_thread(
                partial(committing.begin, store, held.step, scope.incarnation, ledger=ledger)
            )
            parts, errors = await self._write_parts(scope, held, plan, draft, by_s)
            if not errors:
                return draft, parts
            failed |= errors
            await self._in_thread(partial(committing.discard, store, draft, ledger=ledger))

    async def _extra(self, scope: Scope, held: _HeldStep) -> Mapping[str, str]:
        """What travels with the step; equal on all hosts, so the first that answers is asked."""
        own = scope.members.own
        snapshots = self._host.snapshots
        for holding in held.holdings:
            try:
                if holding.host == own and snapshots is not None:
                    return snapshots.manifest(holding.id).extra
                peer = scope.members.peers[holding.host]
                path = f"/v1/holdings/{holding.id}/manifest"
                manifest = await self._host.client.get(
                    peer, path, SnapshotManifest, timeout_s=HELD_WAIT_S
                )
            except (KeyError, PeerUnavailable):
                continue
            return manifest.extra
        raise PeerUnavailable(f"step {held.step} {NOT_HELD}")

    async def _write_parts(
        self,
        scope: Scope,
        held: _HeldStep,
        plan: WritePlan,
        draft: str,
        by_s: float,
    ) -> tuple[list[Part], dict[HostId, str]]:
        members = scope.members

        async def write(host: HostId) -> Part:
            order = WriteOrder(
                step=held.step,
                uri=scope.directive.settings.checkpoint_uri,
                draft=draft,
                regions=plan.regions[host],
                chunks=plan.chunks,
                deadline_s=by_s,
                held_in=held.incarnation,
                fingerprint=held.tree.fingerprint,
            )
            try:
                timeout_s = max(0.1, by_s - self._host.clock.unix_s())
                return await members.write(host, order, timeout_s)
            except PeerUnavailable as error:
                return Part(host=host, regions=(), bytes_written=0, error=str(error))

        parts = await asyncio.gather(*(write(host) for host in plan.regions if plan.regions[host]))
        errors = {
            part.host: f"host {part.host}: {part.error}" for part in parts if part.error is not None
        }
        return list(parts), errors

    async def _tell(self, scope: Scope, step: Step, at_s: float) -> None:
        """Tell every member that the step is durable; who is gone need not know."""
        committed = CommittedStep(step=step, committed_at_s=at_s)

        async def tell(host: HostId) -> None:
            try:
                await scope.members.committed(host, committed)
            except (PeerUnavailable, Fenced) as error:
                self._host.log.warning("commit not told", member=str(host), why=str(error))

        await asyncio.gather(*(tell(host) for host in scope.members.hosts))

    async def _retain(self, scope: Scope, store: Store, ledger: RunLedger, now_s: float) -> None:
        from everstep.runtime.checkpoint import clean
        from everstep.runtime.checkpoint.retention import choose_dropped

        settings = scope.directive.settings
        rule = _Retention(
            latest=settings.retention_latest, every_steps=settings.retention_every_steps
        )
        job_uid = scope.directive.job_uid

        def act() -> None:
            dropped = choose_dropped(ledger.commits(), rule, now_s, job_uid=job_uid)
            if dropped:
                clean.drop(store, ledger, dropped)
            clean.collect(store, ledger)

        try:
            await self._in_thread(act)
        except Fenced:
            raise
        except EverstepError as error:
            # The step itself is committed; only old ones take more room than they should.
            self._host.log.warning("old checkpoints not dropped", why=str(error))

    # Member: the part of one host.

    async def write(self, order: WriteOrder) -> Part:
        """Write this host's regions of a held step; what fails is said in the part."""
        snapshots, directive = self._host.snapshots, self._host.session.directive
        own = self._host.options.host
        if snapshots is None or directive is None:
            return Part(host=own, regions=(), bytes_written=0, error="nothing is held here")
        rank = _rank(directive, own)
        left_s = max(0.1, order.deadline_s - self._host.clock.unix_s())
        self._give_up.clear()
        try:
            async with asyncio.timeout(left_s):
                written = await self._in_thread(lambda: self._write(order, snapshots, rank))
        except (EverstepError, KeyError) as error:
            return Part(host=own, regions=(), bytes_written=0, error=str(error))
        except TimeoutError:
            return Part(host=own, regions=(), bytes_written=0, error="the deadline is over")
        snapshots.grant()
        return Part(host=own, regions=order.regions, bytes_written=written)

    def _write(self, order: WriteOrder, snapshots: Snapshots, rank: int) -> int:
        """In a thread. The pins end with it, also when nobody waits for it any more."""
        from everstep.runtime.checkpoint.draft import write_regions

        store, _ = self._open(order.uri)
        shelf = snapshots.shelf
        found = [
            (id_, manifest)
            for id_, manifest in shelf.manifests()
            if (manifest.step, manifest.incarnation) == (order.step, order.held_in)
            and manifest.plot.tree.fingerprint == order.fingerprint
        ]
        with ExitStack() as pins:
            for id_, _ in found:
                pins.enter_context(shelf.pin(id_))
            if not found:
                raise PeerUnavailable(f"step {order.step} {NOT_HELD}")

            def read(region: Region) -> NDArray[Any]:
                if self._give_up.is_set():
                    raise StorageUnavailable("given up: the slot is needed for a request")
                for id_, _ in found:
                    try:
                        return shelf.region(id_, region)
                    except KeyError:
                        continue
                raise PeerUnavailable(f"a region of step {order.step} is not held")

            return write_regions(
                store,
                draft=order.draft,
                writer=rank,
                tree=found[0][1].plot.tree,
                chunks=order.chunks,
                regions=order.regions,
                read=read,
            )

    def yield_slots(self) -> None:
        """Give up a write that is under way: a request needs its slot."""
        self._give_up.set()

    def close(self) -> None:
        self._give_up.set()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _rank(directive: Directive, host: HostId) -> int:
    rank = rank_of(directive, host)
    return 0 if rank is None else rank
