"""Everything below and beside an agent killed, frozen or broken; nothing is ever left behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from agent_rig import COORDINATOR_PORT, PORT, Rig, free_number, host, settings_of
from everstep.controller.api.wire import Command, ExitCause, HostPhase, WorkerExit
from everstep.runtime.agent.wire import Refused
from waiting import wait_for

pytestmark = pytest.mark.processes

SLICES = {0: 1, 1: 1}
HOSTS = (host(0), host(1))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    number = free_number(tmp_path)
    rig = Rig(folder=tmp_path, number=number, settings=settings_of(tmp_path))
    rig.environment = {"STEPS": "100000", "STEP_S": "0.03"}
    yield rig
    rig.stop_all()
    rig.assert_nothing_left()
    rig.close()


def run(rig: Rig) -> None:
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    rig.wait_running(*HOSTS, incarnation=1)


def exit_of(rig: Rig, slice_id: int) -> WorkerExit:
    ended = rig.wait(host(slice_id), lambda r: r.exit is not None).exit
    assert ended is not None
    return ended


def go_on(rig: Rig, incarnation: int = 2) -> None:
    rig.direct(incarnation, SLICES)
    rig.wait_running(*HOSTS, incarnation=incarnation)


def test_a_killed_worker_is_reported_at_once_and_the_next_one_restores_from_memory(
    rig: Rig,
) -> None:  # G3
    run(rig)
    rig.wait(host(1), lambda r: (r.step_snapshot or 0) >= 4)
    killed_at_s = time.time()
    rig.worker(host(1)).kill()
    ended = exit_of(rig, 1)
    assert (ended.cause, ended.signal) == (ExitCause.SIGNALED, 9)
    assert ended.at_s - killed_at_s < 1.0
    go_on(rig)
    report = rig.wait(host(1), lambda r: r.restore is not None)
    assert report.restore is not None
    assert report.restore.source == "memory"
    assert report.restore.step >= ended.step - 2


def test_a_killed_agent_takes_its_worker_with_it_and_a_new_one_reads_from_peers(rig: Rig) -> None:
    run(rig)
    rig.wait(host(0), lambda r: (r.step_snapshot or 0) >= 4)
    below = rig.children(host(1))
    assert below
    rig.agents[host(1)].kill()
    wait_for(
        lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below),
        what="everything below the killed agent to end",
    )
    rig.agents[host(1)].wait()
    rig.start(host(1))
    go_on(rig)
    report = rig.wait(host(1), lambda r: r.restore is not None)
    assert report.restore is not None
    assert report.restore.peer_bytes > 0


def test_a_killed_zygote_takes_its_worker_with_it_and_another_is_started(rig: Rig) -> None:
    run(rig)
    old = rig.zygote(host(1))
    old.kill()
    assert exit_of(rig, 1).signal == 9
    go_on(rig)
    assert rig.zygote(host(1)).pid != old.pid


def test_a_frozen_zygote_is_given_up_at_the_start_deadline(rig: Rig) -> None:  # G7
    rig.settings = settings_of(rig.folder, start_grace_s=2.0)
    rig.start(host(0))
    wait_for(lambda: rig.report(host(0)), what="the agent to be up")
    rig.zygote(host(0)).send_signal(signal.SIGSTOP)
    rig.direct(1, {0: 1})
    assert exit_of(rig, 0).cause is ExitCause.HUNG
    rig.direct(2, {0: 1}, settings=settings_of(rig.folder))
    rig.wait_running(host(0), incarnation=2)


def test_a_wrong_order_of_timeouts_is_refused_with_both_values(rig: Rig) -> None:
    rig.settings = settings_of(rig.folder, report_timeout_s=30.0)
    rig.start(host(0))
    rig.direct(1, {0: 1})
    assert rig.agents[host(0)].wait(20) == 2
    assert "progressSeconds: found '10 s', expected more than reportSeconds (30 s)" in rig.logs()


def test_a_lost_coordinator_ends_the_incarnation_as_a_consequence(rig: Rig) -> None:
    run(rig)
    rig.coordinator(host(0)).kill()
    assert exit_of(rig, 0).cause is ExitCause.CONSEQUENCE
    go_on(rig)


def test_a_frozen_worker_is_found_by_its_lack_of_progress(rig: Rig) -> None:
    rig.settings = settings_of(
        rig.folder, report_timeout_s=1.0, progress_timeout_s=2.0, join_timeout_s=20.0
    )
    run(rig)
    rig.worker(host(1)).send_signal(signal.SIGSTOP)
    ended = exit_of(rig, 1)
    assert ended.cause is ExitCause.HUNG
    assert "progressSeconds" in ended.message
    go_on(rig)


def test_a_frozen_agent_that_wakes_up_fences_its_own_worker(rig: Rig) -> None:  # G6
    run(rig)
    agent = rig.agents[host(1)]
    tree = [psutil.Process(agent.pid), *rig.children(host(1))]
    old_worker = rig.worker(host(1)).pid
    for process in tree:
        process.send_signal(signal.SIGSTOP)
    rig.direct(2, {0: 1})
    rig.wait_running(host(0), incarnation=2)
    for process in tree:
        # The agent is woken first, and may have ended its worker by now.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    report = rig.wait(host(1), lambda r: r.incarnation == 2)
    assert report.phase is HostPhase.WAITING
    wait_for(lambda: not psutil.pid_exists(old_worker), what="the fenced worker to be gone")


def ask(rig: Rig, incarnation: int, token: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(rig.address(host(0)), PORT, timeout=5)
    headers = {"Authorization": f"Bearer {token}", "Everstep-Incarnation": str(incarnation)}
    connection.request("GET", "/v1/progress", headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_messages_of_another_incarnation_are_refused_with_both_numbers(rig: Rig) -> None:  # G6
    rig.start(host(0))
    rig.direct(5, {0: 1})
    rig.wait_running(host(0), incarnation=5)
    assert ask(rig, 5, "token-5")[0] == 200
    assert ask(rig, 5, "token-4")[0] == 401
    status, body = ask(rig, 4, "token-4")
    refused = msgspec.json.decode(body, type=Refused)
    assert (status, refused.yours, refused.mine) == (409, 4, 5)
    status, body = ask(rig, 6, "token-6")
    refused = msgspec.json.decode(body, type=Refused)
    assert (status, refused.yours, refused.mine) == (425, 6, 5)


def test_a_taken_coordinator_port_is_stepped_over_and_said(rig: Rig) -> None:
    with socket.create_server((rig.address(host(0)), COORDINATOR_PORT)):
        run(rig)
    assert "coordinator port is taken" in rig.logs()


def test_a_taken_agent_port_ends_the_agent_with_the_port_named(rig: Rig) -> None:
    with socket.create_server((rig.address(host(0)), PORT)):
        rig.start(host(0))
        assert rig.agents[host(0)].wait(20) == 78
        refused = rig.wait(host(0), lambda r: r.address_refused is not None).address_refused
        assert refused is not None
        assert refused.startswith(f"spec.runtime.agentPort: found port {PORT} of")
    assert f"port={PORT}" in rig.logs()


def test_a_program_with_threads_runs_in_fresh_interpreters_and_says_so(rig: Rig) -> None:
    rig.environment["FAULT"] = "thread"
    run(rig)
    refused = rig.wait(host(0), lambda r: r.fork_refused is not None).fork_refused
    assert refused is not None
    assert "2 threads" in refused
    rig.worker(host(1)).kill()
    assert exit_of(rig, 1).signal == 9
    go_on(rig)
    assert rig.logs().count("program cannot be forked") == len(HOSTS)


@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [
        (
            "import",
            ExitCause.USER_ERROR,
            "before es.main was called: ValueError: a fault at import",
        ),
        ("exit-at-import", ExitCause.EXITED_EARLY, "code 0 before es.main"),
        ("raise", ExitCause.USER_ERROR, "ValueError: a fault of the user's"),
        ("os-exit", ExitCause.EXITED_EARLY, "code 3 without finishing train"),
        ("SIGABRT", ExitCause.SIGNALED, "ended by signal 6 (SIGABRT) after step 2"),
        ("SIGSEGV", ExitCause.SIGNALED, "ended by signal 11 (SIGSEGV) after step 2"),
    ],
)
def test_the_users_faults_are_told_apart(
    rig: Rig, fault: str, cause: ExitCause, words: str
) -> None:
    rig.environment["FAULT"] = fault
    rig.start(host(0))
    rig.direct(1, {0: 1})
    ended = exit_of(rig, 0)
    assert ended.cause is cause, ended
    assert words in ended.message
    assert rig.logs().count("Traceback") == (1 if fault in ("import", "raise") else 0)


def test_an_error_at_import_is_shown_once_also_when_it_comes_before_the_directive(
    rig: Rig,
) -> None:
    rig.environment["FAULT"] = "import"
    rig.start(host(0))
    wait_for(lambda: "ValueError: a fault at import" in rig.logs(), what="the import to fail")
    rig.wait(host(0), lambda r: r.program_ready)
    rig.direct(1, {0: 1})
    assert exit_of(rig, 0).cause is ExitCause.USER_ERROR
    assert rig.logs().count("Traceback") == 1
    rig.direct(2, {0: 1})
    rig.wait(host(0), lambda r: r.exit is not None and r.exit.incarnation == 2)
    assert rig.logs().count("Traceback") == 2


def test_a_command_that_does_not_exist_is_named(rig: Rig) -> None:
    rig.command = ("no-such-program", "train.py")
    rig.start(host(0))
    rig.direct(1, {0: 1})
    ended = exit_of(rig, 0)
    assert "no-such-program" in ended.message
    assert not ended.is_retryable


def test_what_a_worker_forked_is_gone_with_it(rig: Rig) -> None:
    rig.environment |= {"FAULT": "loader", "FAULT_STEP": "3"}
    rig.start(host(0))
    rig.direct(1, {0: 1})
    rig.wait(host(0), lambda r: r.step >= 5)
    worker = rig.worker(host(0))
    loader = worker.pid if worker.ppid() != rig.zygote(host(0)).pid else None
    assert loader is not None, "the worker forked a loader"
    psutil.Process(worker.ppid()).kill()
    exit_of(rig, 0)
    wait_for(lambda: not psutil.pid_exists(loader), what="the loader to be gone")


def test_a_signalled_group_is_held_and_told_not_lost(rig: Rig) -> None:  # G8
    run(rig)
    os.killpg(rig.agents[host(1)].pid, signal.SIGTERM)
    report = rig.wait(host(1), lambda r: r.notice is not None)
    assert report.notice is not None
    assert report.notice.reason == "SIGTERM"
    # No controller answers; the lead holds a step on its own, and training goes on.
    wait_for(lambda: "request served" in rig.logs(), what="the lead to hold a step by itself")
    step = report.step
    report = rig.wait(host(1), lambda r: r.step > step + 2)
    assert report.exit is None
    rig.direct(2, {0: 1})
    assert rig.agents[host(1)].wait(10) == 143
    rig.wait_running(host(0), incarnation=2)


def test_an_agent_whose_controller_died_trains_on(rig: Rig) -> None:  # G8
    run(rig)
    (rig.folder / "directive.json").write_text("{garbage")
    step = rig.wait(host(0), lambda r: r.step > 0).step
    rig.wait(host(0), lambda r: r.step > step + 5)
    wait_for(lambda: "directive refused" in rig.logs(), what="the garbage to be refused")
    assert rig.logs().count("directive refused") == len(HOSTS)
    go_on(rig)


def test_a_missing_host_is_named_at_the_join_deadline(rig: Rig) -> None:  # G7
    rig.settings = settings_of(
        rig.folder, report_timeout_s=0.5, progress_timeout_s=1.0, join_timeout_s=1.5
    )
    rig.start(host(0))
    rig.direct(1, SLICES)
    assert rig.wait(host(0), lambda r: bool(r.missing)).missing == (host(1),)
    rig.start(host(1))
    rig.direct(2, SLICES, settings=settings_of(rig.folder))
    rig.wait_running(*HOSTS, incarnation=2)


def test_wait_ends_the_worker_and_keeps_what_is_held(rig: Rig) -> None:
    run(rig)
    rig.wait(host(0), lambda r: (r.step_snapshot or 0) >= 4)
    rig.direct(1, SLICES, command=Command.WAIT)
    for one in HOSTS:
        report = rig.wait_phase(one, HostPhase.WAITING)
        assert report.step_snapshot is not None
        assert report.exit is None
    go_on(rig)
