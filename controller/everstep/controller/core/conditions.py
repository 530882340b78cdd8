"""The conditions of a job: one question each, answered by True or False with a reason."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.controller.api.ids import SliceId
from everstep.controller.api.reasons import TABLE, Reason
from everstep.controller.api.status import Condition, JobStatus, LastCommitted, Phase
from everstep.controller.api.suspicions import suspicions
from everstep.controller.core.ledger import Stage
from everstep.controller.core.turn import Turn

COMMITTED = "CheckpointCommitted"
_LESS_THAN_NEEDED = (
    Reason.WAITING_FOR_REPLACEMENT,
    Reason.BELOW_MINIMUM_SLICES,
    Reason.DISRUPTION_STORM,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a job stands, in one phase and one sentence, and what it has on storage."""

    phase: Phase
    reason: Reason
    message: str
    committed: LastCommitted | None


def judge_conditions(turn: Turn, old: JobStatus, standing: Standing) -> tuple[Condition, ...]:
    """Return all conditions, with the times of those that did not turn kept."""
    phase, reason, message = standing.phase, standing.reason, standing.message
    ledger, suspect = turn.ledger, _suspect(turn)
    finish = ledger.finish
    is_ready = phase is Phase.RUNNING
    is_less = is_ready and len(ledger.members) < turn.spec.slices.desired
    degraded = is_less or (ledger.stage is Stage.WAIT and reason in _LESS_THAN_NEEDED)
    doomed: list[SliceId] = sorted(id_ for id_ in turn.notices if id_ in ledger.members)
    wanted = [
        ("Ready", is_ready, reason, message),
        (
            "Degraded",
            degraded,
            _why_degraded(reason) if degraded else Reason.ALL_SLICES_RUNNING,
            "",
        ),
        (
            "DisruptionPending",
            bool(doomed),
            Reason.PREEMPTION_NOTICE,
            f"Slices under notice: {', '.join(map(str, doomed))}." if doomed else "",
        ),
        (COMMITTED, *_committed(turn, standing.committed)),
        ("Suspended", phase is Phase.SUSPENDED, Reason.SUSPENDED, ""),
        ("ConfigurationSuspect", bool(suspect), Reason.CONFIGURATION_SUSPECT, suspect),
    ]
    if finish is not None:
        wanted.append(("Succeeded", finish.succeeded, finish.reason, finish.message))
    known = {condition.type: condition for condition in old.conditions}
    return tuple(
        _condition(turn, known.get(type_), type_, is_true, why, text)
        for type_, is_true, why, text in wanted
    )


def _why_degraded(reason: Reason) -> Reason:
    """Of a job whose last step is done, the standing tells of storage and not of the slices."""
    return Reason.RUNNING_DEGRADED if reason is Reason.STORAGE_WRITE_FAILED else reason


def _committed(turn: Turn, newest: LastCommitted | None) -> tuple[bool, Reason, str]:
    """Say what is on storage, or why what ought to be there is not."""
    trouble = turn.ledger.trouble
    known = "" if newest is None else f"Step {newest.step} is on storage."
    if trouble is not None:
        return False, trouble.reason, f"{trouble.message} {known}".strip()
    if newest is None:
        return False, Reason.NOT_COMMITTED_YET, TABLE[Reason.NOT_COMMITTED_YET].sentence
    return True, Reason.STEP_COMMITTED, known


def _suspect(turn: Turn) -> str:
    notes = [str(problem) for problem in suspicions(turn.spec)]
    reports = [report for _, _, report in turn.current_reports()]
    notes += sorted({one.fork_refused for one in reports if one.fork_refused is not None})
    return "; ".join(notes)


def _condition(
    turn: Turn, old: Condition | None, type_: str, is_true: bool, reason: Reason, message: str
) -> Condition:
    status = "True" if is_true else "False"
    same = old is not None and old.status == status
    return Condition(
        type=type_,
        status=status,
        reason=reason.value,
        message=message,
        last_transition_at_s=old.last_transition_at_s if old is not None and same else turn.now_s,
        observed_generation=turn.view.generation,
    )
