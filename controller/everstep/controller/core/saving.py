"""What members that wait bring to storage before their memory is let go.

Agents of a waiting job save by themselves what only memory holds; the directive to wait asks for
it. Here is decided who is not let go before that, and for how long.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.controller.api.ids import SliceId, Step
from everstep.controller.api.wire import Command
from everstep.controller.core.deadlines import drain_until_s
from everstep.controller.core.model import ProcessState
from everstep.controller.core.turn import Turn

SAVE_PATIENCE_S = 300.0
"""How long a job that is suspended while it waits keeps its slices for this."""
SAVE_LATER_S_MIN = 5.0
"""A notice shorter than this leaves no time for a write that has not begun."""


def save_all_until_s(turn: Turn) -> float | None:
    """Return until when a job that is to be suspended keeps its members; None when no longer."""
    turnover = turn.ledger.turnover
    if turnover is None or not _is_saving(turn, turn.ledger.members):
        return None
    return _wait_until(turn, turnover.halted_at_s + SAVE_PATIENCE_S)


def save_doomed_until_s(turn: Turn) -> float | None:
    """Return until when a waiting job does not go on without its members under notice.

    They may be the only ones that hold a part of the newest step, and going on lets them go. None
    when nothing is gained by that.
    """
    turnover = turn.ledger.turnover
    if turnover is None:
        return None
    began_s = {
        id_: max(turnover.halted_at_s, turn.notices[id_].first_seen_s)
        for id_ in turn.ledger.members
        if turn.is_doomed(id_)
    }
    doomed = [
        id_ for id_ in began_s if turn.notices[id_].deadline_s - began_s[id_] >= SAVE_LATER_S_MIN
    ]
    if not doomed or not _is_saving(turn, doomed):
        return None
    budget_s = turn.spec.checkpoint.emergency.budget_seconds
    latest_s = max(began_s[id_] for id_ in doomed) + budget_s
    deadlines = [drain_until_s(turn, turn.notices[id_]) for id_ in doomed]
    return _wait_until(turn, min(latest_s, *deadlines))


def _wait_until(turn: Turn, until_s: float) -> float | None:
    turn.wake_at(until_s)
    return until_s if turn.now_s < until_s else None


def _is_saving(turn: Turn, holders: Sequence[SliceId]) -> bool:
    """Whether some of these members hold a step that can still be brought to storage."""
    current = turn.current_reports()
    held = [
        report.step_snapshot or Step(0)
        for one, host, report in current
        if one.id in holders and host.process is ProcessState.ALIVE
    ]
    stored = max((report.step_committed or Step(0) for _, _, report in current), default=Step(0))
    if max(held, default=Step(0)) <= stored:
        return False
    # Storage that refuses is not waited for, nor is a lead that has tried in vain.
    if any(report.storage_error is not None for _, _, report in current):
        return False
    lead, order = turn.lead_report(), turn.view.directive
    return (
        lead is None
        or order is None
        or order.command is not Command.WAIT
        or lead.save_settled != order.sequence
    )
