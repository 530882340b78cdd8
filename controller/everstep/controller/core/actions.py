"""What is to be done, as a function of the ledger and of what is seen. Nothing is remembered here.

Whether an action was done already is seen, not known: so the same pass after a crash, or a hundred
times over, asks for the same things until they are true.
"""

from __future__ import annotations

from msgspec.structs import replace

from everstep.controller.api.ids import HostId, Incarnation, Rank
from everstep.controller.api.reasons import Reason
from everstep.controller.api.settings import resolve_settings
from everstep.controller.api.wire import (
    Command,
    Directive,
    Member,
    MemberHost,
    Request,
    RequestKind,
)
from everstep.controller.core.health import is_alive, is_pending
from everstep.controller.core.ledger import IncidentKind, Stage
from everstep.controller.core.model import (
    Action,
    Capacity,
    ProcessState,
    RemoveJob,
    SliceView,
    StartSlice,
    StopSlice,
    WriteDirective,
)
from everstep.controller.core.turn import Turn

STOP_PATIENCE_S = 5.0
"""How long agents get to follow a directive that says STOP before they are told by signal."""


def derive_actions(turn: Turn, fresh_token: str) -> tuple[Action, ...]:
    """Return the actions in order: the directive first, then stops, then starts.

    The directive is what survivors wait for, and the time to resume counts. Stops come before
    starts, because a slice is replaced as a unit (invariant 2).
    """
    stops: list[Action] = []
    starts: list[Action] = []
    for one in turn.view.slices:
        _settle(turn, one, stops, starts)
    written = _write_directive(turn, fresh_token)
    actions = [*([written] if written is not None else []), *stops, *starts]
    if turn.view.is_deleting and turn.ledger.stage is Stage.FINISHED:
        if not any(is_alive(one) for one in turn.view.slices):
            actions.append(RemoveJob())
    return tuple(actions)


def _settle(turn: Turn, one: SliceView, stops: list[Action], starts: list[Action]) -> None:
    """Bring one slice's processes to where the ledger wants them."""
    ledger = turn.ledger
    entry = next((entry for entry in ledger.standby if entry.id == one.id), None)
    absent = any(host.process is not ProcessState.ALIVE for host in one.hosts)
    start = StartSlice(slice=one.id, incarnation=ledger.incarnation)
    if ledger.stage is Stage.FINISHED:
        _stop_finished(turn, one, stops)
    elif one.id in ledger.members:
        pending = [host for host in one.hosts if is_pending(turn, one.id, host)]
        if any(host.process is ProcessState.ALIVE for host in pending):
            # Left over from before: whoever it is, it is not the agent that was ordered.
            older = Incarnation(ledger.incarnation - 1)
            stops.append(
                StopSlice(slice=one.id, incarnation=older, reason=ledger.cause, grace_s=0.0)
            )
        if pending:
            starts.append(start)
    elif entry is not None:
        if turn.now_s >= entry.since_s:
            if absent:
                starts.append(start)
        elif is_alive(one):
            stops.append(_stop(one, ledger.incarnation, Reason.STARTUP_FAILED, 0.0))
    elif is_alive(one):
        reason, grace_s = _leave_terms(turn, one)
        stops.append(_stop(one, ledger.incarnation, reason, grace_s))


def _stop(one: SliceView, incarnation: Incarnation, reason: Reason, grace_s: float) -> StopSlice:
    started = [host.started_for for host in one.hosts if host.started_for is not None]
    # Whatever is seen alive has to go, also what a lost ledger started.
    newest = max([incarnation, *started])
    return StopSlice(slice=one.id, incarnation=newest, reason=reason, grace_s=grace_s)


def _leave_terms(turn: Turn, one: SliceView) -> tuple[Reason, float]:
    """Return why a slice is not wanted, and how long its agents get."""
    memory = next((item for item in turn.ledger.slices if item.id == one.id), None)
    turnover = turn.ledger.turnover
    reason = memory.reason if memory is not None else None
    if reason is None:
        reason = turn.ledger.cause if turnover is None else turnover.reason
    abrupt = {Reason.SLICE_LOST, Reason.HOST_LOST, Reason.AGENT_SILENT, Reason.JOIN_TIMED_OUT}
    if reason in abrupt or one.capacity is Capacity.GONE:
        return reason, 0.0
    return reason, float(turn.spec.template.spec.termination_grace_period_seconds)


def _stop_finished(turn: Turn, one: SliceView, stops: list[Action]) -> None:
    finish = turn.ledger.finish
    if finish is None or not is_alive(one):
        return
    due_s = finish.at_s + STOP_PATIENCE_S
    if not finish.succeeded and turn.now_s >= due_s and _is_saving(turn):
        grace_s = turn.spec.template.spec.termination_grace_period_seconds
        due_s = finish.at_s + max(STOP_PATIENCE_S, grace_s)
    if turn.now_s < due_s:
        turn.wake_at(due_s)
        return
    stops.append(_stop(one, turn.ledger.incarnation, finish.reason, STOP_PATIENCE_S))


def _is_saving(turn: Turn) -> bool:
    """Whether agents that still answer hold a step that is not on storage yet."""
    reports = [report for _, _, report in turn.current_reports()]
    stored = max((report.step_committed or 0 for report in reports), default=0)
    since_s = turn.now_s - turn.spec.runtime.timeouts.report_seconds
    return any(
        (report.step_snapshot or 0) > stored and report.renewed_at_s >= since_s
        for report in reports
    )


def _write_directive(turn: Turn, fresh_token: str) -> WriteDirective | None:
    """Return the directive if what agents can read now says something else."""
    wanted = _wanted_directive(turn, fresh_token)
    present = turn.view.directive
    if wanted is None:
        return None
    if present is not None and replace(present, sequence=0) == wanted:
        return None
    # Agents ignore what is not newer than what they saw, so a directive that was lost must not
    # make the numbers begin anew. What nobody has reported yet is not known; the time is newer.
    seen = [0 if present is None else present.sequence]
    if present is None and turn.ledger.incarnation_at_s != turn.now_s:
        seen.append(int(turn.now_s * 1000))
    for one in turn.view.slices:
        for host in one.hosts:
            report = turn.report(host)
            if report is not None:
                seen.append(report.directive_seen)
    return WriteDirective(directive=replace(wanted, sequence=max(seen) + 1))


def _wanted_directive(turn: Turn, fresh_token: str) -> Directive | None:
    view, ledger = turn.view, turn.ledger
    if ledger.incarnation == 0:
        return None
    command = {Stage.RUN: Command.RUN, Stage.WAIT: Command.WAIT, Stage.FINISHED: Command.STOP}
    present = view.directive
    same = (
        present is not None
        and present.job_uid == view.job_uid
        and present.incarnation == ledger.incarnation
    )
    members = _members(turn)
    return Directive(
        job=view.job,
        job_uid=view.job_uid,
        sequence=0,
        incarnation=ledger.incarnation,
        command=command[ledger.stage],
        members=members,
        lead=HostId(members[0].slice, 0) if members else None,
        request=_request(turn),
        token=present.token if same and present is not None else fresh_token,
        # Settings that were edited meanwhile take effect with the next incarnation, for all
        # members at once.
        settings=present.settings if same and present is not None else resolve_settings(view.spec),
        restore_set_aside=ledger.restore_set_aside,
    )


def _members(turn: Turn) -> tuple[Member, ...]:
    present = [turn.slices[id_] for id_ in turn.ledger.members if id_ in turn.slices]
    return tuple(
        Member(
            slice=one.id,
            rank=Rank(rank),
            hosts=tuple(
                MemberHost(host=host.host, address=host.address, port=host.port)
                for host in one.hosts
            ),
        )
        for rank, one in enumerate(present)
    )


def _request(turn: Turn) -> Request | None:
    incident, id_ = turn.ledger.incident, turn.request_id()
    if incident is None or id_ is None:
        return None
    leaves = incident.kind is not IncidentKind.CHECKPOINT
    return Request(
        id=id_,
        kind=RequestKind.LEAVE if leaves else RequestKind.CHECKPOINT,
        doomed=incident.doomed,
        durable=incident.durable,
        deadline_s=incident.deadline_s,
    )
