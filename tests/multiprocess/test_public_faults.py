"""What went wrong elsewhere between a signal and the program that should have heard of it.

A notice reaches only the first process of a container, or all of its group at once; the program is
behind a shell that does not hand signals on, or has a handler of its own that would end it. In
each case the step must be held by the agent, and training must go on until it is told to leave.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from agent_rig import PROGRAM, Rig, free_number, host, settings_of
from waiting import wait_for

pytestmark = pytest.mark.processes

HOSTS = (host(0), host(1))
BEHIND_A_SHELL = ("sh", "-c", f"{shlex.join(PROGRAM)}; echo done")
PROLOGUE = (
    "import runpy, signal, sys; "
    "signal.signal("
    "signal.SIGTERM, lambda number, frame: (sys.stderr.write('handled\\n'), sys.exit(3))); "
    f"runpy.run_path({PROGRAM[1]!r}, run_name='__main__')"
)
WITH_A_HANDLER = (PROGRAM[0], "-c", PROLOGUE)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    number = free_number(tmp_path)
    rig = Rig(folder=tmp_path, number=number, settings=settings_of(tmp_path))
    rig.environment = {"STEPS": "100000", "STEP_S": "0.03"}
    yield rig
    rig.stop_all()
    rig.assert_nothing_left()
    rig.close()


def to_the_agent(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def to_the_group(pid: int) -> None:
    os.killpg(pid, signal.SIGTERM)


@pytest.mark.parametrize("send", [to_the_agent, to_the_group])
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(BEHIND_A_SHELL, id="behind a shell"),
        pytest.param(WITH_A_HANDLER, id="with a handler that exits"),
    ],
)
def test_a_notice_is_heard_whatever_stands_before_the_program(
    rig: Rig, command: Sequence[str], send: Callable[[int], None]
) -> None:
    rig.command = command
    rig.start(*HOSTS)
    rig.direct(1, {0: 1, 1: 1})
    rig.wait_running(*HOSTS, incarnation=1)
    send(rig.agents[host(1)].pid)
    notice = rig.wait(host(1), lambda r: r.notice is not None).notice
    assert notice is not None
    assert notice.reason == "SIGTERM"
    wait_for(lambda: "request served" in rig.logs(), what="the lead to hold a step")
    step = rig.wait(host(1), lambda r: r.step > 0).step
    assert rig.wait(host(1), lambda r: r.step > step + 2).exit is None
    rig.direct(2, {0: 1})
    # 128 + SIGTERM: it was told to go, it did not fail.
    assert rig.agents[host(1)].wait(10) == 128 + signal.SIGTERM
    rig.wait_running(host(0), incarnation=2)


@pytest.mark.parametrize("is_forked", [True, False], ids=["forked", "fresh"])
def test_a_signal_to_the_program_itself_calls_its_handler_and_ends_nothing(
    rig: Rig, is_forked: bool
) -> None:
    rig.command = WITH_A_HANDLER
    if not is_forked:
        rig.environment["FAULT"] = "thread"
    rig.start(*HOSTS)
    rig.direct(1, {0: 1, 1: 1})
    rig.wait_running(*HOSTS, incarnation=1)
    worker = rig.worker(host(1))
    handled: list[str] = []
    for _ in range(2):
        worker.send_signal(signal.SIGTERM)
        handled.append("handled")
        wait_for(
            lambda: [line for line in rig.logs().splitlines() if line == "handled"] == handled,
            what="the handler to be called",
        )
    step = rig.wait(host(1), lambda r: r.step > 0).step
    report = rig.wait(host(1), lambda r: r.step > step + 2)
    assert report.exit is None
    assert report.notice is None, "the agent alone hears of notices"
    assert "the program's handler of SIGTERM raised SystemExit: 3" in rig.logs()


def test_a_killed_agent_takes_the_program_behind_a_shell_with_it(rig: Rig) -> None:
    rig.command = BEHIND_A_SHELL
    rig.start(*HOSTS)
    rig.direct(1, {0: 1, 1: 1})
    rig.wait_running(*HOSTS, incarnation=1)
    below = rig.children(host(1))
    assert len(below) >= 3, "a shell, a zygote, a worker"
    rig.agents[host(1)].kill()
    wait_for(
        lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below),
        what="everything below the killed agent to end",
    )
    rig.agents[host(1)].wait()
    rig.start(host(1))
    rig.direct(2, {0: 1, 1: 1})
    rig.wait_running(*HOSTS, incarnation=2)
