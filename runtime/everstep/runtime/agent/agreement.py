"""The lead's agreement on the step at which all members hold. Pure: `step(state, event)`.

Ask everyone how far they are, propose a step that nobody has finished, ask everyone to snapshot
it. Only when all have accepted are they told to leave after it: a proposal that somebody has
already passed costs one more snapshot, and never strands one half in a collective that the other
half has left.

The order to leave may come late, too. A step needs every member, so when one of them heard it in
time and leaves, no member finishes a later step, and those that had passed by lose nothing when
they are ended there. When none heard it in time, none has left, and a later step is proposed.

Numbered invariants: (A1) a member is told to leave only at a step that every reachable member
accepted; (A2) proposals only grow; (A3) rounds are bounded, and whatever happens the agreement
ends by its deadline: with the agreed step, or by settling for what memory holds; (A4) while all
members live and answer, no step that was finished is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import assert_never

from everstep.controller.api.ids import HostId, Step
from everstep.runtime.agent.wire import HoldAnswer, Progress

ROUNDS_MAX = 6


class Stage(Enum):
    ASKING = "asking"
    PROPOSING = "proposing"
    CONFIRMING = "confirming"
    HOLDING = "holding"
    AGREED = "agreed"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """(1) `silent` and the keys of `progress` are members; (2) `target` is None while asking."""

    members: tuple[HostId, ...]
    leave: bool
    step_s: float | None
    """Seconds a step takes, as far as the lead has seen; None when it has seen none."""
    reply_s: float = 0.02
    """How long an exchange with all members takes."""
    stage: Stage = Stage.ASKING
    round: int = 0
    target: Step | None = None
    progress: Mapping[HostId, Progress] = field(default_factory=dict[HostId, Progress])
    silent: frozenset[HostId] = frozenset()
    answered: frozenset[HostId] = frozenset()
    held: frozenset[HostId] = frozenset()
    passed: frozenset[HostId] = frozenset()
    """Of `answered`: those that had finished the step already, and hold it."""
    furthest: int = 0
    """Newest step that any member said it had finished."""

    @property
    def reachable(self) -> tuple[HostId, ...]:
        return tuple(host for host in self.members if host not in self.silent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """Start: nobody has been asked yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSeen:
    host: HostId
    progress: Progress
    reply_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSilent:
    """A member did not answer within its time."""

    host: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldAnswered:
    host: HostId
    step: Step
    answer: HoldAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeld:
    """A member's memory holds this step, complete."""

    host: HostId
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """A member's worker ended before it held the step."""

    host: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUp:
    """No time is left to wait for a boundary."""


Event = Begun | ProgressSeen | MemberSilent | HoldAnswered | StepHeld | WorkerGone | TimeUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask these members for their progress."""

    hosts: tuple[HostId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """Ask these members to hold the step; `leave` when it is confirmed."""

    hosts: tuple[HostId, ...]
    step: Step
    leave: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAt:
    """These members hold the step and have passed it; others leave at it: end their workers."""

    hosts: tuple[HostId, ...]
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitHeld:
    """Wait until each of these members' memory holds the step."""

    hosts: tuple[HostId, ...]
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """Every reachable member holds this step."""

    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """No boundary will be reached in time: take the newest step that memory holds whole."""

    why: str


Effect = Ask | Propose | EndAt | AwaitHeld | Agreed | Settle


def choose_margin(*, step_s: float | None, reply_s: float, round_number: int) -> int:
    """How many steps ahead of the furthest member to propose.

    Two exchanges (proposal and confirmation) must fit before the step ends, and one step is always
    under way. Each round that came too late doubles it.
    """
    under_way = 1
    passing = 1 if step_s is None or step_s <= 0 else int(2 * reply_s / step_s)
    return (under_way + passing) << round_number


def step(state: Agreement, event: Event) -> tuple[Agreement, tuple[Effect, ...]]:
    """Take in one event."""
    if state.stage in (Stage.AGREED, Stage.SETTLED):
        return state, ()
    match event:
        case Begun():
            return state, (Ask(hosts=state.members),)
        case ProgressSeen():
            return _take_progress(state, event)
        case MemberSilent():
            return _take_silence(state, event.host)
        case HoldAnswered():
            return _take_answer(state, event)
        case StepHeld():
            return _take_held(state, event)
        case WorkerGone():
            return _settle(state, f"the worker of host {event.host} ended before the agreed step")
        case TimeUp():
            return _settle(state, "the deadline is near and no step boundary was reached")
        case _:
            assert_never(event)


def _settle(state: Agreement, why: str) -> tuple[Agreement, tuple[Effect, ...]]:
    return replace(state, stage=Stage.SETTLED), (Settle(why=why),)


def _take_progress(state: Agreement, event: ProgressSeen) -> tuple[Agreement, tuple[Effect, ...]]:
    state = replace(
        state,
        progress={**state.progress, event.host: event.progress},
        reply_s=max(state.reply_s if state.progress else 0.0, event.reply_s),
    )
    return _propose_when_all_asked(state)


def _take_silence(state: Agreement, host: HostId) -> tuple[Agreement, tuple[Effect, ...]]:
    state = replace(state, silent=state.silent | {host})
    if not state.reachable:
        return _settle(state, "no member answers")
    match state.stage:
        case Stage.ASKING:
            return _propose_when_all_asked(state)
        case Stage.PROPOSING | Stage.CONFIRMING:
            return _advance_when_all_answered(state)
        case Stage.HOLDING:
            return _finish_when_all_held(state)
        case Stage.AGREED | Stage.SETTLED:
            return state, ()
        case _:
            assert_never(state.stage)


def _propose_when_all_asked(state: Agreement) -> tuple[Agreement, tuple[Effect, ...]]:
    if state.stage is not Stage.ASKING:
        return state, ()
    known = [state.progress[host] for host in state.reachable if host in state.progress]
    if len(known) < len(state.reachable):
        return state, ()
    if not all(p.is_training for p in known):
        # A member that imports, restores or compiles keeps all others from finishing a step. What
        # memory holds is then all there is, and taking it costs nothing.
        return _settle(state, "a member is not training yet")
    return _propose(state, max(p.step_done for p in known))


def _propose(state: Agreement, furthest: int) -> tuple[Agreement, tuple[Effect, ...]]:
    margin = choose_margin(step_s=state.step_s, reply_s=state.reply_s, round_number=state.round)
    target = Step(max(furthest + margin, (state.target or 0) + 1))
    state = replace(
        state,
        stage=Stage.PROPOSING,
        target=target,
        answered=frozenset(),
        passed=frozenset(),
        furthest=max(state.furthest, furthest),
    )
    return state, (Propose(hosts=state.reachable, step=target, leave=False),)


def _take_answer(state: Agreement, event: HoldAnswered) -> tuple[Agreement, tuple[Effect, ...]]:
    if event.step != state.target or state.stage not in (Stage.PROPOSING, Stage.CONFIRMING):
        return state, ()  # An answer to an earlier proposal.
    if not event.answer.accepted:
        if state.stage is Stage.CONFIRMING:
            # Others have left already (A1 held when they were told): a later step is out of reach.
            return _settle(state, f"host {event.host} passed step {event.step} without a snapshot")
        return _propose_later(state, max(event.answer.step_done, event.step))
    has_passed = event.answer.step_done >= event.step
    state = replace(
        state,
        answered=state.answered | {event.host},
        passed=state.passed | {event.host} if has_passed else state.passed,
        furthest=max(state.furthest, event.answer.step_done),
    )
    return _advance_when_all_answered(state)


def _propose_later(state: Agreement, furthest: int) -> tuple[Agreement, tuple[Effect, ...]]:
    if state.round + 1 >= ROUNDS_MAX:
        return _settle(state, f"no step was agreed on in {ROUNDS_MAX} rounds")
    return _propose(replace(state, round=state.round + 1), furthest)


def _advance_when_all_answered(state: Agreement) -> tuple[Agreement, tuple[Effect, ...]]:
    target = state.target
    if target is None or not state.answered.issuperset(state.reachable):
        return state, ()
    hosts = state.reachable
    if state.leave and state.stage is Stage.PROPOSING:
        state = replace(state, stage=Stage.CONFIRMING, answered=frozenset(), passed=frozenset())
        return state, (Propose(hosts=hosts, step=target, leave=True),)
    passed = tuple(host for host in hosts if host in state.passed)
    end: tuple[Effect, ...] = ()
    if state.leave and passed:
        if len(passed) == len(hosts):
            # Nobody heard it in time, so nobody has left (A4).
            return _propose_later(state, max(state.furthest, target))
        end = (EndAt(hosts=passed, step=target),)
    state = replace(state, stage=Stage.HOLDING)
    state, effects = _finish_when_all_held(state)
    return state, (*end, *(effects or (AwaitHeld(hosts=hosts, step=target),)))


def _take_held(state: Agreement, event: StepHeld) -> tuple[Agreement, tuple[Effect, ...]]:
    if event.step != state.target:
        return state, ()
    return _finish_when_all_held(replace(state, held=state.held | {event.host}))


def _finish_when_all_held(state: Agreement) -> tuple[Agreement, tuple[Effect, ...]]:
    if (
        state.stage is not Stage.HOLDING
        or state.target is None
        or not state.held.issuperset(state.reachable)
    ):
        return state, ()
    return replace(state, stage=Stage.AGREED), (Agreed(step=state.target),)
