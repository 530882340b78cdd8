"""Agents as real processes: the join, the run, and the ends of everything below them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rig import Rig, free_number, host, settings_of
from everstep.controller.api.wire import ExitCause, HostPhase

pytestmark = pytest.mark.processes


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    number = free_number(tmp_path)
    rig = Rig(folder=tmp_path, number=number, settings=settings_of(tmp_path))
    yield rig
    rig.close()


def test_two_slices_join_run_to_the_end_and_stop(rig: Rig) -> None:
    rig.start(host(0), host(1))
    rig.direct(1, {0: 1, 1: 1})
    for one in (host(0), host(1)):
        report = rig.wait_phase(one, HostPhase.DONE)
        assert report.exit is not None
        assert report.exit.cause is ExitCause.DONE
        assert report.step == 20
    assert [(line.step, line.values["loss"]) for line in rig.metrics()] == [
        (step, 1.0 / step) for step in range(1, 21)
    ]
    assert set(rig.stop().values()) == {0}
    rig.assert_nothing_left()
