"""The join, done: the lead gathers and answers, every host asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from everstep.controller.api.ids import HostId, Step
from everstep.controller.api.wire import Directive
from everstep.runtime.agent import rendezvous
from everstep.runtime.agent.rendezvous import Choice, Committed, Gathering, NoChoice, Place
from everstep.runtime.agent.wire import Join, Joined
from everstep.runtime.clock import Clock
from everstep.runtime.errors import EverstepError, Fenced, PeerUnavailable, StorageRefused

FIELD = "spec.checkpoint.uri"
FIRST = 1
"""The incarnation that a job starts with."""
STORAGE_PATIENCE_S = 5.0
"""So long storage may keep a join waiting that could go on from memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparations:
    """What the lead does while the members come in."""

    claim: Callable[[], Awaitable[Sequence[Committed]]]
    """Claim the run for this incarnation and read what is committed."""
    start_service: Callable[[], Awaitable[str]]
    """Start the coordination service; returns its address, empty for one process alone."""
    step_committed: Step | None
    """Newest commit that this host knows of, should storage not answer."""


class LeadJoin:
    """The lead's side of one join. All members get their answer at the same moment."""

    def __init__(
        self,
        directive: Directive,
        *,
        by_s: float,
        prepare: Preparations,
        clock: Clock,
        log: FilteringBoundLogger,
    ) -> None:
        self._gathering = Gathering(directive=directive)
        self._by_s = by_s
        self._prepare = prepare
        self._clock = clock
        self._log = log
        self._complete = asyncio.Event()
        self._answers: asyncio.Future[dict[HostId, Joined]] = (
            asyncio.get_running_loop().create_future()
        )
        self._is_answered = False
        self._refused: StorageRefused | None = None
        self.fenced: Fenced | None = None

    async def receive(self, join: Join) -> Joined:
        """Take a member's join in; its answer comes when all are in, or the time is over.

        Blocking: until the join deadline at most.
        """
        if self._is_answered:
            return self._answer_late(join)
        outcome = rendezvous.receive(self._gathering, join)
        if isinstance(outcome, str):
            return Joined(failed=outcome)
        self._gathering = outcome
        if outcome.is_complete:
            self._complete.set()
        answers = await asyncio.shield(self._answers)
        return answers.get(join.host, Joined(failed="the join is over"))

    def _answer_late(self, join: Join) -> Joined:
        answers = self._answers.result() if self._answers.done() else {}
        found = answers.get(join.host)
        if found is not None and found.assignment is None:
            return found
        missing = self._gathering.missing
        if missing:
            return Joined(missing=missing)
        number = self._gathering.directive.incarnation
        return Joined(failed=f"incarnation {number} has started already; a host joins it once")

    async def run(self) -> None:
        """Gather, prepare, choose, answer."""
        claiming = asyncio.ensure_future(self._prepare.claim())
        starting = asyncio.ensure_future(self._prepare.start_service())
        try:
            async with asyncio.timeout(max(0.0, self._by_s - self._clock.unix_s())):
                await self._complete.wait()
                address = await starting
                commits = await self._claimed(claiming)
        except TimeoutError:
            self._answer(self._without())
        except EverstepError as error:
            if isinstance(error, Fenced):
                self.fenced = error
            failed = Joined(failed=str(error))
            self._answer(dict.fromkeys(self._gathering.joins, failed))
        else:
            self._choose(commits, address)
        finally:
            for task in (claiming, starting):
                task.cancel()
                task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _claimed(
        self, claiming: asyncio.Future[Sequence[Committed]]
    ) -> Sequence[Committed] | str:
        """What is committed; or why that is not known, once memory is seen to be enough (G3)."""
        try:
            async with asyncio.timeout(STORAGE_PATIENCE_S):
                return await asyncio.shield(claiming)
        except Fenced:
            raise
        except EverstepError as error:
            self._note_refusal(error)
            # Memory may hold everything; whether it does is for `choose` to say.
            return str(error)
        except TimeoutError:
            why = f"no answer within {STORAGE_PATIENCE_S:g} s"
        if isinstance(self._choice(why), NoChoice):
            try:
                return await claiming
            except Fenced:
                raise
            except EverstepError as error:
                self._note_refusal(error)
                return str(error)
        return why

    def _note_refusal(self, error: EverstepError) -> None:
        """Storage that refuses a run which never began will refuse it again.

        One that trained before was taken then: what storage lacks may come back.
        """
        if isinstance(error, StorageRefused) and self._gathering.directive.incarnation == FIRST:
            self._refused = error

    def _choice(self, commits: Sequence[Committed] | str) -> Choice | NoChoice:
        return rendezvous.choose(
            [join.inventory for join in self._gathering.joins.values()],
            commits,
            self._gathering.directive.restore_set_aside,
            step_committed=self._prepare.step_committed,
        )

    def _choose(self, commits: Sequence[Committed] | str, address: str) -> None:
        directive = self._gathering.directive
        choice = self._choice(commits)
        if isinstance(choice, NoChoice):
            self._log.error("no step can be restored", why=choice.why)
            if self._refused is not None:
                why = f"{FIELD} is refused: {self._refused}"
                final = Joined(failed=why, is_final=True)
                self._answer(dict.fromkeys(self._gathering.joins, final))
                return
        else:
            self._log.info(
                "step chosen",
                step=choice.step,
                holdings=len(choice.holdings),
                in_storage=choice.is_in_storage,
            )
            if choice.is_set_aside:
                self._log.warning(
                    "every step that can be restored is set aside; the newest is tried again",
                    step=choice.step,
                )
        place = Place(coordinator_address=address, uri=directive.settings.checkpoint_uri)
        self._answer(rendezvous.answer(self._gathering, choice, place))

    def _without(self) -> dict[HostId, Joined]:
        missing = self._gathering.missing
        if missing:
            self._log.warning("hosts did not join in time", missing=[str(h) for h in missing])
            return {host: Joined(missing=missing) for host in self._gathering.joins}
        why = "storage or the coordination service did not answer before the join deadline"
        return {host: Joined(failed=why) for host in self._gathering.joins}

    def _answer(self, answers: dict[HostId, Joined]) -> None:
        self._is_answered = True
        if not self._answers.done():
            self._answers.set_result(answers)

    def abandon(self) -> None:
        """The incarnation is over; who still waits is told so."""
        if not self._answers.done():
            failed = Joined(failed="the incarnation has ended")
            self._answer(dict.fromkeys(self._gathering.joins, failed))


async def ask_lead(
    ask: Callable[[float], Awaitable[Joined]], *, by_s: float, clock: Clock
) -> Joined:
    """Ask until the lead answers or the deadline is over; a lead that is away counts as missing.

    Args:
        ask: one request with the given time-out; tries again by itself while the lead is not up.
        by_s: Unix seconds.
        clock: for what is left.
    """
    left_s = max(0.1, by_s - clock.unix_s() + 1.0)
    try:
        return await ask(left_s)
    except PeerUnavailable as error:
        return Joined(failed=str(error))
