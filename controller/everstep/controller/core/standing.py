"""How a job stands, for people: phase, sentence, slices, figures. Nothing branches on it."""

from __future__ import annotations

from msgspec.structs import replace

from everstep.controller.api.ids import Rank, Step
from everstep.controller.api.reasons import TABLE, Reason
from everstep.controller.api.status import (
    CheckpointRequest,
    CheckpointStatus,
    Coordinator,
    JobStatus,
    Phase,
    Recovery,
    RestartCounts,
    SliceCounts,
    SliceStatus,
)
from everstep.controller.api.wire import ExitCause, HostPhase
from everstep.controller.core.conditions import COMMITTED, Standing, judge_conditions
from everstep.controller.core.facts import newest_commit
from everstep.controller.core.health import SliceHealth, Verdict, is_alive, judge_members
from everstep.controller.core.ledger import IncidentKind, Stage
from everstep.controller.core.model import Capacity, ProcessState, SliceView
from everstep.controller.core.policy import (
    Stay,
    choose_members,
    failures_in_window,
    storm_until_s,
)
from everstep.controller.core.turn import Turn


def describe_job(turn: Turn, old: JobStatus, recoveries: tuple[Recovery, ...]) -> JobStatus:
    """Return the status after this pass.

    It changes only where the job's standing changed, but for the figures that `without_figures`
    takes out.
    """
    ledger, spec = turn.ledger, turn.spec
    phase = _phase(turn)
    checkpoint = _checkpoint(turn, old)
    committed = checkpoint.last_committed
    stored = Step(0) if committed is None else committed.step
    reason, message = _sentence(turn, phase, stored)
    health = {one.id: one for one in judge_members(turn)}
    statuses = tuple(_slice_status(turn, one, health.get(one.id)) for one in turn.view.slices)
    ready = sum(1 for one in statuses if one.state == "Ready")
    budgets = ledger.budgets
    lead = turn.lead_report()
    running = ledger.stage is Stage.RUN and ledger.turnover is None
    return replace(
        old,
        observed_generation=turn.view.generation,
        phase=phase,
        message=message,
        incarnation=ledger.incarnation,
        coordinator=_coordinator(turn),
        slices=SliceCounts(
            desired=spec.slices.desired,
            granted=len(ledger.members) if ledger.stage is Stage.RUN else 0,
            ready=ready,
        ),
        slice_statuses=statuses,
        restarts=RestartCounts(
            failures=budgets.failures,
            disruptions=budgets.disruptions,
            counted_in_window=len(failures_in_window(turn, budgets)),
        ),
        recoveries=recoveries,
        conditions=judge_conditions(
            turn,
            old,
            Standing(phase=phase, reason=reason, message=message, committed=committed),
        ),
        started_at_s=ledger.started_at_s,
        finished_at_s=None if ledger.finish is None else ledger.finish.at_s,
        wait_until_s=_wait_until_s(turn, reason),
        step=_step(turn, old),
        steps_per_s=lead.steps_per_s if lead is not None and running else None,
        loss=lead.loss if lead is not None else old.loss,
        checkpoint=checkpoint,
    )


def without_figures(status: JobStatus) -> JobStatus:
    """Return the status without what changes while a job simply trains."""
    checkpoint = replace(status.checkpoint, last_committed=None, step_snapshot=None)
    conditions = tuple(
        replace(one, message="") if one.type == COMMITTED and one.status == "True" else one
        for one in status.conditions
    )
    return replace(
        status,
        step=Step(0),
        steps_per_s=None,
        loss=None,
        checkpoint=checkpoint,
        conditions=conditions,
    )


def _checkpoint(turn: Turn, old: JobStatus) -> CheckpointStatus:
    current = [report for _, _, report in turn.current_reports()]
    held = [one.step_snapshot for one in current if one.step_snapshot is not None]
    # A commit is a fact whoever tells of it: also an agent that has just left the incarnation with
    # the step made durable, which is the last that is heard of it.
    heard = [turn.report(host) for one in turn.view.slices for host in one.hosts]
    newest = newest_commit([one for one in heard if one is not None])
    known = [one for one in (newest, old.checkpoint.last_committed) if one is not None]
    incident, id_ = turn.ledger.incident, turn.request_id()
    request = None
    if incident is not None and id_ is not None:
        request = CheckpointRequest(
            id=id_,
            reason=incident.kind.value,
            deadline_s=incident.deadline_s,
            requested_at_s=incident.decided_at_s,
        )
    return CheckpointStatus(
        request=request,
        last_committed=max(known, key=lambda one: one.step, default=None),
        step_snapshot=min(held) if held else old.checkpoint.step_snapshot,
        budget_seconds_learnt=turn.ledger.budget_learnt_s,
    )


def _step(turn: Turn, old: JobStatus) -> Step:
    """Return the step that is shown: of this incarnation, once it has restored one."""
    current = [report for _, _, report in turn.current_reports()]
    training = [one.step for one in current if one.phase not in _BEFORE_TRAINING]
    return max(training) if training else max(old.step, turn.ledger.step_seen)


_BEFORE_TRAINING = (HostPhase.STARTING, HostPhase.WAITING, HostPhase.JOINING, HostPhase.RESTORING)


def _phase(turn: Turn) -> Phase:
    ledger = turn.ledger
    if ledger.finish is not None:
        return Phase.SUCCEEDED if ledger.finish.succeeded else Phase.FAILED
    if ledger.stage is Stage.WAIT:
        if turn.spec.suspend:
            return Phase.CHECKPOINTING if ledger.members else Phase.SUSPENDED
        return Phase.SCHEDULING if ledger.incarnation == 0 else Phase.RESCHEDULING
    if ledger.incident is not None:
        return Phase.CHECKPOINTING
    if ledger.turnover is None:
        return Phase.RUNNING
    phases = {report.phase for _, _, report in turn.current_reports()}
    joined = len(turn.current_reports()) >= len(turn.member_reports()) > 0
    if not joined or phases & set(_BEFORE_TRAINING[:3]):
        return Phase.JOINING
    return Phase.RESTORING


def _sentence(turn: Turn, phase: Phase, stored: Step) -> tuple[Reason, str]:
    """Say what is happening, with the reason of the one table that it stands for."""
    ledger, count = turn.ledger, len(turn.ledger.members)
    desired, n = turn.spec.slices.desired, turn.ledger.incarnation
    of = f"{count} of {desired} slices"
    if ledger.finish is not None:
        return ledger.finish.reason, ledger.finish.message
    if phase is Phase.SUSPENDED:
        return Reason.SUSPENDED, _suspended(turn, stored)
    if ledger.stage is Stage.WAIT and turn.spec.suspend:
        return Reason.SUSPENDED, _BEFORE_SUSPENSION
    if ledger.stage is Stage.WAIT:
        return _waiting(turn)
    if ledger.outage_since_s is not None:
        reason = Reason.CONTROL_PLANE_OUTAGE
        return reason, TABLE[reason].sentence
    if ledger.incident is not None:
        return _draining(turn)
    if ledger.turnover is not None:
        verb = "restoring" if phase is Phase.RESTORING else "joining"
        text = f"Incarnation {n} is {verb} on {of}. {TABLE[ledger.cause].sentence}"
        return Reason.RECOVERING, text
    final = _final_step(turn)
    if final is not None:
        return _storing_final(turn, final, is_less=count < desired)
    if count < desired:
        reason = Reason.DISRUPTION_STORM if storm_until_s(turn) else Reason.RUNNING_DEGRADED
        return reason, f"Incarnation {n} is training on {of}. {TABLE[reason].sentence}"
    return Reason.ALL_SLICES_RUNNING, f"Incarnation {n} is training on {of}."


def _final_step(turn: Turn) -> Step | None:
    """Return the last step of the training when it is finished and not durable yet."""
    lead = turn.lead_report()
    if lead is None or lead.exit is None or lead.exit.incarnation != turn.ledger.incarnation:
        return None
    return lead.exit.step if lead.exit.cause is ExitCause.DONE else None


def _storing_final(turn: Turn, step: Step, *, is_less: bool) -> tuple[Reason, str]:
    trouble = turn.ledger.trouble
    done = f"All steps are done, and step {step} is not durable yet"
    if trouble is None or trouble.reason is not Reason.STORAGE_WRITE_FAILED:
        reason = Reason.RUNNING_DEGRADED if is_less else Reason.ALL_SLICES_RUNNING
        return reason, f"{done}: it is being written."
    return Reason.STORAGE_WRITE_FAILED, (
        f"{done}: {trouble.message}. It is kept in memory and tried again until storage takes it; "
        f"make room or give access at {turn.spec.checkpoint.uri}."
    )


_BEFORE_SUSPENSION = "The newest step is being made durable before suspension."


def _suspended(turn: Turn, stored: Step) -> str:
    reached = turn.newest_step()
    if reached <= stored:
        return TABLE[Reason.SUSPENDED].sentence
    return f"The job is suspended. Step {reached} was reached, and step {stored} is on storage."


def _waiting(turn: Turn) -> tuple[Reason, str]:
    turnover = turn.ledger.turnover
    if turnover is None:
        return Reason.NOT_SCHEDULED, TABLE[Reason.NOT_SCHEDULED].sentence
    decision = choose_members(turn, turnover)
    reason = decision.reason if isinstance(decision, Stay) else Reason.RECOVERING
    kept = ", ".join(str(id_) for id_ in turn.ledger.members)
    text = TABLE[reason].sentence
    if kept:
        text += f" The newest step is kept in the memory of slices {kept}."
    return reason, text


def _wait_until_s(turn: Turn, reason: Reason) -> float | None:
    turnover = turn.ledger.turnover
    if reason is Reason.DISRUPTION_STORM:
        return storm_until_s(turn)
    if turn.ledger.stage is not Stage.WAIT or turnover is None or turn.spec.suspend:
        return None
    decision = choose_members(turn, turnover)
    return decision.until_s if isinstance(decision, Stay) else None


def _draining(turn: Turn) -> tuple[Reason, str]:
    incident = turn.ledger.incident
    doomed = ", ".join(str(id_) for id_ in incident.doomed) if incident is not None else ""
    match incident.kind if incident is not None else None:
        case IncidentKind.NOTICE:
            text = f"Slices {doomed} are leaving: the newest step is being held outside them."
            return Reason.PREEMPTION_NOTICE, text
        case IncidentKind.SCALE_UP:
            return Reason.SCALE_UP, "More slices are ready: the members agree on a step to change."
        case IncidentKind.SCALE_DOWN:
            text = f"Fewer slices are desired: slices {doomed} leave at an agreed step."
            return Reason.SCALE_DOWN, text
        case IncidentKind.SUSPEND:
            return Reason.SUSPENDED, _BEFORE_SUSPENSION
        case IncidentKind.CHECKPOINT:
            return Reason.PREEMPTION_NOTICE, "The newest step is being made durable, as announced."
        case _:
            return Reason.DELETED, "The newest step is being made durable before the end."


def _coordinator(turn: Turn) -> Coordinator | None:
    lead = turn.lead
    one = turn.slices.get(lead.slice) if lead is not None else None
    if lead is None or one is None or not one.hosts:
        return None
    port = turn.spec.runtime.coordinator_port
    return Coordinator(address=f"{one.hosts[0].address}:{port}", lead=lead)


def _slice_status(turn: Turn, one: SliceView, health: SliceHealth | None) -> SliceStatus:
    ledger = turn.ledger
    memory = next((item for item in ledger.slices if item.id == one.id), None)
    is_member = one.id in ledger.members
    notice = turn.notices.get(one.id)
    state, reason = _slice_state(turn, one, health)
    return SliceStatus(
        id=one.id,
        rank=Rank(ledger.members.index(one.id))
        if is_member and ledger.stage is Stage.RUN
        else None,
        state=state,
        ready_hosts=_ready_hosts(turn, one),
        restarts=0 if memory is None else memory.restarts,
        disruptions=0 if memory is None else memory.disruptions,
        deadline_s=None if notice is None else notice.deadline_s,
        reason=reason,
    )


def _slice_state(turn: Turn, one: SliceView, health: SliceHealth | None) -> tuple[str, str]:
    ledger = turn.ledger
    memory = next((item for item in ledger.slices if item.id == one.id), None)
    left = memory.reason.value if memory is not None and memory.reason is not None else ""
    if one.capacity is Capacity.GONE:
        return "Gone", left
    if one.id in turn.notices:
        return "Disrupted", turn.notices[one.id].reason.value
    if health is not None and ledger.stage is not Stage.FINISHED:
        if health.verdict is not Verdict.HEALTHY:
            state = "Suspect" if health.verdict is Verdict.SUSPECT else "Lost"
            return state, health.reason.value if health.reason is not None else ""
        if _ready_hosts(turn, one) == len(one.hosts):
            return ("Ready", "") if ledger.stage is Stage.RUN else ("Waiting", "")
        alive = all(host.process is ProcessState.ALIVE for host in one.hosts)
        return ("Joining", "") if alive else ("Starting", "")
    if any(entry.id == one.id for entry in ledger.standby):
        return "Starting", ""
    return ("Ending", left) if is_alive(one) else ("Absent", left)


def _ready_hosts(turn: Turn, one: SliceView) -> int:
    n, stage = turn.ledger.incarnation, turn.ledger.stage
    ready = 0
    for host in one.hosts:
        report = turn.report(host)
        if report is None or host.process is not ProcessState.ALIVE:
            continue
        trains = report.incarnation == n and report.phase not in _BEFORE_TRAINING
        ready += trains if stage is Stage.RUN else report.phase is not HostPhase.STARTING
    return ready
