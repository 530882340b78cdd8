"""The verbs, typed: what they print, what they exit with, and what becomes of the job."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
import yaml

from everstep.controller.cli.showing import COLUMNS
from everstep.controller.local.errors import NotFound
from everstep_command import Everstep
from waiting import wait_for

pytestmark = pytest.mark.processes


def test_a_job_is_applied_changed_and_deleted_without_a_trace(everstep: Everstep) -> None:
    path = everstep.job_file(slices=2)
    first = everstep.ok("apply", "-f", path, "--wait", "--timeout", "60s").splitlines()
    assert first[0] == "multislicejob.everstep.dev/llm created"
    assert first[1].startswith("controller started (process ")
    assert everstep.ok("apply", "-f", path) == "multislicejob.everstep.dev/llm unchanged\n"
    changed = everstep.job_file(slices=2, suspend=False, activeDeadlineSeconds=500)
    assert everstep.ok("apply", "-f", changed) == "multislicejob.everstep.dev/llm configured\n"
    assert len(everstep.agents()) == 2
    assert everstep.ok("delete", "llm") == 'multislicejob.everstep.dev "llm" deleted\n'
    assert everstep.agents() == []
    assert sorted(path.name for path in everstep.folder.jobs.iterdir()) == []
    said = everstep.refused("get", "llm")
    assert said == 'Error from server (NotFound): multislicejobs.everstep.dev "llm" not found\n'


def test_get_shows_jobs_in_every_format(everstep: Everstep) -> None:
    assert everstep.run("get").stderr.startswith("No resources found in ")
    everstep.ok("apply", "-f", everstep.job_file(slices=2), "--wait")
    head, row = everstep.ok("get").splitlines()
    assert tuple(head.split()) == COLUMNS
    assert row.split()[:4] == ["llm", "Running", "2", "2"]
    wide = everstep.ok("get", "llm", "-o", "wide").splitlines()
    assert "COORDINATOR" in wide[0]
    assert everstep.ok("get", "-o", "name") == "multislicejob.everstep.dev/llm\n"
    found = everstep.object()
    assert (found["kind"], found["metadata"]["name"]) == ("MultiSliceJob", "llm")
    assert found["status"]["incarnation"] == 1
    listed = msgspec.json.decode(everstep.ok("get", "-o", "json"))
    assert listed["kind"] == "List"
    assert [one["metadata"]["name"] for one in listed["items"]] == ["llm"]
    said = everstep.refused("get", "-o", "xml", code=2)
    assert "unable to match a printer to -o 'xml'" in said


def test_what_get_prints_as_yaml_can_be_applied_again(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=2), "--wait")
    text = everstep.ok("get", "llm", "-o", "yaml")
    assert yaml.safe_load(text)["spec"]["slices"]["desired"] == 2
    again = everstep.run("apply", "-f", "-", stdin=text)
    assert (again.returncode, again.stdout) == (0, "multislicejob.everstep.dev/llm unchanged\n")


def test_describe_tells_the_story_of_a_job(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=2), "--wait")
    everstep.ok("kill", "1")
    everstep.wait_for_members(0)

    def whole_story() -> str | None:
        text = everstep.ok("describe", "llm")
        return text if "2→1" in text else None

    text = wait_for(whole_story, what="the recovery to be described")
    for title in ("Spec:", "Conditions:", "Slices:", "Recoveries:", "Events:"):
        assert title in text
    assert "SliceLost" in text


def test_a_killed_slice_is_gone_until_it_returns(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=3), "--wait")
    said = everstep.ok("kill", "0")
    assert said == "slice 0 of llm killed; it is gone until: return 0\n"
    after = everstep.wait_for_members(1, 2)
    assert after.status.incarnation == 2
    assert everstep.ok("return", "0") == "slice 0 of llm is available again\n"
    everstep.wait_for_members(0, 1, 2)
    assert everstep.ok("return", "0") == "slice 0 of llm is available (no change)\n"


def test_a_killed_host_is_replaced_because_its_capacity_stays(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=2, hosts=2), "--wait")
    before = set(everstep.agents())
    assert everstep.ok("kill", "1/0") == "host 1/0 of llm killed (1 process)\n"
    wait_for(
        lambda: everstep.record().status.incarnation > 1 and len(everstep.agents()) == 4,
        what="the slice to be replaced",
        timeout_s=60,
    )
    everstep.wait_for_members(0, 1)
    assert len(before & set(everstep.agents())) == 2


def test_a_preempted_slice_leaves_before_its_deadline_and_costs_no_step(
    everstep: Everstep,
) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=2), "--wait")
    said = everstep.ok("preempt", "1", "--notice", "6s")
    assert said.startswith("slice 1 of llm will be taken away at ")
    everstep.wait_for_members(0)
    wait_for(
        lambda: everstep.object()["status"]["sliceStatuses"][1]["state"] == "Gone",
        what="the slice to go",
    )
    assert "gone already" in everstep.refused("preempt", "1")
    recovery = everstep.record().status.recoveries[-1]
    assert recovery.lost_steps == 0
    assert recovery.cause == "PreemptionNotice"


def test_training_goes_on_without_a_controller_and_the_next_one_takes_over(
    everstep: Everstep,
) -> None:
    path = everstep.job_file(slices=2)
    everstep.ok("apply", "-f", path, "--wait")
    agents = sorted(everstep.agents())
    assert everstep.ok("kill", "--controller").startswith("controller killed (process ")
    assert everstep.controller() is None
    everstep.ok("kill", "1")
    assert sorted(everstep.agents()) != agents
    lines = everstep.ok("apply", "-f", path).splitlines()
    assert lines[1].startswith("controller started (process ")
    everstep.wait_for_members(0)


def test_a_second_controller_is_refused_with_the_process_of_the_first(
    everstep: Everstep,
) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=1))
    said = everstep.refused("controller")
    assert said == (
        f"error: {everstep.folder.root} has a controller already "
        f"(process {everstep.controller()})\n"
    )


def test_a_suspended_job_has_no_process_and_goes_on_where_it_was(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=2), "--wait")
    wait_for(lambda: everstep.record().status.step > 0, what="the first steps")
    said = everstep.ok("suspend", "llm", "--wait", "--timeout", "60s")
    assert said.startswith("multislicejob.everstep.dev/llm suspended\n")
    wait_for(lambda: everstep.agents() == [], what="all processes to end")
    held = everstep.record().status.step
    assert everstep.ok("resume", "llm").startswith("multislicejob.everstep.dev/llm resumed\n")
    record = everstep.wait_for_members(0, 1)
    assert record.status.recoveries[-1].step_restored == held > 0


def test_scaling_changes_the_members_within_the_bounds(everstep: Everstep) -> None:
    slices = {"desired": 2, "min": 1, "max": 3}
    path = everstep.job_file()
    document = yaml.safe_load(Path(path).read_text())
    document["spec"]["slices"] = slices
    Path(path).write_text(yaml.safe_dump(document))
    everstep.ok("apply", "-f", path, "--wait")
    assert everstep.ok("scale", "llm", "--slices", "3") == (
        "multislicejob.everstep.dev/llm scaled\n"
    )
    everstep.wait_for_members(0, 1, 2)
    said = everstep.refused("scale", "llm", "--slices", "4")
    assert "spec.slices.desired: found the number 4, expected at most spec.slices.max (3)" in said
    everstep.ok("scale", "llm", "--slices", "1")
    record = everstep.wait_for_members(0)
    assert record.spec.slices.desired == 1


def test_a_finished_job_keeps_its_records_and_nothing_else(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=2, words=("steps=30",)))
    said = everstep.ok("wait", "llm", "--for", "phase=Succeeded", "--timeout", "60s")
    assert said == "multislicejob.everstep.dev/llm condition met\n"
    wait_for(lambda: everstep.agents() == [], what="all processes to end")
    folder = everstep.folder.job("llm")
    wait_for(lambda: list(folder.hosts.iterdir()) == [], what="process records to go")
    assert list(folder.reclaimers.iterdir()) == []
    assert "obedient agent of 1/0" in everstep.ok("logs", "llm", "--slice", "1", "--host", "0")
    assert "[1/0] obedient agent of 1/0" in everstep.ok("logs", "llm")
    said = everstep.refused("wait", "llm", "--for", "phase=Running")
    assert "llm is Succeeded and cannot be Running" in said


def test_applying_a_job_that_has_ended_waits_for_nothing(everstep: Everstep) -> None:
    done = everstep.job_file("done", slices=1, words=("steps=5",))
    everstep.ok("apply", "-f", done, "--wait")
    everstep.wait_for_phase("Succeeded", "done")
    assert everstep.ok("apply", "-f", done, "--wait", "--timeout", "20s").endswith("unchanged\n")
    bad = everstep.job_file("bad", slices=1, words=("raise_at=5",), restart={"maxRestarts": 0})
    everstep.run("apply", "-f", bad)
    everstep.wait_for_phase("Failed", "bad")
    said = everstep.refused("apply", "-f", bad, "--wait", "--timeout", "20s")
    assert "bad is Failed and cannot be" in said


def test_a_wait_that_takes_too_long_says_so(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=1))
    said = everstep.refused("wait", "llm", "--for", "phase=Succeeded", "--timeout", "0.3s")
    assert said == "error: timed out waiting for the condition on multislicejobs/llm\n"


def test_everything_killed_at_once_comes_back_on_what_returns(everstep: Everstep) -> None:
    path = everstep.job_file(slices=3)
    everstep.ok("apply", "-f", path, "--wait")
    everstep.ok("kill", "--controller", "--all")
    assert everstep.agents() == []
    assert everstep.controller() is None
    everstep.ok("return", "0")
    everstep.ok("return", "2")
    everstep.ok("apply", "-f", path)
    everstep.wait_for_members(0, 2)


def test_stopping_all_leaves_records_and_no_process(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=2), "--wait")
    everstep.ok("preempt", "1", "--notice", "60s")
    lines = everstep.ok("stop", "--all").splitlines()
    assert lines[0].startswith("controller ended (process ")
    # A slice under notice leaves as soon as its step is held, which may be before this.
    assert lines[1] in ("llm: 2 processes ended", "llm: 1 process ended")
    assert everstep.agents() == []
    assert everstep.controller() is None
    assert everstep.record().metadata.name == "llm"
    assert everstep.ok("stop") == "no controller is running\n"


def test_places_that_are_not_there_are_named(everstep: Everstep) -> None:
    assert "no multislicejobs" in everstep.refused("kill", "0")
    everstep.ok("apply", "-f", everstep.job_file(slices=2))
    assert "llm has no slice 2; it has 0 to 1" in everstep.refused("kill", "2")
    assert "has no host 1; it has 0 to 0" in everstep.refused("kill", "1/1")
    assert "expected SLICE or SLICE/HOST" in everstep.refused("freeze", "one", code=2)
    assert "say what" in everstep.refused("kill", code=2)
    everstep.ok("apply", "-f", everstep.job_file("other", slices=1))
    assert "there are 2 jobs (llm, other); say which" in everstep.refused("kill", "0", code=2)
    assert "NotFound" in everstep.refused("kill", "0", "--job", "nobody")


def test_an_immutable_field_is_refused_and_the_job_stays(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=2))
    said = everstep.refused("apply", "-f", everstep.job_file(slices=2, hosts=2))
    assert "spec.slices.hostsPerSlice" in said
    assert everstep.record().spec.slices.hosts_per_slice == 1


def test_a_frozen_slice_is_found_lost_and_replaced(everstep: Everstep) -> None:
    timeouts = {
        "reportIntervalSeconds": 0.5,
        "reportSeconds": 2,
        "progressSeconds": 20,
        "joinSeconds": 30,
        "startSeconds": 60,
    }
    path = everstep.job_file(slices=2, runtime={"timeouts": timeouts})
    everstep.ok("apply", "-f", path, "--wait")
    everstep.wait_for_members(0, 1)
    assert everstep.ok("freeze", "1") == "slice 1 of llm frozen (1 process)\n"
    wait_for(lambda: everstep.record().status.incarnation > 1, what="the loss", timeout_s=60)
    everstep.wait_for_members(0, 1)
    assert len(everstep.agents()) == 2


def _step(everstep: Everstep) -> int:
    try:
        return everstep.record().status.step
    except NotFound:
        return 0


def test_run_follows_a_job_to_its_end(everstep: Everstep) -> None:
    done = everstep.run("run", "-f", everstep.job_file(slices=2, words=("steps=40",)))
    assert done.returncode == 0, done.stderr
    assert "llm Running incarnation 1 slices 0,1" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("llm Succeeded: ")


def test_run_tells_a_failed_job_by_its_exit_code(everstep: Everstep) -> None:
    path = everstep.job_file(slices=1, words=("raise_at=5",), restart={"maxRestarts": 0})
    done = everstep.run("run", "-f", path)
    assert done.returncode == 1
    assert "llm Failed: " in done.stdout


def test_ctrl_c_holds_the_last_step_and_ends_all_processes(everstep: Everstep) -> None:
    with everstep.start("run", "-f", everstep.job_file(slices=2)) as following:
        wait_for(lambda: _step(everstep) > 10, what="some steps", timeout_s=60)
        os.killpg(following.pid, signal.SIGINT)
        output, _ = following.communicate(timeout=60)
        assert following.returncode == 130, output
    assert "llm is suspended; go on with: everstep local resume llm" in output
    assert everstep.agents() == []
    record = everstep.record()
    assert record.status.phase.value == "Suspended"
    committed = record.status.checkpoint.last_committed
    assert committed is not None
    assert committed.step == record.status.step > 10


def test_get_with_watch_prints_what_changes(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=2), "--wait")
    with everstep.start("get", "llm", "-w") as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().startswith("NAME")
        watching.stdout.readline()
        everstep.ok("kill", "1")
        lines = iter(watching.stdout.readline, "")
        assert any(line.split()[5] == "2" for line in lines)
        os.killpg(watching.pid, signal.SIGINT)
        assert watching.wait(timeout=30) == 130


def test_logs_are_followed_until_the_job_is_finished(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=1, words=("steps=30",)))
    done = everstep.run("logs", "llm", "-f")
    assert done.returncode == 0
    assert "obedient agent of 0/0" in done.stdout


def test_a_job_whose_record_is_garbage_is_named_and_left(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=1))
    everstep.ok("stop", "--all")
    everstep.folder.job("llm").record.write_text("{")
    said = everstep.refused("get", "llm")
    assert said.startswith("Error from server (InternalError): ")
    assert "job.json" in said
    assert everstep.folder.job("llm").record.read_text() == "{"


def test_deleting_now_holds_nothing_first(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=2), "--wait")
    everstep.ok("delete", "llm", "--now", "--timeout", "60s")
    assert everstep.agents() == []
    assert not everstep.folder.job("llm").path.exists()


def test_the_version_is_printed() -> None:
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "everstep.controller.cli.main", "version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("everstep ")


def test_looking_at_jobs_imports_nothing_heavy(everstep: Everstep) -> None:
    import sys

    code = (
        "import sys\n"
        "from everstep.controller.cli.main import app\n"
        "app(['local', 'get'], standalone_mode=False)\n"
        "print(*sorted(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=everstep.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    heavy = {"jax", "numpy", "asyncio", "aiohttp", "structlog", "yaml", "rich", "kubernetes"}
    assert loaded & heavy == set()
