"""Planned changes: the request that asks for what is demanded, and its end.

One incident is open at a time. While its drain lasts, whatever else is announced joins it
(invariant 3): the request is extended under a new id, or turned into one of a stronger kind. The
drain ends with the lead's answer or with the deadline, whichever is first (invariant 5).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from everstep.controller.api.ids import SliceId
from everstep.controller.api.reasons import Reason
from everstep.controller.api.spec import OnLoss
from everstep.controller.api.wire import ExitCause, Held, HostPhase
from everstep.controller.core.deadlines import deadline_text
from everstep.controller.core.demands import Demand, find_demand
from everstep.controller.core.facts import note_trouble
from everstep.controller.core.ledger import Incident, IncidentKind, Stage
from everstep.controller.core.model import ProcessState
from everstep.controller.core.policy import ready_standby
from everstep.controller.core.transitions import Cause, charge_disruption, finish, halt
from everstep.controller.core.turn import Turn

_ENDING = (IncidentKind.DELETE, IncidentKind.DEADLINE, IncidentKind.SUSPEND)
"""After these nothing goes on, so the step has to be durable and a loss changes nothing."""


def advance_incident(turn: Turn) -> None:
    """Open, extend, withdraw or conclude the incident of a running job."""
    demand = find_demand(turn)
    incident = turn.ledger.incident
    if incident is not None:
        answer = turn.answer()
        is_over = answer is not None or turn.now_s >= incident.deadline_s
        if is_over and demand is not None and _brings_notice(turn, incident, demand):
            # What only those slices hold is taken from them before anybody goes on without them.
            _open(turn, demand)
            turn.wake_at(demand.deadline_s)
            return
        if is_over:
            _conclude(turn, incident, demand, answer)
            return
        turn.wake_at(incident.deadline_s)
        keeps = incident.kind is IncidentKind.SCALE_UP and ready_standby(turn)
        if demand is None and not keeps:
            _withdraw(turn, incident)
            return
        if demand is None or not _replaces(incident, demand):
            return
    elif demand is None:
        return
    _open(turn, demand)
    opened = turn.ledger.incident
    if opened is None:
        return
    if turn.now_s >= opened.deadline_s or not _can_hold(turn, opened):
        _conclude(turn, opened, demand, None)
    else:
        turn.wake_at(opened.deadline_s)


def _replaces(incident: Incident, demand: Demand) -> bool:
    """Whether the request has to be made anew for a demand."""
    if incident.kind is not demand.kind:
        order = list(IncidentKind)
        stronger = order.index(demand.kind) < order.index(incident.kind)
        # A weaker demand is the strongest one left, so what the incident was for is gone. Growth
        # is the exception: it is demanded once, and then seen through.
        return stronger or incident.kind is not IncidentKind.SCALE_UP
    return (
        not set(demand.doomed) <= set(incident.doomed)
        or (demand.durable and not incident.durable)
        or (bool(demand.notices) and demand.deadline_s < incident.deadline_s - 1e-6)
    )


def _brings_notice(turn: Turn, incident: Incident, demand: Demand) -> bool:
    """Whether slices are announced to go that the drain which is over knew nothing of."""
    return (
        demand.kind is IncidentKind.NOTICE
        and not set(demand.doomed) <= set(incident.doomed)
        and turn.now_s < demand.deadline_s
    )


def _open(turn: Turn, demand: Demand) -> None:
    ledger, old = turn.ledger, turn.ledger.incident
    joined = old is not None and old.kind is demand.kind
    number = ledger.requests + 1
    doomed = {*demand.doomed, *(old.doomed if old is not None and joined else ())}
    turn.change(
        requests=number,
        incident=Incident(
            kind=demand.kind,
            number=number,
            doomed=tuple(sorted(doomed)),
            durable=demand.durable or (old is not None and joined and old.durable),
            # The first cause stays, whatever joins it.
            slice=old.slice if old is not None and joined else demand.slice,
            cause_at_s=old.cause_at_s if old is not None and joined else demand.cause_at_s,
            decided_at_s=old.decided_at_s if old is not None and joined else turn.now_s,
            deadline_s=demand.deadline_s,
            notices=demand.notices,
        ),
    )
    names = ", ".join(str(id_) for id_ in demand.doomed) or "none"
    text = f"{demand.kind.value}: asked to hold a step; leaving slices: {names}"
    reason = _REASONS[demand.kind]
    turn.tell(f"request-{ledger.incarnation}-{number}", reason, text, demand.slice)


_REASONS = {
    IncidentKind.DELETE: Reason.DELETED,
    IncidentKind.DEADLINE: Reason.DEADLINE_EXCEEDED,
    IncidentKind.SUSPEND: Reason.SUSPENDED,
    IncidentKind.NOTICE: Reason.PREEMPTION_NOTICE,
    IncidentKind.SCALE_DOWN: Reason.SCALE_DOWN,
    IncidentKind.SCALE_UP: Reason.SCALE_UP,
    IncidentKind.CHECKPOINT: Reason.PREEMPTION_NOTICE,
}


def _can_hold(turn: Turn, incident: Incident) -> bool:
    """Whether anybody is there to answer, and has anything to hold."""
    for _, host, report in turn.member_reports():
        if host.process is ProcessState.ALIVE and (
            report.step > 0 or report.step_snapshot is not None
        ):
            return True
    # Growing has nothing to lose, but needs members that train: it is never begun without.
    return incident.kind is IncidentKind.SCALE_UP


def _withdraw(turn: Turn, incident: Incident) -> None:
    """Take the request back. Members that had left already are called back by `call_back`."""
    turn.change(incident=None)
    if incident.kind is IncidentKind.NOTICE:
        key = f"withdrawn-{turn.ledger.incarnation}-{incident.number}"
        turn.tell(key, Reason.NOTICE_WITHDRAWN, "The notice was withdrawn; training goes on.")


def _conclude(turn: Turn, incident: Incident, demand: Demand | None, answer: Held | None) -> None:
    """The drain is over: the step is held, or there is no time left."""
    _tell_outcome(turn, incident, answer)
    drain_s = turn.now_s - incident.decided_at_s
    if answer is not None:
        drain_s = answer.drain_s or drain_s
        learnt_s = max(drain_s, 0.7 * (turn.ledger.budget_learnt_s or 0.0))
        turn.change(budget_learnt_s=round(learnt_s, 3))
    members = turn.ledger.members
    if not _is_demanded(turn, incident, demand):
        _revoke(turn, incident, answer, drain_s)
        return
    reason = _REASONS[incident.kind]
    cause = Cause(reason=reason, at_s=incident.cause_at_s, slice=incident.slice)
    match incident.kind:
        case IncidentKind.DELETE:
            finish(turn, Reason.DELETED, "The job was deleted.")
        case IncidentKind.DEADLINE:
            finish(turn, reason, deadline_text(turn))
        case IncidentKind.SUSPEND:
            halt(turn, cause, (), lost=False, drain_s=drain_s)
        case IncidentKind.CHECKPOINT:
            served = (*turn.ledger.notices_served, *incident.notices)
            turn.change(incident=None, notices_served=served[-64:])
        case IncidentKind.SCALE_UP:
            if answer is None:
                # Growing is never urgent: train on, and try again after the cooldown.
                turn.change(incident=None, disturbed_at_s=turn.now_s, standby=())
                return
            halt(turn, cause, members, lost=False, drain_s=drain_s)
            turn.change(disturbed_at_s=turn.now_s)
        case IncidentKind.SCALE_DOWN:
            staying = [id_ for id_ in members if id_ not in incident.doomed]
            halt(turn, cause, staying, lost=False, drain_s=drain_s)
        case IncidentKind.NOTICE:
            surplus = demand.doomed if demand is not None else ()
            doomed = [id_ for id_ in members if turn.is_doomed(id_)]
            conclude_notice(turn, [*doomed, *surplus], drain_s=drain_s)


def _is_demanded(turn: Turn, incident: Incident, demand: Demand | None) -> bool:
    """Whether what the incident was opened for still stands at its end."""
    if incident.kind is IncidentKind.NOTICE:
        return any(turn.is_doomed(id_) for id_ in turn.ledger.members)
    if incident.kind in (IncidentKind.SCALE_UP, IncidentKind.CHECKPOINT):
        return True
    # What is stronger than the incident includes it: a deleted job is suspended as well.
    order = list(IncidentKind)
    return demand is not None and order.index(demand.kind) <= order.index(incident.kind)


def _revoke(turn: Turn, incident: Incident, answer: Held | None, drain_s: float) -> None:
    """End a drain that nobody wants any more. Who had left comes back with everybody."""
    if answer is None:
        _withdraw(turn, incident)
        return
    reason = Reason.NOTICE_WITHDRAWN
    cause = Cause(reason=reason, at_s=turn.now_s, slice=incident.slice)
    halt(turn, cause, turn.ledger.members, lost=False, drain_s=drain_s)


def conclude_notice(
    turn: Turn, leaving: Sequence[SliceId], *, drain_s: float | None = None
) -> None:
    """Go on without slices that have to leave or were lost meanwhile.

    A slice under notice that is not among them keeps what it holds until `saving` lets it go.
    """
    incident, members = turn.ledger.incident, turn.ledger.members
    if incident is None:
        return
    doomed = [id_ for id_ in members if turn.is_doomed(id_) and id_ in leaving]
    reason = Reason.PREEMPTION_NOTICE
    cause = Cause(reason=reason, at_s=incident.cause_at_s, slice=incident.slice)
    staying = [id_ for id_ in members if id_ not in leaving]
    spent_s = turn.now_s - incident.decided_at_s if drain_s is None else drain_s
    halt(turn, cause, staying, lost=True, drain_s=spent_s)
    for id_ in doomed:
        charge_disruption(turn, reason, incident.cause_at_s, id_)
    if turn.spec.elasticity.on_loss is OnLoss.FAIL:
        forbid_leaving(turn, [id_ for id_ in members if id_ in leaving or turn.is_doomed(id_)])


def forbid_leaving(turn: Turn, leaving: Sequence[SliceId]) -> None:
    """End a job that is not to go on with fewer slices."""
    slices = ", ".join(str(id_) for id_ in leaving)
    text = f"Slices {slices} had to leave, and elasticity.onLoss is Fail."
    finish(turn, Reason.LOSS_FORBIDDEN, text)


def let_go(turn: Turn, leaving: Sequence[SliceId]) -> None:
    """Take members under notice out of a job that waits, and count what befell them."""
    turn.change(members=tuple(id_ for id_ in turn.ledger.members if id_ not in leaving))
    for id_ in leaving:
        charge_disruption(turn, Reason.PREEMPTION_NOTICE, turn.notices[id_].first_seen_s, id_)
    if turn.spec.elasticity.on_loss is OnLoss.FAIL:
        forbid_leaving(turn, leaving)


def _tell_outcome(turn: Turn, incident: Incident, answer: Held | None) -> None:
    key = f"drained-{turn.ledger.incarnation}-{incident.number}"
    if answer is None:
        if turn.now_s >= incident.deadline_s:
            text = "No step was held before the deadline."
            turn.tell(key, Reason.DEADLINE_MISSED, text, incident.slice)
            if incident.durable:
                note_trouble(turn, Reason.DEADLINE_MISSED, text)
    else:
        text = f"Step {answer.step} is held by {len(answer.where)} hosts"
        text += ", durable." if answer.durable else "."
        reason = Reason.STEP_HELD if answer.complete else Reason.DEADLINE_MISSED
        turn.tell(key, reason, f"{text} {answer.message}".strip(), incident.slice)


def end_for_loss(turn: Turn, first_at_s: float) -> bool:
    """Shorten a drain after which nothing goes on, because a member was lost meanwhile.

    What is left may still make its newest step durable; it gets one budget for that.

    Returns:
        Whether such a drain is open; then the loss asks for nothing else.
    """
    incident = turn.ledger.incident
    if incident is None or incident.kind not in _ENDING:
        return False
    until_s = first_at_s + turn.spec.checkpoint.emergency.budget_seconds
    alive = [
        host
        for id_ in turn.ledger.members
        for host in (turn.slices[id_].hosts if id_ in turn.slices else ())
        if host.process is ProcessState.ALIVE
    ]
    until_s = min(incident.deadline_s, until_s) if alive else turn.now_s
    if until_s < incident.deadline_s:
        turn.change(incident=replace(incident, deadline_s=until_s))
    return True


def call_back(turn: Turn) -> bool:
    """Rejoin members that left for a request which is no longer open."""
    ledger = turn.ledger
    if ledger.stage is not Stage.RUN or ledger.incident is not None:
        return False
    for one, _, report in turn.current_reports():
        left = report.exit is not None and (
            report.exit.cause is ExitCause.LEFT and report.exit.incarnation == ledger.incarnation
        )
        if left or report.phase is HostPhase.HELD:
            cause = Cause(reason=Reason.NOTICE_WITHDRAWN, at_s=report.phase_since_s, slice=one.id)
            halt(turn, cause, ledger.members, lost=False)
            return True
    return False
