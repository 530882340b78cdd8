"""When what was begun has to be over: a notice's drain, a job's active time."""

from __future__ import annotations

from everstep.controller.core.model import Notice
from everstep.controller.core.turn import Turn

_MARGIN_SHARE = 0.25
"""A notice shorter than the margin keeps three quarters of itself for the drain."""


def drain_until_s(turn: Turn, notice: Notice) -> float:
    """Return the deadline of the drain: the notice's, less a margin, and not absurdly late."""
    emergency, timeouts = turn.spec.checkpoint.emergency, turn.spec.runtime.timeouts
    length_s = max(0.0, notice.deadline_s - notice.first_seen_s)
    margin_s = min(emergency.safety_margin_seconds, _MARGIN_SHARE * length_s)
    began_s = turn.now_s if turn.ledger.incident is None else turn.ledger.incident.decided_at_s
    latest_s = began_s + max(emergency.budget_seconds, timeouts.progress_seconds)
    return min(notice.deadline_s - margin_s, latest_s)


def deadline_text(turn: Turn) -> str:
    limit_s = turn.spec.active_deadline_seconds or 0.0
    return f"The job ran longer than {limit_s:g} s (spec.activeDeadlineSeconds)."


def active_until_s(turn: Turn) -> float | None:
    limit_s, since_s = turn.spec.active_deadline_seconds, turn.ledger.started_at_s
    return None if limit_s is None or since_s is None else since_s + limit_s
