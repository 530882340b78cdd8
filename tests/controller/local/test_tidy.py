"""What SIGKILL left behind is cleaned by the next controller; what lives is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.controller.api.ids import Incarnation, SliceId
from everstep.controller.core.model import StartSlice
from everstep.controller.local.errors import FolderBusy
from everstep.controller.local.files import write_durable
from everstep.controller.local.guard import ControllerLock, controller_pid
from everstep.controller.local.tidy import tidy
from local_rig import LocalRig, silent_log
from waiting import wait_for

pytestmark = pytest.mark.processes


def _start(rig: LocalRig) -> None:
    rig.world.perform("llm", StartSlice(slice=SliceId(0), incarnation=Incarnation(1)))


def test_agents_that_live_are_left_alone(rig: LocalRig) -> None:
    _start(rig)
    before = rig.agents()
    tidy(rig.folder, log=silent_log())
    assert rig.agents() == before


def test_agents_go_on_while_the_record_of_their_job_is_garbage(rig: LocalRig) -> None:
    _start(rig)
    before = rig.agents()
    rig.folder.job("llm").record.write_text("{")
    tidy(rig.folder, log=silent_log())
    assert rig.agents() == before


def test_agents_of_a_job_that_is_no_more_are_ended(rig: LocalRig) -> None:
    _start(rig)
    uid = rig.world.store.read("llm").metadata.uid
    rig.world.store.remove("llm", uid)
    assert rig.agents() != {}
    tidy(rig.folder, log=silent_log())
    wait_for(lambda: rig.agents() == {}, what="the orphans to end")


def test_agents_without_a_record_are_ended(rig: LocalRig) -> None:
    _start(rig)
    for path in rig.folder.job("llm").hosts.iterdir():
        path.unlink()
    tidy(rig.folder, log=silent_log())
    wait_for(lambda: rig.agents() == {}, what="the orphans to end")


def test_agents_of_another_state_folder_are_left_alone(rig: LocalRig, tmp_path: Path) -> None:
    _start(rig)
    before = rig.agents()
    other = LocalRig(tmp_path / "other")
    tidy(other.folder, log=silent_log())
    assert rig.agents() == before


def test_half_made_and_half_removed_things_are_cleaned(rig: LocalRig) -> None:
    folder = rig.folder.job("llm")
    (rig.folder.jobs / ".removed-some-uid").mkdir()
    (rig.folder.jobs / "half-applied" / "reports").mkdir(parents=True)
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = folder.path / f".job.json.{gone.pid}.0.tmp"
    left.write_text("half of it")
    report = folder.reports / f"0-0.{gone.pid}.tmp"
    report.write_text("half of it")
    being_written = folder.path / f".job.json.{os.getpid()}.0.tmp"
    being_written.write_text("by a process that lives")
    (folder.reclaimers / "1.json").write_text("{ garbage")
    tidy(rig.folder, log=silent_log())
    assert rig.world.jobs() == ("llm",)
    assert not left.exists()
    assert not report.exists()
    assert being_written.exists()
    assert sorted(path.name for path in rig.folder.jobs.iterdir()) == ["llm"]
    assert list(folder.reclaimers.iterdir()) == []
    being_written.unlink()


def test_a_second_controller_is_refused_with_the_process_of_the_first(rig: LocalRig) -> None:
    assert controller_pid(rig.folder) is None
    lock = ControllerLock(rig.folder)
    assert rig.folder.controller_lock.read_text().split() == [str(os.getpid())]
    assert controller_pid(rig.folder) == os.getpid()
    with pytest.raises(FolderBusy) as refused:
        ControllerLock(rig.folder)
    assert refused.value.pid == os.getpid()
    lock.release()
    assert controller_pid(rig.folder) is None
    ControllerLock(rig.folder).release()


def test_the_lock_of_a_controller_that_was_killed_is_free(rig: LocalRig) -> None:
    code = (
        "import sys, pathlib\n"
        "from everstep.controller.local.folder import StateFolder\n"
        "from everstep.controller.local.guard import ControllerLock\n"
        "lock = ControllerLock(StateFolder(pathlib.Path(sys.argv[1])))\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(rig.folder.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert controller_pid(rig.folder) == holder.pid
        with pytest.raises(FolderBusy):
            ControllerLock(rig.folder)
        holder.kill()
    assert controller_pid(rig.folder) is None
    # Its number is still in the file, and means nothing.
    assert rig.folder.controller_lock.read_text().split() == [str(holder.pid)]
    ControllerLock(rig.folder).release()


def test_an_agent_does_not_inherit_the_controllers_lock(rig: LocalRig) -> None:
    lock = ControllerLock(rig.folder)
    _start(rig)
    lock.release()
    assert rig.agents() != {}
    ControllerLock(rig.folder).release()


def test_a_temporary_file_of_a_record_is_no_record(rig: LocalRig) -> None:
    folder = rig.folder.job("llm")
    write_durable(folder.hosts / "notes.json", b"{}")
    (folder.hosts / "0-0.json.tmp").write_text("{")
    seen = rig.world.observe("llm")
    assert seen is not None
    assert all(host.started_for is None for one in seen.view.slices for host in one.hosts)
