"""The chosen cadence costs least, within its bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.runtime.snapshot.cadence import (
    BLOCKED_SHARE_MAX,
    EVERY_STEPS_MAX,
    choose_every_steps,
)

copies = st.floats(0, 60)
steps = st.floats(1e-3, 60)
rates = st.floats(0, 60)


def cost(every: int, copy_s: float, step_s: float, losses_per_hour: float) -> float:
    """Expected time per second of training: exponential losses, an interval repeated whole."""
    mean_s = 3600 / losses_per_hour
    interval_s = every * step_s
    return mean_s * math.expm1((interval_s + copy_s) / mean_s) / interval_s


@given(st.floats(0.01, 10), st.floats(0.01, 10), st.floats(0.1, 10))
def test_no_other_cadence_costs_noticeably_less(
    copy_s: float, step_s: float, losses_per_hour: float
) -> None:
    chosen = choose_every_steps(copy_s, step_s, losses_per_hour)
    least = math.ceil(copy_s * (1 - BLOCKED_SHARE_MAX) / BLOCKED_SHARE_MAX / step_s)
    found = cost(chosen, copy_s, step_s, losses_per_hour)
    for other in {max(least, 1), chosen * 2, max(least, chosen // 2, 1)}:
        if other <= EVERY_STEPS_MAX:
            assert found <= cost(other, copy_s, step_s, losses_per_hour) * 1.01


@given(copies, steps, rates)
def test_a_cadence_is_at_least_one_step_and_blocks_a_bounded_share(
    copy_s: float, step_s: float, losses_per_hour: float
) -> None:
    every = choose_every_steps(copy_s, step_s, losses_per_hour)
    assert every >= 1
    assert copy_s / (copy_s + every * step_s) <= BLOCKED_SHARE_MAX * 1.0001


@given(copies, steps, rates, rates)
def test_more_losses_never_make_snapshots_rarer(
    copy_s: float, step_s: float, a: float, b: float
) -> None:
    seldom, often = sorted((a, b))
    assert choose_every_steps(copy_s, step_s, often) <= choose_every_steps(copy_s, step_s, seldom)


def test_a_slot_is_never_wanted_before_it_can_be_valid() -> None:
    assert choose_every_steps(0.001, 0.1, 3600.0, complete_s=2.0) >= 20


@pytest.mark.parametrize(
    ("copy_s", "step_s", "losses", "expected"),
    [
        (0.0, 1.0, 1.0, 1),
        (0.0, 1.0, 0.0, 1),
        (1.0, 1.0, 0.0, EVERY_STEPS_MAX),
        (0.5, 0.3, 1.0, 199),
    ],
    ids=["a copy costs nothing", "nothing costs anything", "nothing is lost", "an ordinary job"],
)
def test_known_cadences(copy_s: float, step_s: float, losses: float, expected: int) -> None:
    assert choose_every_steps(copy_s, step_s, losses) == expected
