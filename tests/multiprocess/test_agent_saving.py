"""What only memory holds is on storage before the memory is given up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agent_rig import Rig, free_number, host, settings_of
from everstep.controller.api.wire import Command, HostPhase
from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.reader import CheckpointReader, read_leaf
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
    rig.close()


def newest_durable(rig: Rig) -> int:
    """The newest step on storage, whose every element must be that step."""
    store = open_store(rig.settings.checkpoint_uri)
    commits = list_commits(store)
    if not commits:
        return 0
    values = read_leaf(CheckpointReader(store, commits[-1]), 0)
    assert np.all(values == commits[-1].step)
    return commits[-1].step


def train(rig: Rig, *, sharded: bool = False, past: int = 6) -> None:
    if sharded:
        rig.environment["SHARDED"] = "1"
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    for one in HOSTS:
        rig.wait(one, lambda r: r.step >= past)


def held_by(rig: Rig) -> int:
    return min(
        report.step_snapshot or 0 for one in HOSTS if (report := rig.report(one)) is not None
    )


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
def test_a_job_that_ends_without_success_keeps_its_newest_held_step(
    rig: Rig, sharded: bool
) -> None:
    train(rig, sharded=sharded)
    held = held_by(rig)
    rig.direct(1, SLICES, command=Command.STOP)
    assert {rig.agents[one].wait(20) for one in HOSTS} == {0}
    assert newest_durable(rig) >= max(held, 2)
    rig.assert_nothing_left()


def test_what_survivors_hold_is_saved_while_the_job_waits(rig: Rig) -> None:
    train(rig)
    held = held_by(rig)
    os.killpg(rig.agents[host(0)].pid, signal.SIGKILL)
    rig.direct(1, {1: 1}, command=Command.WAIT)
    wait_for(lambda: newest_durable(rig) >= max(held, 2), what="a commit")
    saved = newest_durable(rig)
    # It is on storage already: leaving writes nothing more, and takes no time.
    rig.direct(1, {1: 1}, command=Command.STOP)
    assert rig.agents[host(1)].wait(20) == 0
    assert newest_durable(rig) == saved


def test_an_agent_whose_lead_is_gone_does_not_stay(rig: Rig) -> None:
    train(rig)
    os.killpg(rig.agents[host(0)].pid, signal.SIGKILL)
    rig.direct(1, SLICES, command=Command.STOP)
    assert rig.agents[host(1)].wait(20) == 0


def test_storage_that_refuses_holds_nobody_up(rig: Rig, tmp_path: Path) -> None:
    train(rig)
    Path(rig.settings.checkpoint_uri).parent.joinpath("blocked").write_text("a file")
    settings = msgspec.structs.replace(
        rig.settings, checkpoint_uri=str(tmp_path / "blocked" / "run")
    )
    rig.direct(1, SLICES, command=Command.STOP, settings=settings)
    assert {rig.agents[one].wait(20) for one in HOSTS} == {0}
    assert "held steps not saved" in rig.logs()


def test_the_next_incarnation_does_not_wait_for_a_save(rig: Rig) -> None:
    train(rig)
    rig.direct(1, SLICES, command=Command.WAIT)
    for one in HOSTS:
        rig.wait_phase(one, HostPhase.WAITING)
    rig.direct(2, SLICES)
    rig.wait_running(*HOSTS, incarnation=2)
    report = rig.report(host(0))
    assert report is not None
    assert report.restore is not None
    assert report.restore.source == "memory"


def test_at_any_step_rate_a_step_that_is_due_is_written(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, snapshot_every_steps=1, checkpoint_every_steps=100)
    rig = Rig(folder=tmp_path, number=free_number(tmp_path), settings=settings)
    rig.environment = {"STEPS": "100000", "STEP_S": "0"}
    try:
        rig.start(host(0))
        rig.direct(1, {0: 1})
        rig.wait(host(0), lambda r: (r.step_committed or 0) >= 300)
    finally:
        rig.close()
    assert "was not committed" not in rig.logs()
