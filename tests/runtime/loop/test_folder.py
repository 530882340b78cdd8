"""A step that cannot be saved is told of by its number and why, whenever that is found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from everstep.controller.api.ids import Step
from everstep.runtime.clock import SystemClock
from everstep.runtime.engine import checks
from everstep.runtime.engine.saved import CheckpointFailed
from everstep.runtime.loop.ending import Leave
from everstep.runtime.loop.folder import FolderKeeper
from waiting import wait_for

STATE = {"w": jnp.arange(6.0)}
Open = Callable[[], FolderKeeper]


@pytest.fixture
def open_keeper(tmp_path: Path) -> Iterator[Open]:
    made: list[FolderKeeper] = []

    def open_one() -> FolderKeeper:
        made.append(FolderKeeper(str(tmp_path / "run"), SystemClock()))
        here = SingleDeviceSharding(jax.devices()[0])
        made[-1].restore(STATE, [here], lambda: STATE)
        return made[-1]

    yield open_one
    for keeper in made:
        keeper.close()


@pytest.fixture
def overtaken(open_keeper: Open, monkeypatch: pytest.MonkeyPatch) -> FolderKeeper:
    """A training that another one has overtaken, right after it asked whether one had."""
    keeper = open_keeper()
    open_keeper()
    monkeypatch.setattr(checks, "check_fence", lambda _ledger: None)
    return keeper


def end_by(error: BaseException, keeper: FolderKeeper) -> None:
    """Close as it is done around `train`."""
    try:
        raise error
    finally:
        keeper.close()


def test_a_step_that_is_refused_at_once_is_named_with_the_reason(open_keeper: Open) -> None:
    keeper = open_keeper()
    open_keeper()
    with pytest.raises(CheckpointFailed, match=r"step 3 could not be saved: Fenced: .*is at inc"):
        keeper.capture(Step(3), STATE, is_required=True)


def test_a_step_that_fails_in_the_background_is_named_in_the_same_words(
    overtaken: FolderKeeper,
) -> None:
    overtaken.capture(Step(3), STATE, is_required=True)
    wait_for(lambda: overtaken.failure is not None, what="the failure of the step", timeout_s=60)
    with pytest.raises(CheckpointFailed, match=r"step 3 could not be saved: Fenced: .*is at inc"):
        overtaken.capture(Step(4), STATE, is_required=True)


def test_the_step_that_a_training_leaves_after_is_not_called_saved_when_it_is_not(
    overtaken: FolderKeeper,
) -> None:
    overtaken.capture(Step(3), STATE, is_required=True)
    with pytest.raises(CheckpointFailed, match="step 3 could not be saved"):
        end_by(Leave(3), overtaken)


def test_an_error_of_the_program_goes_first_and_the_step_is_told_of_beside_it(
    overtaken: FolderKeeper, capfd: pytest.CaptureFixture[str]
) -> None:
    overtaken.capture(Step(3), STATE, is_required=True)
    with pytest.raises(ZeroDivisionError):
        end_by(ZeroDivisionError(), overtaken)
    assert capfd.readouterr().err.count("step 3 could not be saved: Fenced") == 1
