"""How a rehearsed training is kept from ending before its rehearsal does.

`PACE` is the path of a file that holds a number of steps. A training that has gone further waits in
each step, twice as long as in the one before, and in its last step until the file is gone. A hold
or a notice that comes meanwhile waits for the step under way, so for about as long as the training
has been ahead, and not longer than `PACE_S_MAX` says (15 s). What is computed is the same at any
pace.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

PAUSE_S_MIN = 0.25
PAUSE_S_MAX = 15.0
"""Well within the time after which a step that does not end is taken for one that hangs."""
LOOK_EVERY_S = 0.05


def pause_s(step: int, *, step_count: int, bound: int, longest_s: float = PAUSE_S_MAX) -> float:
    """How long a step waits.

    Args:
        step: number of the step, from 0.
        step_count: of the whole training.
        bound: steps that may be finished without waiting.
        longest_s: of any step but the last.
    """
    ahead = step + 1 - bound
    if ahead <= 0:
        return 0.0
    if step + 1 >= step_count:
        return math.inf
    # Without the bound on the exponent the power of a long training would be no number any more.
    return min(longest_s, PAUSE_S_MIN * 2.0 ** min(ahead - 1, 16))


class Pace:
    """The pace of one incarnation."""

    def __init__(self, step_count: int) -> None:
        self._step_count = step_count
        self._path = os.environ.get("PACE")
        self._longest_s = float(os.environ.get("PACE_S_MAX", PAUSE_S_MAX))
        self._is_first = True

    def keep(self, step: int) -> None:
        """Wait as `PACE` says; it is looked at again meanwhile. Without it nothing is done.

        The first step of an incarnation never waits: the rehearsal waits for that one.
        """
        is_first, self._is_first = self._is_first, False
        if not self._path or is_first:
            return
        began_s = time.monotonic()
        while (bound := _bound_in(Path(self._path))) is not None:
            wait_s = pause_s(
                step, step_count=self._step_count, bound=bound, longest_s=self._longest_s
            )
            left_s = began_s + wait_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(LOOK_EVERY_S, left_s))


def _bound_in(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None
