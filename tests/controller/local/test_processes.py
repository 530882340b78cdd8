"""Agents as processes: recorded before they do anything, ended as a whole, never mistaken."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep.controller.api.ids import HostId, Incarnation, SliceId
from everstep.controller.api.reasons import Reason
from everstep.controller.core.model import ProcessState, StartSlice, StopSlice
from everstep.controller.local import identity, processes
from everstep.controller.local.files import write_durable
from everstep.controller.local.processes import ask_to_stop, load_host, was_started
from everstep.controller.local.records import HostRecord, encode
from local_rig import LocalRig
from waiting import wait_for

pytestmark = pytest.mark.processes

FIRST = HostId(SliceId(0), 0)
ONE = Incarnation(1)


def _start(rig: LocalRig, slice_id: int = 0) -> None:
    rig.world.perform("llm", StartSlice(slice=SliceId(slice_id), incarnation=ONE))


def _stop(rig: LocalRig, grace_s: float) -> None:
    stop = StopSlice(slice=SliceId(0), incarnation=ONE, reason=Reason.SLICE_LOST, grace_s=grace_s)
    rig.world.perform("llm", stop)


def _record(rig: LocalRig) -> HostRecord:
    found = load_host(rig.folder.job("llm"), FIRST)
    assert found is not None
    return found


def _state(rig: LocalRig) -> ProcessState:
    seen = rig.world.observe("llm")
    assert seen is not None
    return seen.view.slices[0].hosts[0].process


def _gone(rig: LocalRig) -> bool:
    rig.settle()
    return not any(host.slice == 0 for host in rig.agents())


def test_an_agent_has_a_session_of_its_own_and_the_arguments_of_the_seam(rig: LocalRig) -> None:
    rig.agent_command = ("/bin/sh", "-c", 'echo "$@"; exec sleep 1000000', "agent")
    rig.restart()
    _start(rig)
    record = _record(rig)
    assert os.getsid(record.pid) == record.pid == record.pgid
    log = rig.folder.job("llm").log(FIRST)
    words = wait_for(lambda: log.read_text().split(), what="the agent's words")
    assert words[words.index("--channel") + 1] == f"local:{rig.folder.job('llm').path}"
    assert words[words.index("--slice") + 1] == "0"
    assert words[words.index("--address") + 1] == record.address
    assert words[words.index("--") + 1 :] == ["steps=1000000"]


def test_the_agent_starts_in_the_working_folder_with_little_of_our_environment(
    rig: LocalRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--would_change_numbers")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    rig.agent_command = ("/bin/sh", "-c", "pwd; env; exec sleep 1000000", "agent")
    rig.restart()
    _start(rig)
    log = rig.folder.job("llm").log(FIRST)

    def lines() -> list[str]:
        found = log.read_text().splitlines()
        return found if any(line.startswith(identity.MARK) for line in found) else []

    said = wait_for(lines, what="the agent's environment")
    assert said[0] == str(tmp_path)
    assert "LC_ALL=C.UTF-8" in said
    assert not any(line.startswith("XLA_FLAGS") for line in said)


def test_a_process_whose_record_was_never_written_does_nothing(
    rig: LocalRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rig.folder.job("llm")

    def disk_full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, f"no space for {len(data)} bytes", str(path))

    monkeypatch.setattr(processes, "write_durable", disk_full)
    with pytest.raises(OSError, match="no space"):
        _start(rig)
    wait_for(lambda: _gone(rig), what="the process at the gate to end")
    assert folder.log(FIRST).read_text() == ""


def test_a_record_of_a_process_that_never_became_an_agent_counts_as_absent(
    rig: LocalRig,
) -> None:
    ended = subprocess.Popen(["true"])
    who = identity.identify(ended.pid)
    assert who is not None
    ended.wait()
    folder = rig.folder.job("llm")
    record = HostRecord(
        host=FIRST,
        job_uid=rig.world.store.read("llm").metadata.uid,
        pid=who.pid,
        start_ticks=who.start_ticks,
        boot_id=who.boot_id,
        pgid=who.pid,
        address="127.64.1.1",
        port=7070,
        started_for=ONE,
        started_at=rig.clock.unix_s(),
    )
    write_durable(folder.host(FIRST), encode(record))
    assert not was_started(record, folder)
    assert _state(rig) is ProcessState.ABSENT
    folder.started(FIRST).write_text(f"{who.pid}\n")
    assert _state(rig) is ProcessState.EXITED


@pytest.mark.parametrize(
    "change",
    [
        lambda record: replace(record, start_ticks=record.start_ticks + 1),
        lambda record: replace(record, boot_id="another boot"),
    ],
    ids=["another start time", "another boot"],
)
def test_a_process_that_got_the_number_later_is_never_signalled(
    rig: LocalRig, change: Callable[[HostRecord], HostRecord]
) -> None:
    _start(rig)
    stale = change(_record(rig))
    assert not identity.is_running(stale.identity)
    ask_to_stop(rig.folder.job("llm"), stale, grace_s=0.0, now_s=rig.clock.unix_s())
    assert identity.is_running(_record(rig).identity) or stale.pid in rig.agents()[FIRST]
    os.kill(stale.pid, 0)


def test_a_stop_takes_what_left_the_agents_session_with_it(rig: LocalRig) -> None:
    rig.agent_command = (
        *(sys.executable, "-c"),
        "import os, time\nif os.fork() == 0:\n    os.setsid()\ntime.sleep(1000000)\n",
    )
    rig.restart()
    _start(rig)
    wait_for(lambda: len(rig.agents()[FIRST]) == 2, what="the process that leaves")
    _stop(rig, 0.0)
    wait_for(lambda: _gone(rig), what="both processes to end")
    assert list(rig.folder.job("llm").hosts.glob("0-*")) == []


def test_an_agent_that_ignores_sigterm_is_killed_when_its_grace_is_over(rig: LocalRig) -> None:
    rig.agent_command = (
        *("/bin/sh", "-c"),
        "trap '' TERM; echo deaf; while :; do sleep 0.05; done",
        "agent",
    )
    rig.restart()
    _start(rig)
    log = rig.folder.job("llm").log(FIRST)
    wait_for(lambda: "deaf" in log.read_text(), what="the agent to be deaf")
    began_s = rig.clock.monotonic_s()
    _stop(rig, 0.5)
    assert _state(rig) is ProcessState.ALIVE
    wait_for(lambda: _gone(rig), what="the agent to be killed")
    assert rig.clock.monotonic_s() - began_s >= 0.4


def test_a_grace_that_has_begun_goes_on_under_the_next_controller(rig: LocalRig) -> None:
    rig.agent_command = ("/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.05; done", "agent")
    rig.restart()
    _start(rig)
    _stop(rig, 0.3)
    rig.restart()
    wait_for(lambda: _gone(rig), what="the agent to be killed by the next controller")


def test_a_frozen_agent_can_be_stopped(rig: LocalRig) -> None:
    _start(rig)
    for pid in rig.agents()[FIRST]:
        os.kill(pid, signal.SIGSTOP)
    _stop(rig, 0.0)
    wait_for(lambda: _gone(rig), what="the frozen agent to end")


def test_a_garbage_record_never_leads_to_two_agents_of_one_host(rig: LocalRig) -> None:
    _start(rig)
    before = rig.agents()[FIRST]
    rig.folder.job("llm").host(FIRST).write_text("{ garbage")
    rig.restart()
    assert _state(rig) is ProcessState.ABSENT
    _start(rig)

    def one_other() -> bool:
        now = rig.agents().get(FIRST, ())
        return len(now) == 1 and now != before

    wait_for(one_other, what="one agent, and another one than before")


def test_the_program_is_named_when_its_folder_is_gone(rig: LocalRig, tmp_path: Path) -> None:
    rig.add_job("lost", root=tmp_path / "not-there", slices=1)
    rig.world.perform("lost", StartSlice(slice=SliceId(0), incarnation=ONE))
    log = rig.folder.job("lost").log(FIRST)
    wait_for(lambda: "not-there" in log.read_text(), what="the shell's complaint")


def test_a_process_is_found_also_while_it_becomes_another_program(rig: LocalRig) -> None:
    place = identity.Place(job_uid="uid-of-this-test", slice=0, host=0)
    script = rig.folder.root / "again.sh"
    script.write_text('n=$1; [ "$n" -gt 3000 ] && exec sleep 1000000; exec /bin/sh "$0" $((n+1))\n')
    mark = identity.mark_of(place, rig.folder.root)
    with subprocess.Popen(
        ["/bin/sh", str(script), "0"], env={"PATH": "/usr/bin:/bin", identity.MARK: mark}
    ) as turning:
        try:
            for _ in range(100):
                assert [who.pid for who in identity.find_at(place)] == [turning.pid]
        finally:
            turning.kill()


def test_a_process_without_any_environment_is_none_of_ours() -> None:
    with subprocess.Popen(["/bin/sleep", "1000000"], env={}) as bare:
        try:
            assert bare.pid not in {who.pid for who, _ in identity.find_marked("")}
            assert bare.pid not in {who.pid for who, _ in identity.find_marked("")}
        finally:
            bare.kill()
