"""A training that may not outrun its rehearsal waits, and goes on as soon as it may."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.runtime.examples.pace import PAUSE_S_MAX, PAUSE_S_MIN, Pace, pause_s

COUNTS = st.integers(2, 100_000)


@given(step_count=COUNTS, bound=st.integers(0, 100_000), step=st.integers(0, 100_000))
def test_only_what_is_ahead_waits(step_count: int, bound: int, step: int) -> None:
    assert (pause_s(step, step_count=step_count, bound=bound) > 0) == (step + 1 > bound)


def test_each_step_ahead_waits_twice_as_long_and_none_but_the_last_longer_than_a_bound() -> None:
    found = [pause_s(step, step_count=30, bound=10) for step in range(10, 30)]
    assert found[:4] == [PAUSE_S_MIN * factor for factor in (1, 2, 4, 8)]
    assert max(found[:-1]) == PAUSE_S_MAX
    assert found[-1] == math.inf


def test_the_longest_pause_can_be_set() -> None:
    found = [pause_s(step, step_count=30, bound=10, longest_s=0.4) for step in range(10, 29)]
    assert found == [PAUSE_S_MIN, *[0.4] * 18]


@pytest.fixture
def pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pace"
    monkeypatch.setenv("PACE", str(path))
    return path


@pytest.mark.parametrize("told", ["20", None], ids=["it may go on", "the story is over"])
def test_the_last_step_waits_until_it_is_told(pace: Path, told: str | None) -> None:
    pace.write_text("5")
    went_on = threading.Event()

    def train() -> None:
        incarnation = Pace(10)
        incarnation.keep(8)
        incarnation.keep(9)
        went_on.set()

    thread = threading.Thread(target=train)
    thread.start()
    # Longer than any look at the file takes: a step that does not wait would be through.
    was_early = went_on.wait(0.5)
    if told is None:
        pace.unlink()
    else:
        draft = pace.with_suffix(".draft")
        draft.write_text(told)
        draft.replace(pace)
    thread.join(30)
    assert not was_early
    assert went_on.is_set()


def test_without_a_file_nothing_waits(pace: Path) -> None:
    assert not pace.exists()
    incarnation = Pace(10)
    incarnation.keep(8)
    incarnation.keep(9)


def test_the_first_step_of_an_incarnation_never_waits(pace: Path) -> None:
    pace.write_text("0")
    Pace(10).keep(9)
