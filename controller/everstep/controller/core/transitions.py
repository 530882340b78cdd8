"""The few moves that a ledger can make: halt, go, finish; and what they cost.

Every way from one incarnation to the next is `halt` and then `go`, often within one pass. Both only
change the ledger. What is to be done about it follows from the ledger alone (`actions`), so a crash
after it was persisted loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from everstep.controller.api.ids import SliceId, Step
from everstep.controller.api.reasons import TABLE, Budget, Reason
from everstep.controller.core.crashes import uncount
from everstep.controller.core.health import SliceHealth
from everstep.controller.core.ledger import (
    Budgets,
    Charge,
    Finish,
    SliceMemory,
    Stage,
    Standby,
    Turnover,
)
from everstep.controller.core.policy import (
    HOUR_S,
    count_failure,
    failures_in_window,
    needs_start,
)
from everstep.controller.core.turn import Turn

COALESCE_S = 1.0
"""How long what looks like a consequence waits for its cause, and how long after a counted failure
a disruption may still prove to have been the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why the members stop."""

    reason: Reason
    at_s: float
    """First trace."""
    slice: SliceId | None = None
    message: str = ""
    """Who, where no ending and no lost slice says it."""


def halt(
    turn: Turn,
    cause: Cause,
    survivors: Sequence[SliceId],
    *,
    lost: bool,
    drain_s: float | None = None,
) -> None:
    """Stop the members and keep the memory of the survivors, until `go` decides what follows."""
    ledger, now_s = turn.ledger, turn.now_s
    incident, step = ledger.incident, turn.newest_step()
    wait_s = turn.spec.elasticity.wait_for_replacement_seconds
    count_wanted = max(len(ledger.members), 1)
    if ledger.stage is Stage.RUN and ledger.turnover is not None and ledger.turnover.lost:
        # A loss during a recovery: what was waited for before is still waited for.
        count_wanted = max(count_wanted, ledger.turnover.count_wanted)
    turn.change(
        stage=Stage.WAIT,
        members=tuple(sorted(survivors)),
        fresh=(),
        incident=None,
        turnover=Turnover(
            reason=cause.reason,
            slice=cause.slice,
            cause_at_s=min(cause.at_s, now_s),
            decided_at_s=now_s if incident is None else incident.decided_at_s,
            halted_at_s=now_s,
            from_slices=len(ledger.members),
            count_wanted=count_wanted,
            lost=lost,
            wait_until_s=now_s + wait_s if lost else None,
            step_before=step,
            step_left=turn.step_left(),
            drain_s=drain_s,
        ),
        trained_since_s=None,
        step_seen=step,
        outage_since_s=None,
        disturbed_at_s=now_s if lost else ledger.disturbed_at_s,
    )


def go(turn: Turn, members: Sequence[SliceId]) -> None:
    """Begin the next incarnation. The number is in the ledger before anything is done in its name
    (invariant 1).
    """
    ledger, turnover = turn.ledger, turn.ledger.turnover
    chosen = tuple(sorted(members))
    fresh = tuple(id_ for id_ in chosen if needs_start(turn, id_))
    incarnation = turn.next_incarnation()
    reason = Reason.FIRST_START if turnover is None else turnover.reason
    if turnover is not None:
        # What the survivors told of while the job waited; their next reports are of the new one.
        before = max(turnover.step_before, turn.newest_step())
        turnover = replace(turnover, started_at_s=turn.now_s, step_before=before)
    memories = ledger.slices
    if ledger.incarnation > 0:
        for id_ in fresh:
            memories = _remember(memories, id_, restarts=1)
    turn.change(
        incarnation=incarnation,
        members=chosen,
        stage=Stage.RUN,
        fresh=fresh,
        incarnation_at_s=turn.now_s,
        cause=reason,
        turnover=turnover,
        incident=None,
        requests=0,
        standby=tuple(entry for entry in ledger.standby if entry.id not in chosen),
        slices=memories,
        started_at_s=turn.now_s if ledger.started_at_s is None else ledger.started_at_s,
        grow_asked=ledger.grow_asked and len(chosen) < turn.spec.slices.desired,
    )
    count = len(chosen)
    text = f"Incarnation {incarnation} on {count} slice{'s' if count > 1 else ''} ("
    text += ", ".join(str(id_) for id_ in chosen) + f"): {TABLE[reason].sentence}"
    turn.tell(f"incarnation-{incarnation}", reason, text, turnover.slice if turnover else None)


def finish(turn: Turn, reason: Reason, message: str, *, succeeded: bool = False) -> None:
    """End the job for ever (invariant 8)."""
    turn.change(
        stage=Stage.FINISHED,
        incident=None,
        turnover=None,
        standby=(),
        fresh=(),
        outage_since_s=None,
        step_seen=turn.newest_step(),
        finish=Finish(succeeded=succeeded, reason=reason, message=message, at_s=turn.now_s),
    )
    turn.tell(f"finished-{reason.value}", reason, message)


def charge_disruption(
    turn: Turn, reason: Reason, at_s: float, slice_: SliceId, message: str = ""
) -> None:
    """Count one disruption of one slice. It never touches the failure budget (G10).

    A failure that was counted a moment ago and proves to be its consequence is taken back: the
    first cause decides, also when it was seen second (invariant 4).
    """
    budgets = turn.ledger.budgets
    charge = budgets.charge
    if charge is not None and _explains(charge, at_s, slice_):
        if charge.crashed is not None:
            uncount(turn, charge.crashed)
        budgets = replace(
            budgets,
            failures=budgets.failures - 1,
            failed_at_s=budgets.failed_at_s[:-1],
            failures_in_a_row=max(0, budgets.failures_in_a_row - 1),
            charge=None,
        )
    budgets = replace(
        budgets,
        disruptions=budgets.disruptions + 1,
        disrupted_at_s=_note_disruption(turn, budgets),
    )
    memories = _remember(turn.ledger.slices, slice_, disruptions=1, reason=reason)
    turn.change(budgets=budgets, slices=memories)
    key = f"lost-{turn.ledger.incarnation}-{slice_}"
    text = message or f"Slice {slice_}: {TABLE[reason].sentence}"
    turn.tell(key, reason, text, slice_)


def _note_disruption(turn: Turn, budgets: Budgets) -> tuple[float, ...]:
    """Return the times that the storm guard counts, this one among them.

    Slices that go together are one disruption: a lost zone is no storm.
    """
    hour = tuple(at for at in budgets.disrupted_at_s if at > turn.now_s - HOUR_S)
    limit = turn.spec.restart.max_disruptions_per_hour
    if hour and turn.now_s - hour[-1] <= COALESCE_S:
        return hour
    if len(hour) < limit <= len(hour) + 1:
        text = f"{limit} disruptions within an hour (restart.maxDisruptionsPerHour): "
        text += TABLE[Reason.DISRUPTION_STORM].sentence
        turn.tell(f"storm-{turn.ledger.incarnation}", Reason.DISRUPTION_STORM, text)
    # Only the newest can matter for the storm guard, so the ledger stays small in any storm.
    return (*hour, turn.now_s)[-limit:]


def _explains(charge: Charge, at_s: float, slice_: SliceId) -> bool:
    if charge.slice == slice_ or charge.reason is Reason.COLLECTIVE_ERROR:
        return at_s <= charge.at_s + COALESCE_S
    return at_s <= charge.at_s


def charge_failure(turn: Turn, cause: Cause, message: str, *, crashed: Step | None = None) -> None:
    """Count one failure after `halt`: spend the budget or end the job, and set the backoff."""
    budgets = turn.ledger.budgets
    row, delay_s = count_failure(turn, budgets, cause.reason)
    window = (*failures_in_window(turn, budgets), turn.now_s)
    allowed = turn.spec.restart.max_restarts
    budgets = replace(
        budgets,
        failures=budgets.failures + 1,
        failed_at_s=window[-(allowed + 1) :],
        failures_in_a_row=row,
        step_at_failure=turn.newest_step(),
        charge=Charge(slice=cause.slice, reason=cause.reason, at_s=cause.at_s, crashed=crashed),
    )
    turn.change(budgets=budgets)
    count = budgets.failures
    turn.tell(f"failure-{turn.ledger.incarnation}-{count}", cause.reason, message, cause.slice)
    if len(window) > allowed:
        text = f"{len(window)} failures within {turn.spec.restart.window_seconds:g} s"
        text += f", {allowed} are allowed; the last one: {message}"
        finish(turn, Reason.RESTART_BUDGET_EXHAUSTED, text)
    elif delay_s > 0 and turn.ledger.turnover is not None:
        not_before_s = turn.now_s + delay_s
        turn.change(turnover=replace(turn.ledger.turnover, not_before_s=not_before_s))


def charge_lost(turn: Turn, lost: Sequence[SliceHealth]) -> None:
    """Count every lost slice whose reason is a disruption, and remember why the others left."""
    for one in lost:
        reason = one.reason or Reason.SLICE_LOST
        if TABLE[reason].budget is Budget.DISRUPTION:
            charge_disruption(turn, reason, one.at_s, one.id)
        else:
            turn.change(slices=_remember(turn.ledger.slices, one.id, reason=reason))


def rest_standby(turn: Turn, entry: Standby) -> Standby:
    """Return the entry after a failed attempt, with the time of the next one."""
    backoff = turn.spec.restart.backoff
    rest_s = min(backoff.max_seconds, backoff.initial_seconds * 2 ** min(entry.attempts, 32))
    return replace(entry, attempts=entry.attempts + 1, since_s=turn.now_s + max(rest_s, 1.0))


def _remember(
    memories: tuple[SliceMemory, ...],
    id_: SliceId,
    *,
    restarts: int = 0,
    disruptions: int = 0,
    reason: Reason | None = None,
) -> tuple[SliceMemory, ...]:
    known = {memory.id: memory for memory in memories}
    old = known.get(id_, SliceMemory(id=id_))
    known[id_] = replace(
        old,
        restarts=old.restarts + restarts,
        disruptions=old.disruptions + disruptions,
        reason=reason or old.reason,
    )
    return tuple(known[key] for key in sorted(known))
