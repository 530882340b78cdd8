"""Waits between tries, drawn so that all who failed together do not come back together.

tenacity draws its own from Python's global generator. That one belongs to the user's program, whose
numbers must not depend on how often a request of ours was tried again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import tenacity

_DOUBLINGS_MAX = 32
_drawn = secrets.SystemRandom()


def random_exponential(first_s: float, most_s: float) -> Callable[[tenacity.RetryCallState], float]:
    """Wait between nothing and a bound that doubles with every try ("full jitter").

    Args:
        first_s: the bound after the first try.
        most_s: no bound is larger.
    """

    def wait_s(state: tenacity.RetryCallState) -> float:
        doublings = min(state.attempt_number - 1, _DOUBLINGS_MAX)
        return _drawn.uniform(0.0, min(most_s, first_s * 2.0**doublings))

    return wait_s
