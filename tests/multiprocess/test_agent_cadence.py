"""Snapshots by the automatic cadence, and replicas where they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rig import Rig, free_number, host, settings_of
from waiting import wait_for

pytestmark = pytest.mark.processes

SLICES = {0: 1, 1: 1}
HOSTS = (host(0), host(1))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    number = free_number(tmp_path)
    rig = Rig(folder=tmp_path, number=number, settings=settings_of(tmp_path))
    rig.environment = {"STEPS": "100000", "STEP_S": "0.05"}
    yield rig
    rig.stop_all()
    rig.assert_nothing_left()
    rig.close()


def test_the_automatic_cadence_is_measured_and_told_to_all_members(rig: Rig) -> None:
    rig.settings = settings_of(rig.folder, snapshot_every_steps=None)
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    rig.wait_running(*HOSTS, incarnation=1)
    wait_for(lambda: "snapshot cadence" in rig.logs(), what="a measured cadence")
    for one in HOSTS:
        # A copy of 48 KiB costs nearly nothing, so it is taken more often than every ten steps.
        rig.wait(one, lambda r: r.step_snapshot is not None and r.step_snapshot % 10 != 0)


def test_with_replicas_a_state_sharded_across_slices_survives_a_loss_without_notice(
    rig: Rig,
) -> None:  # G3
    rig.settings = settings_of(rig.folder, snapshot_replicas=1, snapshot_every_steps=10)
    rig.environment["SHARDED"] = "1"
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    rig.wait(host(0), lambda r: r.step_snapshot == 20)
    step = rig.wait(host(0), lambda r: r.step >= 25).step
    rig.agents[host(1)].kill()
    rig.direct(2, {0: 1})
    report = rig.wait(host(0), lambda r: r.incarnation == 2 and r.restore is not None)
    assert report.restore is not None
    assert report.restore.source == "memory"
    assert step - report.restore.step <= 20
    rig.agents.pop(host(1)).wait()
