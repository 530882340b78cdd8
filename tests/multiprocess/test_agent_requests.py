"""What the lead does when it is asked: agree, hold, evacuate, commit, acknowledge."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rig import Rig, free_number, host, settings_of
from everstep.controller.api.ids import SliceId
from everstep.controller.api.wire import (
    Command,
    ExitCause,
    Held,
    HostPhase,
    Report,
    Request,
    RequestKind,
)
from waiting import wait_for

pytestmark = pytest.mark.processes

SLICES = {0: 1, 1: 1, 2: 1}
HOSTS = (host(0), host(1), host(2))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    number = free_number(tmp_path)
    rig = Rig(folder=tmp_path, number=number, settings=settings_of(tmp_path))
    rig.environment = {"STEPS": "100000", "STEP_S": "0.05"}
    yield rig
    rig.close()


def leave(number: int, *doomed: int, in_s: float = 10.0, durable: bool = False) -> Request:
    return Request(
        id=f"1-{number}",
        kind=RequestKind.LEAVE,
        doomed=tuple(map(SliceId, doomed)),
        durable=durable,
        deadline_s=time.time() + in_s,
    )


def held_of(report: Report) -> Held:
    assert report.held is not None
    return report.held


def is_held(report: Report) -> bool:
    return report.held is not None


def test_members_leave_after_one_agreed_step_and_none_is_lost(rig: Rig) -> None:  # G2
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    rig.wait_running(*HOSTS, incarnation=1)
    rig.direct(1, SLICES, request=leave(1, 1))
    held = held_of(rig.wait(host(0), is_held))
    assert held.complete, held
    assert not held.durable
    for one in HOSTS:
        report = rig.wait(one, lambda r: r.exit is not None)
        assert report.phase is HostPhase.HELD
        assert report.exit is not None
        assert (report.exit.cause, report.exit.step) == (ExitCause.LEFT, held.step)
    rig.direct(2, {0: 1, 2: 1})
    for one in (host(0), host(2)):
        report = rig.wait(one, lambda r: r.incarnation == 2 and r.restore is not None)
        assert report.restore is not None
        assert report.restore.step == held.step
        assert report.restore.source == "memory"
    assert rig.wait_phase(host(1), HostPhase.WAITING).incarnation == 2


def test_what_only_the_doomed_slice_holds_moves_to_the_survivors(rig: Rig) -> None:  # G2
    rig.environment["SHARDED"] = "1"
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    rig.wait_running(*HOSTS, incarnation=1)
    rig.direct(1, SLICES, request=leave(1, 1))
    held = held_of(rig.wait(host(0), is_held))
    assert held.complete, held
    assert held.bytes_moved == 48 * 1024 // 3
    assert set(held.where) == {host(0), host(2)}
    rig.agents[host(1)].kill()
    rig.direct(2, {0: 1, 2: 1})
    for one in (host(0), host(2)):
        report = rig.wait(one, lambda r: r.incarnation == 2 and r.restore is not None)
        assert report.restore is not None
        assert report.restore.step == held.step


def test_a_notice_to_every_slice_makes_the_step_durable(rig: Rig) -> None:
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    rig.wait_running(*HOSTS, incarnation=1)
    rig.direct(1, SLICES, request=leave(1, 0, 1, 2))
    held = held_of(rig.wait(host(0), is_held))
    assert held.complete, held
    assert held.durable
    assert rig.wait(host(0), lambda r: r.step_committed == held.step)


def test_a_checkpoint_request_lets_training_go_on(rig: Rig) -> None:
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    rig.wait_running(*HOSTS, incarnation=1)
    request = Request(
        id="1-1", kind=RequestKind.CHECKPOINT, durable=True, deadline_s=time.time() + 10
    )
    rig.direct(1, SLICES, request=request)
    held = held_of(rig.wait(host(0), is_held))
    assert held.complete, held
    assert held.durable
    for one in HOSTS:
        report = rig.wait(one, lambda r: r.step > held.step)
        assert report.exit is None


def test_a_notice_in_a_long_evaluation_falls_back_to_what_is_held(rig: Rig) -> None:
    rig.environment |= {"PAUSE_AT": "11", "PAUSE_S": "60"}
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    for one in HOSTS:
        rig.wait(one, lambda r: r.step_snapshot == 10)
    assert_held_by_the_deadline(rig, 1, step=10)


def test_a_notice_while_a_program_prepares_costs_nothing(rig: Rig) -> None:  # G2
    rig.environment["PREPARE_S"] = "60"
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    rig.wait_running(*HOSTS, incarnation=1)
    rig.direct(1, SLICES, request=leave(1))
    step = held_of(rig.wait(host(0), is_held)).step
    rig.direct(2, SLICES)
    for one in HOSTS:
        rig.wait(one, lambda r: r.incarnation == 2 and r.phase is HostPhase.RESTORING)
    assert_held_by_the_deadline(rig, 2, step=step)


def assert_held_by_the_deadline(rig: Rig, incarnation: int, *, step: int) -> None:
    request = leave(9, 1, in_s=4.0)
    rig.direct(incarnation, SLICES, request=request)
    report = rig.wait(host(0), is_held)
    held = held_of(report)
    assert held.complete, held
    assert held.step == step
    assert report.renewed_at_s < request.deadline_s
    for one in HOSTS:
        ended = rig.wait(one, lambda r: r.exit is not None).exit
        assert ended is not None
        assert ended.cause is ExitCause.LEFT


def test_steps_that_are_due_become_checkpoints_and_old_ones_are_dropped(rig: Rig) -> None:
    rig.settings = settings_of(rig.folder, checkpoint_every_steps=10, retention_latest=2)
    rig.environment |= {"STEPS": "60", "SHARDED": "1"}
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    for one in HOSTS:
        report = rig.wait_phase(one, HostPhase.DONE, timeout_s=40)
        assert report.step_committed == 60
        assert report.storage_error is None
    wait_for(
        lambda: len(list((rig.folder / "run").glob("step-*"))) == 2, what="old steps to be dropped"
    )
    rig.stop()
    rig.assert_nothing_left()


def test_everything_lost_resumes_from_the_newest_checkpoint(rig: Rig) -> None:
    rig.settings = settings_of(rig.folder, checkpoint_every_steps=10)
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    committed = rig.wait(host(0), lambda r: (r.step_committed or 0) >= 20).step_committed
    assert committed is not None
    for one in HOSTS:
        rig.agents[one].kill()
    rig.start(*HOSTS)
    rig.direct(2, {0: 1, 1: 1})
    report = rig.wait(host(0), lambda r: r.incarnation == 2 and r.restore is not None)
    assert report.restore is not None
    assert report.restore.source == "storage"
    assert report.restore.step >= committed


def test_a_finished_run_that_is_started_again_writes_nothing(rig: Rig) -> None:
    rig.environment["STEPS"] = "6"
    rig.start(host(0))
    rig.direct(1, {0: 1})
    rig.wait_phase(host(0), HostPhase.DONE)
    rig.stop()
    before = sorted(str(path) for path in (rig.folder / "run").rglob("step-*/*"))
    rig.start(host(0))
    rig.direct(2, {0: 1}, command=Command.RUN)
    report = rig.wait_phase(host(0), HostPhase.DONE)
    assert report.step == 6
    assert sorted(str(path) for path in (rig.folder / "run").rglob("step-*/*")) == before
