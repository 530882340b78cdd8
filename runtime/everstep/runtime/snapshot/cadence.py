"""How often to take a snapshot: the interval at which copying and repeating cost least. Pure."""

from __future__ import annotations

import math

LOSSES_PER_HOUR_UNKNOWN = 1.0
"""Assumed before anything was lost: spot capacity sees about one loss in some hours, and to copy
a little too often costs less than to repeat too much."""

BLOCKED_SHARE_MAX = 0.05
"""Snapshots never take more than this share of the time, however often something is lost."""

EVERY_STEPS_MAX = 1000
"""Beyond it a step costs so little that the interval does not matter."""


def choose_every_steps(
    copy_s: float,
    step_s: float,
    losses_per_hour: float = LOSSES_PER_HOUR_UNKNOWN,
    *,
    complete_s: float = 0.0,
) -> int:
    """Choose the steps between two snapshots (Young's optimum with Daly's correction).

    Args:
        copy_s: how long a step is blocked by a snapshot.
        step_s: how long a step takes without one.
        losses_per_hour: unplanned losses of any member of the job.
        complete_s: from the end of a copy until its slot is valid (checksums). A shorter interval
            would find no slot to write to.

    Returns:
        At least 1; at most `EVERY_STEPS_MAX`, unless the bounds on blocked time and on `complete_s`
        need more.
    """
    step_s = max(step_s, 1e-6)
    copy_s = max(copy_s, 0.0)
    interval_s = _optimum_s(copy_s, losses_per_hour)
    # Both bounds are of the time between the end of one copy and the start of the next.
    least_s = max(complete_s, copy_s * (1 - BLOCKED_SHARE_MAX) / BLOCKED_SHARE_MAX)
    wanted = max(1, round(min(interval_s / step_s, EVERY_STEPS_MAX)))
    return max(wanted, math.ceil(least_s / step_s))


def _optimum_s(copy_s: float, losses_per_hour: float) -> float:
    """Seconds of training between two copies at which the expected cost is least."""
    if losses_per_hour <= 0:
        return math.inf if copy_s > 0 else 0.0
    between_losses_s = 3600 / losses_per_hour
    if copy_s >= 2 * between_losses_s:
        return between_losses_s
    ratio = copy_s / (2 * between_losses_s)
    root = math.sqrt(2 * copy_s * between_losses_s)
    return root * (1 + math.sqrt(ratio) / 3 + ratio / 9) - copy_s
