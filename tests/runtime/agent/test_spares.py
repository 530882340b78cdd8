"""A spare worker: taken when it is surely fit, and otherwise as if there had been none."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import structlog

from agent_rig import PROGRAM, host, settings_of
from everstep.controller.api.ids import Incarnation, Rank
from everstep.runtime.agent.link import Assignment, Connected, patience_of
from everstep.runtime.agent.supervisor.programs import Program, WorkerProcess
from everstep.runtime.agent.supervisor.spares import is_running

pytestmark = pytest.mark.processes

WAIT_S = 60.0


def assignment(folder: Path, **changes: object) -> Assignment:
    return Assignment(
        job="job",
        job_uid="uid",
        host=host(0),
        incarnation=Incarnation(1),
        rank=Rank(0),
        process_count=1,
        members=(),
        coordinator_address="",
        local_address="127.0.0.1",
        token="token",
        settings=settings_of(folder, **changes),
        restore_step=None,
    )


@pytest.fixture(autouse=True)
def _meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the workers of the program meet instead of in collectives."""
    monkeypatch.setenv("MEETING", str(tmp_path / "meeting"))


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never held"
        await asyncio.sleep(0.01)


def carry(folder: Path, story: Callable[[Program, Assignment], Awaitable[None]]) -> None:
    """Run a story on a program that is imported, and has a warm spare."""

    async def run() -> None:
        program = Program(PROGRAM, structlog.get_logger(), lambda: None)
        order = assignment(folder)
        program.warm()
        try:
            await wait_until(lambda: program.is_ready)
            await program.keep_spare(patience_of(order.settings))
            await wait_until(lambda: program.has_warm_spare)
            await story(program, order)
        finally:
            program.close()

    asyncio.run(run())


def spare_pid(program: Program) -> int:
    zygote = min(program.own_pids)
    (pid,) = map(int, Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split())
    return pid


async def launch(program: Program, order: Assignment) -> WorkerProcess:
    """Launch a worker, which must act on its assignment."""
    worker = await program.launch(order, (), lambda _: None)
    frame = await asyncio.wait_for(worker.link.receive(), WAIT_S)
    assert isinstance(frame, Connected)
    assert frame.pid == worker.pid
    return worker


async def end(worker: WorkerProcess) -> None:
    worker.kill()
    await asyncio.wait_for(worker.exited, WAIT_S)
    worker.close()


def test_a_warm_spare_becomes_the_next_worker(tmp_path: Path) -> None:
    async def story(program: Program, order: Assignment) -> None:
        pid = spare_pid(program)
        worker = await launch(program, order)
        assert worker.pid == pid
        assert not program.has_warm_spare
        await end(worker)

    carry(tmp_path, story)


def test_a_second_worker_gets_a_fork_of_its_own_when_no_spare_is_left(tmp_path: Path) -> None:
    async def story(program: Program, order: Assignment) -> None:
        first = await launch(program, order)
        await end(first)
        second = await launch(program, order)
        assert second.pid != first.pid
        await end(second)

    carry(tmp_path, story)


def test_a_spare_is_kept_beside_a_worker_and_outlives_it(tmp_path: Path) -> None:
    async def story(program: Program, order: Assignment) -> None:
        first = await launch(program, order)
        await program.keep_spare(patience_of(order.settings))
        await wait_until(lambda: program.has_warm_spare)
        await end(first)
        assert program.has_warm_spare
        await end(await launch(program, order))

    carry(tmp_path, story)


def test_keeping_a_spare_again_makes_no_second_one(tmp_path: Path) -> None:
    async def story(program: Program, order: Assignment) -> None:
        pid = spare_pid(program)
        await program.keep_spare(patience_of(order.settings))
        assert spare_pid(program) == pid

    carry(tmp_path, story)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_spare_that_cannot_act_is_replaced_by_a_fork(
    tmp_path: Path, number: signal.Signals
) -> None:
    async def story(program: Program, order: Assignment) -> None:
        pid = spare_pid(program)
        os.kill(pid, number)
        await wait_until(lambda: not is_running(pid))
        worker = await launch(program, order)
        assert worker.pid != pid
        await wait_until(lambda: not Path(f"/proc/{pid}").exists())
        await end(worker)

    carry(tmp_path, story)


def test_a_spare_of_other_settings_is_not_used(tmp_path: Path) -> None:
    async def story(program: Program, order: Assignment) -> None:
        pid = spare_pid(program)
        other = assignment(tmp_path, start_grace_s=77.0)
        assert patience_of(other.settings) != patience_of(order.settings)
        worker = await launch(program, other)
        assert worker.pid != pid
        await end(worker)

    carry(tmp_path, story)


def test_a_spare_ends_with_its_zygote(tmp_path: Path) -> None:
    async def story(program: Program, order: Assignment) -> None:
        pid = spare_pid(program)
        os.kill(min(program.own_pids), signal.SIGKILL)
        await wait_until(lambda: not is_running(pid))
        worker = await launch(program, order)
        await end(worker)

    carry(tmp_path, story)


def test_no_spare_is_kept_of_a_program_that_is_not_imported_yet() -> None:
    async def run() -> None:
        command = (sys.executable, "-c", "import threading; threading.Event().wait()")
        program = Program(command, structlog.get_logger(), lambda: None)
        program.warm()
        try:
            await asyncio.wait_for(program.keep_spare(1.0), WAIT_S)
            assert not program.has_warm_spare
        finally:
            program.close()

    asyncio.run(run())
