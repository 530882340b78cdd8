"""Unplanned ends: what is lost, which cause came first, what it costs."""

from __future__ import annotations

from msgspec.structs import replace

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.reasons import TABLE, Budget, Reason
from everstep.controller.api.spec import OnLoss
from everstep.controller.api.wire import ExitCause, HostPhase, Report
from everstep.controller.core.crashes import forgive_trained, judge_crash
from everstep.controller.core.health import (
    Ending,
    SliceHealth,
    Verdict,
    is_outage,
    judge_members,
    worker_endings,
)
from everstep.controller.core.incidents import conclude_notice, end_for_loss
from everstep.controller.core.ledger import BadStart, IncidentKind, Stage
from everstep.controller.core.model import ProcessState
from everstep.controller.core.transitions import (
    COALESCE_S,
    Cause,
    charge_disruption,
    charge_failure,
    charge_lost,
    finish,
    halt,
)
from everstep.controller.core.turn import Turn

_SIGABRT = 6
IMPORT_TRIES = 3
"""A program that ends before `es.main` with one and the same error will do so for ever."""

_REASONS = {
    ExitCause.SIGNALED: Reason.WORKER_KILLED,
    ExitCause.HUNG: Reason.WORKER_HUNG,
    ExitCause.USER_ERROR: Reason.USER_ERROR,
    ExitCause.EXITED_EARLY: Reason.EXITED_EARLY,
    ExitCause.STARTUP_FAILED: Reason.STARTUP_FAILED,
    ExitCause.STATE_REFUSED: Reason.STATE_REFUSED,
}


def refuse(turn: Turn) -> bool:
    """End a job that no restart can help. Returns whether it ended."""
    ledger = turn.ledger
    for _, _, report in turn.member_reports():
        if report.incarnation != ledger.incarnation:
            # An older incarnation that was fenced by this one stopped as it should.
            continue
        if report.fenced_by is not None:
            text = f"{turn.spec.checkpoint.uri} belongs to another run, at incarnation "
            text += f"{report.fenced_by}; this job is at {ledger.incarnation} and stops."
            finish(turn, Reason.FENCED, text)
            return True
        if report.snapshot_refused is not None:
            finish(turn, Reason.SNAPSHOT_REFUSED, f"Host {report.host}: {report.snapshot_refused}")
            return True
    for ending in worker_endings(turn):
        refused = ending.exit.cause is ExitCause.STATE_REFUSED or not ending.exit.is_retryable
        if refused and ending.is_primary:
            finish(turn, _REASONS[ending.exit.cause], _words(ending))
            return True
    return False


def handle_losses(turn: Turn) -> None:
    """Act on lost slices and ended workers of a job that runs or waits."""
    health = judge_members(turn)
    lost = [one for one in health if one.verdict is Verdict.LOST]
    if turn.ledger.stage is Stage.WAIT:
        if lost:
            _lose_waiting(turn, lost)
        return
    if _pause_for_outage(turn, health):
        return
    gone = {one.id for one in lost}
    endings = [ending for ending in worker_endings(turn) if ending.host.slice not in gone]
    if not lost and not endings:
        return
    incident = turn.ledger.incident
    if incident is not None and incident.kind is IncidentKind.NOTICE:
        # The notice was first. What breaks while its slices leave is its consequence.
        _cut_drain_short(turn, lost, endings)
        return
    cause, ending = _first_cause(turn, lost, endings)
    if cause is None or end_for_loss(turn, cause.at_s):
        return
    forgive_trained(turn, endings)
    halt(turn, cause, [id_ for id_ in turn.ledger.members if id_ not in gone], lost=bool(lost))
    charge_lost(turn, lost)
    if TABLE[cause.reason].budget is Budget.FAILURE:
        # Where a slice went as well, nobody can say that it was the step.
        crashed = judge_crash(turn, ending, endings) if ending is not None and not lost else None
        words = _words(ending) if ending else cause.message or _words_of_lost(cause, lost)
        charge_failure(turn, cause, words, crashed=crashed)
        _judge_start(turn, ending)
    elif not lost and cause.slice is not None:
        charge_disruption(turn, cause.reason, cause.at_s, cause.slice, cause.message)
    _forbid(turn, lost)


def _cut_drain_short(turn: Turn, lost: list[SliceHealth], endings: list[Ending]) -> None:
    """End the drain of a notice in which something broke.

    Without its workers the lead can still move what only doomed slices hold, so their ends alone
    wait a moment for its answer; a lost slice does not.
    """
    if not lost:
        due_s = min(endings[0].exit.at_s, turn.now_s) + 2 * COALESCE_S
        turn.wake_at(due_s)
        if turn.now_s < due_s or turn.answer() is not None:
            return
    leaving = [one.id for one in lost]
    answer = turn.answer()
    if answer is not None and answer.complete:
        leaving += [id_ for id_ in turn.ledger.members if turn.is_doomed(id_)]
    conclude_notice(turn, leaving)
    charge_lost(turn, [one for one in lost if not turn.is_doomed(one.id)])


def _forbid(turn: Turn, lost: list[SliceHealth]) -> None:
    fails = turn.spec.elasticity.on_loss is OnLoss.FAIL
    if lost and fails and turn.ledger.stage is not Stage.FINISHED:
        slices = ", ".join(str(one.id) for one in lost)
        finish(turn, Reason.LOSS_FORBIDDEN, f"Lost slices {slices}, and elasticity.onLoss is Fail.")


def _first_cause(
    turn: Turn, lost: list[SliceHealth], endings: list[Ending]
) -> tuple[Cause | None, Ending | None]:
    """Return what came first (invariant 4). None while a cause may still turn up."""
    primary = next((ending for ending in endings if ending.is_primary), None)
    first = min(lost, key=lambda one: (one.at_s, one.id)) if lost else None
    if first is not None:
        if primary is None or primary.exit.at_s > first.at_s - COALESCE_S:
            reason = first.reason or Reason.SLICE_LOST
            return Cause(reason=reason, at_s=first.at_s, slice=first.id), None
    coordinator = _lost_coordinator(turn)
    if coordinator is not None:
        if primary is None or primary.exit.at_s > coordinator.at_s - COALESCE_S:
            # Its host may be lost with it, which is then the cause.
            due_s = min(coordinator.at_s, turn.now_s) + COALESCE_S
            turn.wake_at(due_s)
            return (coordinator if turn.now_s >= due_s else None), None
    if primary is not None and primary.exit.cause is ExitCause.HUNG:
        # The deadlines of all are over at about the same time. Who was behind, the others waited
        # for.
        if turn.now_s < primary.exit.at_s + COALESCE_S and len(endings) < _host_count(turn):
            turn.wake_at(primary.exit.at_s + COALESCE_S)
            return None, None
        hung = [ending for ending in endings if ending.exit.cause is ExitCause.HUNG]
        primary = min(hung, key=lambda one: (one.exit.stage, one.exit.step, one.exit.at_s))
    if primary is not None:
        reason = _REASONS[primary.exit.cause]
        slice_ = primary.host.slice
        return Cause(reason=reason, at_s=primary.exit.at_s, slice=slice_), primary
    if not endings:
        return None, None
    # Only consequences. Their cause may be on its way; an agent that was not heard of since may be
    # the cause, and is either heard of soon or lost.
    eldest = endings[0]
    due_s = min(eldest.exit.at_s, turn.now_s) + COALESCE_S
    unheard = any(
        report.renewed_at_s <= eldest.exit.at_s
        for _, host, report in turn.member_reports()
        if host.process is ProcessState.ALIVE
    )
    if unheard or turn.now_s < due_s:
        turn.wake_at(due_s)
        return None, None
    aborted = [ending for ending in endings if ending.exit.signal == _SIGABRT]
    if len(aborted) == 1 and len(endings) > 1:
        # JAX's own abort, when a member is gone, ends more than one of them.
        reason = Reason.WORKER_KILLED
        return Cause(reason=reason, at_s=aborted[0].exit.at_s, slice=aborted[0].host.slice), (
            aborted[0]
        )
    absent = _absent(turn, endings)
    if absent is not None:
        if turn.now_s < due_s + COALESCE_S:
            # It may only be the last to see that the others are gone.
            turn.wake_at(due_s + COALESCE_S)
            return None, None
        return _cause_of_absence(turn, absent, eldest), None
    reason = Reason.COLLECTIVE_ERROR
    return Cause(reason=reason, at_s=eldest.exit.at_s, slice=eldest.host.slice), eldest


def _lost_coordinator(turn: Turn) -> Cause | None:
    """Return the end of the coordination service, if the lead tells of one.

    It ends for no worker, and every worker ends for it: by an abort, a collective error, or not at
    all.
    """
    lead = turn.lead_report()
    if lead is None or lead.coordinator_lost_at_s is None:
        return None
    reason = Reason.COORDINATOR_LOST
    return Cause(
        reason=reason,
        at_s=lead.coordinator_lost_at_s,
        slice=lead.host.slice,
        message=f"The coordinator of host {lead.host}: {TABLE[reason].sentence}",
    )


def _host_count(turn: Turn) -> int:
    return sum(len(turn.slices[id_].hosts) for id_ in turn.ledger.members if id_ in turn.slices)


def _absent(turn: Turn, endings: list[Ending]) -> Report | None:
    """Return who did not take part in what the others waited for, and lives: the first cause.

    A worker that is in a step with others which are gone ends as they did. One that goes on living
    is somewhere else: it hangs before its first step, where nothing else finds it before the start
    deadline, and the collectives of the others give up sooner.
    """
    ended = {ending.host for ending in endings}
    eldest_s = endings[0].exit.at_s
    alive = [
        report
        for _, host, report in turn.current_reports()
        if host.process is ProcessState.ALIVE
        and report.host not in ended
        and report.phase in (HostPhase.RESTORING, HostPhase.RUNNING)
        and report.renewed_at_s > eldest_s
    ]
    return min(alive, key=lambda report: (report.step, report.host), default=None)


def _cause_of_absence(turn: Turn, absent: Report, eldest: Ending) -> Cause:
    reason = Reason.WORKER_HUNG
    present = [turn.slices[id_] for id_ in turn.ledger.members if id_ in turn.slices]
    hosts = [HostId(one.id, host.host) for one in present for host in one.hosts]
    text = f"Rank {hosts.index(absent.host)} (host {absent.host}) hangs. It did not take part in "
    text += f"the step after step {absent.step}, for which rank {eldest.exit.rank} "
    text += f"(host {eldest.host}) waited: {eldest.exit.message}"
    return Cause(
        reason=reason, at_s=eldest.exit.at_s, slice=absent.host.slice, message=text.rstrip(": ")
    )


def _pause_for_outage(turn: Turn, health: tuple[SliceHealth, ...]) -> bool:
    """Hold still while most members are silent together, but not longer than a hang may last."""
    since_s = turn.ledger.outage_since_s
    lost_now = any(one.verdict is Verdict.LOST for one in health)
    if not is_outage(health):
        if since_s is not None:
            turn.change(outage_since_s=None)
        return False
    if since_s is None:
        if not lost_now:
            return False
        since_s = turn.now_s
        turn.change(outage_since_s=since_s)
        reason = Reason.CONTROL_PLANE_OUTAGE
        turn.tell(f"outage-{turn.ledger.incarnation}", reason, TABLE[reason].sentence)
    until_s = since_s + turn.spec.runtime.timeouts.progress_seconds
    turn.wake_at(until_s)
    return turn.now_s < until_s


def _lose_waiting(turn: Turn, lost: list[SliceHealth]) -> None:
    """Drop slices that were lost while the job waited; they join what is already under way."""
    gone: set[SliceId] = {one.id for one in lost}
    turnover, now_s = turn.ledger.turnover, turn.now_s
    if turnover is not None and not turnover.lost:
        wait_s = turn.spec.elasticity.wait_for_replacement_seconds
        turnover = replace(turnover, lost=True, wait_until_s=now_s + wait_s)
    turn.change(
        members=tuple(id_ for id_ in turn.ledger.members if id_ not in gone),
        turnover=turnover,
        step_seen=turn.newest_step(),
        disturbed_at_s=now_s,
    )
    charge_lost(turn, lost)
    _forbid(turn, lost)


def _judge_start(turn: Turn, ending: Ending | None) -> None:
    """Count equal errors before `es.main`, and end a job whose program cannot begin.

    One that trained before was good then: what it needs may be away for a while. So may what an
    error names that is another one each time.
    """
    old = turn.ledger.bad_start
    if ending is None or not ending.exit.is_before_main:
        turn.change(bad_start=None)
        return
    is_same = old is not None and old.message == ending.exit.message
    tries = old.count + 1 if old is not None and is_same else 1
    turn.change(bad_start=BadStart(message=ending.exit.message, count=tries))
    if turn.ledger.stage is Stage.FINISHED or tries < IMPORT_TRIES or turn.newest_step() > 0:
        return
    text = f"{_words(ending)} So {tries} times in a row, before es.main."
    finish(turn, _REASONS[ending.exit.cause], text)


def _words(ending: Ending) -> str:
    text = f"Rank {ending.exit.rank} (host {ending.host}) ended: "
    reason = _REASONS.get(ending.exit.cause, Reason.COLLECTIVE_ERROR)
    text += TABLE[reason].sentence
    is_abort = ending.exit.signal == _SIGABRT and not ending.exit.message
    message = "Ended by signal 6 (SIGABRT)." if is_abort else ending.exit.message
    return f"{text} {message}".strip()


def _words_of_lost(cause: Cause, lost: list[SliceHealth]) -> str:
    slices = ", ".join(str(one.id) for one in lost)
    told = next((f" {one.message}" for one in lost if one.message), "")
    return f"Slices {slices}: {TABLE[cause.reason].sentence}{told}"
