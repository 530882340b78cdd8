"""What is tried again waits longer each time, and leaves the user's random numbers alone."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.runtime.backoff import random_exponential


@pytest.mark.parametrize(
    ("attempt", "bound_s"), [(1, 0.02), (2, 0.04), (4, 0.16), (7, 1.0), (10**6, 1.0)]
)
def test_a_wait_is_drawn_below_a_bound_that_doubles(attempt: int, bound_s: float) -> None:
    state: Any = SimpleNamespace(attempt_number=attempt)
    drawn = [random_exponential(0.02, 1.0)(state) for _ in range(200)]
    assert all(0 <= wait_s <= bound_s for wait_s in drawn)
    assert max(drawn) > bound_s / 2
    assert min(drawn) < bound_s / 2


def test_the_users_random_numbers_are_not_drawn_from() -> None:
    state: Any = SimpleNamespace(attempt_number=3)
    before = random.getstate()
    random_exponential(0.02, 1.0)(state)
    assert random.getstate() == before
