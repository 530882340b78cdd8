"""Who is healthy, suspect or lost, and why. Every verdict carries its reason and its first trace.

A process that is gone is a fact. A report that is not renewed is a suspicion first: only when it is
older than the report timeout is the agent lost, and when most agents fall silent together while
their processes live, it is the way to us that is cut (invariant 6).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.reasons import Reason
from everstep.controller.api.wire import ExitCause, HostPhase, Report, WorkerExit
from everstep.controller.core.ledger import Stage, Standby
from everstep.controller.core.model import Capacity, HostView, ProcessState, SliceView
from everstep.controller.core.turn import Turn

_SIGABRT = 6
START_WINDOW_S = 2.0
"""How long after the order to start its agents a slice may still have none."""
_OUTAGE_SLICES_MIN = 2


class Verdict(Enum):
    HEALTHY = "Healthy"
    SUSPECT = "Suspect"
    LOST = "Lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceHealth:
    id: SliceId
    verdict: Verdict
    reason: Reason | None = None
    at_s: float = 0.0
    """First trace of the loss."""
    message: str = ""
    """What the agent said of it, in words."""


class StandbyState(Enum):
    RESTING = "Resting"
    STARTING = "Starting"
    READY = "Ready"
    FAILED = "Failed"


def judge_members(turn: Turn) -> tuple[SliceHealth, ...]:
    """Judge every member slice. A slice is as healthy as its worst host."""
    missing = _missing(turn)
    return tuple(_judge_slice(turn, id_, missing) for id_ in turn.ledger.members)


def _judge_slice(turn: Turn, id_: SliceId, missing: frozenset[HostId]) -> SliceHealth:
    one = turn.slices.get(id_)
    if one is None or one.capacity is Capacity.GONE:
        at_s = _exited_at(turn, one.hosts) if one is not None else turn.now_s
        return _lost(id_, Reason.SLICE_LOST, at_s)
    gone = [host for host in one.hosts if is_gone(turn, id_, host)]
    if gone:
        refusal = _refusal(turn, gone)
        if refusal is not None:
            at_s = _exited_at(turn, gone)
            return replace(_lost(id_, Reason.STARTUP_FAILED, at_s), message=refusal)
        reason = Reason.SLICE_LOST if len(gone) == len(one.hosts) else Reason.HOST_LOST
        return _lost(id_, reason, _exited_at(turn, gone))
    verdict = SliceHealth(id=id_, verdict=Verdict.HEALTHY)
    for host in one.hosts:
        found = _judge_host(turn, id_, host, HostId(id_, host.host) in missing)
        if found.verdict is Verdict.LOST:
            return found
        if found.verdict is Verdict.SUSPECT:
            verdict = found
    return verdict


def _judge_host(turn: Turn, id_: SliceId, host: HostView, is_missing: bool) -> SliceHealth:
    ledger, timeouts = turn.ledger, turn.spec.runtime.timeouts
    healthy = SliceHealth(id=id_, verdict=Verdict.HEALTHY)
    if is_pending(turn, id_, host):
        return healthy
    report = turn.report(host)
    if report is None:
        return _by(turn, id_, ledger.incarnation_at_s, timeouts.join_seconds) or healthy
    if is_done(turn, report):
        return healthy
    age_s = turn.now_s - report.renewed_at_s
    if age_s > timeouts.report_seconds:
        return _lost(id_, Reason.AGENT_SILENT, report.renewed_at_s)
    turn.wake_at(report.renewed_at_s + timeouts.report_seconds + 0.001)
    if is_missing:
        return _lost(id_, Reason.JOIN_TIMED_OUT, turn.now_s)
    late = None
    if ledger.stage is Stage.RUN and report.incarnation < ledger.incarnation:
        allowed_s = timeouts.join_seconds + timeouts.report_seconds
        late = _by(turn, id_, ledger.incarnation_at_s, allowed_s)
    elif report.incarnation == ledger.incarnation and report.phase is HostPhase.JOINING:
        since_s = max(ledger.incarnation_at_s, report.phase_since_s)
        late = _by(turn, id_, since_s, timeouts.join_seconds + 2 * timeouts.report_seconds)
    if late is not None:
        return late
    if age_s > _quiet_after_s(turn):
        return SliceHealth(
            id=id_,
            verdict=Verdict.SUSPECT,
            reason=Reason.AGENT_SILENT,
            at_s=report.renewed_at_s,
        )
    return healthy


def is_pending(turn: Turn, id_: SliceId, host: HostView) -> bool:
    """Whether a member's agent has not been started yet in the name of this incarnation."""
    if turn.ledger.stage is not Stage.RUN or id_ not in turn.ledger.fresh:
        return False
    return host.started_for is None or host.started_for < turn.ledger.incarnation


def is_gone(turn: Turn, id_: SliceId, host: HostView) -> bool:
    """Whether a member's agent process has ended without having finished."""
    if host.process is ProcessState.ALIVE or is_pending(turn, id_, host):
        return False
    report = turn.report(host)
    return report is None or not is_done(turn, report)


def is_done(turn: Turn, report: Report) -> bool:
    """Whether a host says that all steps are finished and durable."""
    same = report.incarnation == turn.ledger.incarnation
    return same and report.phase is HostPhase.DONE


def judge_standby(turn: Turn, entry: Standby) -> StandbyState:
    """Judge a slice whose agents were started to become a member."""
    timeouts, one = turn.spec.runtime.timeouts, turn.slices.get(entry.id)
    if turn.now_s < entry.since_s or one is None:
        turn.wake_at(entry.since_s)
        return StandbyState.RESTING
    if any(host.process is not ProcessState.ALIVE for host in one.hosts):
        turn.wake_at(entry.since_s + START_WINDOW_S)
        is_over = turn.now_s >= entry.since_s + START_WINDOW_S
        return StandbyState.FAILED if is_over else StandbyState.STARTING
    is_ready = True
    for host in one.hosts:
        report = turn.report(host)
        if report is None:
            is_ready = False
            turn.wake_at(entry.since_s + timeouts.join_seconds)
            if turn.now_s >= entry.since_s + timeouts.join_seconds:
                return StandbyState.FAILED
        elif turn.now_s - report.renewed_at_s > timeouts.report_seconds:
            return StandbyState.FAILED
        else:
            is_warm = report.phase is not HostPhase.STARTING and report.program_ready
            # A program that never gets ready has something to say, and says it when it joins.
            is_late = turn.now_s >= entry.since_s + timeouts.join_seconds
            is_ready = is_ready and (is_warm or is_late)
    return StandbyState.READY if is_ready else StandbyState.STARTING


def is_outage(members: tuple[SliceHealth, ...]) -> bool:
    """Whether most members fell silent together although their processes live (invariant 6).

    Counted are slices with a host that is quiet, that is, whose report is older than half the
    report timeout. It takes more than half of the members and at least two: the loss of one of two
    slices is a loss. A slice whose process ended does not count: that is a fact, not silence.
    """
    quiet = [one for one in members if one.reason is Reason.AGENT_SILENT]
    return len(quiet) >= _OUTAGE_SLICES_MIN and 2 * len(quiet) > len(members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the worker of one member host ended in the present incarnation."""

    host: HostId
    exit: WorkerExit

    @property
    def is_primary(self) -> bool:
        """Whether it can be a first cause. An abort is JAX's answer to somebody else's end."""
        if self.exit.cause is ExitCause.SIGNALED:
            return self.exit.signal != _SIGABRT
        return self.exit.cause is not ExitCause.CONSEQUENCE


def worker_endings(turn: Turn) -> list[Ending]:
    """Return the endings that were neither asked for nor the end of training, oldest first."""
    found = [
        Ending(host=report.host, exit=report.exit)
        for _, _, report in turn.member_reports()
        if report.exit is not None
        and report.exit.incarnation == turn.ledger.incarnation
        and report.exit.cause not in (ExitCause.DONE, ExitCause.LEFT)
    ]
    return sorted(found, key=lambda ending: (ending.exit.at_s, ending.host))


def _missing(turn: Turn) -> frozenset[HostId]:
    """Return the hosts that somebody waited for in vain: the lead, or others for the lead."""
    if turn.ledger.stage is not Stage.RUN:
        return frozenset()
    return frozenset(
        host
        for _, seen, report in turn.current_reports()
        if seen.process is ProcessState.ALIVE and report.phase is HostPhase.JOINING
        for host in report.missing
    )


def _quiet_after_s(turn: Turn) -> float:
    timeouts = turn.spec.runtime.timeouts
    limit_s = timeouts.report_seconds
    return max(limit_s / 2, min(limit_s, 2 * timeouts.report_interval_seconds))


def _by(turn: Turn, id_: SliceId, since_s: float, allowed_s: float) -> SliceHealth | None:
    if turn.now_s >= since_s + allowed_s:
        return _lost(id_, Reason.JOIN_TIMED_OUT, since_s)
    turn.wake_at(since_s + allowed_s)
    return None


def _refusal(turn: Turn, gone: list[HostView]) -> str | None:
    """Return the last words of an agent that could not begin: a failure, and no disruption."""
    for host in gone:
        report = turn.report(host)
        if report is not None and report.address_refused is not None:
            return f"Host {report.host}: {report.address_refused}"
        if report is None and host.exit_code is not None and host.exit_code > 0:
            # It ended itself, so no machine was lost, and the next one would do the same.
            return (
                f"The agent of a host {host.host} at {host.address} ended with code "
                f"{host.exit_code} before its first report; its log says why"
            )
    return None


def _lost(id_: SliceId, reason: Reason, at_s: float) -> SliceHealth:
    return SliceHealth(id=id_, verdict=Verdict.LOST, reason=reason, at_s=at_s)


def _exited_at(turn: Turn, hosts: tuple[HostView, ...] | list[HostView]) -> float:
    known = [host.exited_at_s for host in hosts if host.exited_at_s is not None]
    return min([*known, turn.now_s])


def is_alive(one: SliceView) -> bool:
    """Whether any process of the slice lives."""
    return any(host.process is ProcessState.ALIVE for host in one.hosts)
