"""What reports tell beside progress: told once, as an event and as a condition."""

from __future__ import annotations

from typing import Any

import pytest

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.reasons import Reason
from everstep.controller.api.status import Condition, Phase
from everstep.controller.core.model import EmitEvent
from simulated_job import SimulatedJob, Timing

S0, S1, S2 = SliceId(0), SliceId(1), SliceId(2)


def training_job(**spec: Any) -> SimulatedJob:
    job = SimulatedJob(make_spec(**spec))
    job.run(2)
    assert job.training() == {0, 1, 2}
    assert job.committed == 0
    return job


def told(job: SimulatedJob, reason: Reason) -> list[str]:
    return [one.message for one in job.events.values() if one.reason is reason]


def condition(job: SimulatedJob, type_: str = "CheckpointCommitted") -> Condition:
    return next(one for one in job.status.conditions if one.type == type_)


def phase(job: SimulatedJob) -> Phase:
    return job.status.phase


def emitted(job: SimulatedJob) -> int:
    return sum(1 for one in job.performed if isinstance(one, EmitEvent))


def test_a_program_that_cannot_be_forked_is_told_once_for_all_its_hosts() -> None:
    job = SimulatedJob(make_spec())
    job.run(0.3)
    for agent in job.agents.values():
        agent.fork_refused = "2 threads were started at import: loader"
    job.run(3)
    job.kill_worker(HostId(S1, 0))
    job.run(3)
    (text,) = told(job, Reason.FORK_REFUSED)
    assert "host 0/0" in text.lower()
    assert "started at import: loader" in text


def test_before_the_first_commit_the_condition_says_that_there_is_none() -> None:
    job = training_job()
    found = condition(job)
    assert (found.status, found.reason) == ("False", Reason.NOT_COMMITTED_YET.value)
    assert told(job, Reason.STEP_COMMITTED) == []


def test_the_first_commit_of_an_incarnation_is_told_and_each_is_shown() -> None:
    job = training_job()
    job.run(2)
    assert job.committed == 20
    found = condition(job)
    assert (found.status, found.reason) == ("True", Reason.STEP_COMMITTED.value)
    assert len(told(job, Reason.STEP_COMMITTED)) == 1
    writes, events = job.writes, emitted(job)
    job.run(5)
    assert job.committed > 20
    assert (job.writes, emitted(job)) == (writes, events), "a commit is no news, and no write"
    made = job.run_pass()
    assert made is not None
    shown = next(one for one in made.status.conditions if one.type == "CheckpointCommitted")
    assert str(job.committed) in shown.message
    job.kill_worker(HostId(S1, 0))
    job.run(5)
    first, second = told(job, Reason.STEP_COMMITTED)
    assert first != second


def test_a_commit_of_an_earlier_incarnation_is_not_told_as_new() -> None:
    job = training_job()
    job.run(2)
    job.kill_worker(HostId(S1, 0))
    job.run(0.6)
    assert job.ledger.incarnation == 2
    assert len(told(job, Reason.STEP_COMMITTED)) == 1


def test_a_failed_write_is_told_once_a_step_shown_and_over_with_the_next_commit() -> None:
    job = training_job()
    job.storage_error = "step 20: No space left on device"
    job.run(0.3)
    found = condition(job)
    assert (found.status, found.reason) == ("False", Reason.STORAGE_WRITE_FAILED.value)
    assert "No space left" in found.message
    assert condition(job, "ConfigurationSuspect").status == "False"
    job.storage_error = "step 40: No space left on device"
    job.run(3)
    assert "step 40" in condition(job).message
    first, second = told(job, Reason.STORAGE_WRITE_FAILED)
    assert "step 20" in first
    assert "step 40" in second
    job.storage_error = "step 40: No space left on device, in another file"
    job.run(1)
    assert "another file" in condition(job).message
    assert len(told(job, Reason.STORAGE_WRITE_FAILED)) == 2, "the same step is tried again"
    writes = job.writes
    job.run(2)
    assert job.writes == writes
    job.storage_error = None
    job.run(0.2)
    assert condition(job).status == "False", "no later write has succeeded yet"
    job.run(3)
    assert condition(job).status == "True"
    (text,) = told(job, Reason.STEP_COMMITTED)
    assert "again" in text
    job.storage_error = "step 80: read-only file system"
    job.run(0.3)
    assert len(told(job, Reason.STORAGE_WRITE_FAILED)) == 3


FULL = "the final step 30 was not committed: data/w: no space left on the device (ENOSPC)"


@pytest.mark.parametrize("desired", [3, 4])
def test_a_finished_training_whose_last_step_is_not_durable_says_so_and_why(desired: int) -> None:
    job = SimulatedJob(make_spec(desired=desired, slices={"max": 4, "min": 1}), steps_total=30)
    if desired == 4:
        job.take(SliceId(3))
    job.run(2)
    job.storage_error = "step 20 was not committed: data/w: no space left on the device (ENOSPC)"
    job.run(0.5)
    assert "is training on" in job.status.message
    assert len(told(job, Reason.STORAGE_WRITE_FAILED)) == 1
    job.storage_error = FULL
    job.run(5)
    said = job.status.message
    assert phase(job) is Phase.RUNNING
    assert "All steps are done, and step 30 is not durable yet" in said
    assert "data/w: no space left on the device (ENOSPC)" in said
    assert f"make room or give access at {job.spec.checkpoint.uri}" in said
    ready = condition(job, "Ready")
    assert (ready.status, ready.reason) == ("True", Reason.STORAGE_WRITE_FAILED.value)
    assert ready.message == said
    if desired == 4:
        assert condition(job, "Degraded").reason == Reason.RUNNING_DEGRADED.value
    _, of_final = told(job, Reason.STORAGE_WRITE_FAILED)
    assert FULL in of_final
    writes = job.writes
    job.run(5)
    assert job.writes == writes, "waiting is no news"
    job.storage_error = None
    job.run(2)
    assert phase(job) is Phase.SUCCEEDED
    assert job.committed == 30


def test_failing_storage_stays_told_across_a_recovery() -> None:
    job = training_job()
    job.storage_error = "step 20: No space left on device"
    job.run(0.3)
    job.kill_worker(HostId(S1, 0))
    job.run(4)
    assert condition(job).reason == Reason.STORAGE_WRITE_FAILED.value
    assert len(told(job, Reason.STORAGE_WRITE_FAILED)) == 1


def test_a_durable_step_that_missed_its_deadline_is_shown_until_the_next_commit() -> None:
    spec = make_spec(slices={"min": 3})
    job = SimulatedJob(spec, timing=Timing(hold_s=30), commit_every=10_000)
    job.run(2)
    job.notify(S1, 4)
    job.run(3.3)
    found = condition(job)
    assert (found.status, found.reason) == ("False", Reason.DEADLINE_MISSED.value)
    assert job.committed == 0
    job.run(3)
    assert job.committed > 0, "what the survivors hold is saved while they wait"
    assert condition(job).status == "True"


def test_a_restore_from_memory_is_told_with_what_it_took() -> None:
    job = training_job()
    job.kill_worker(HostId(S1, 0))
    job.run(3)
    (text,) = told(job, Reason.RESTORED_FROM_MEMORY)
    assert "3000 bytes" in text
    assert told(job, Reason.RESTORED_FROM_STORAGE) == []


def test_a_first_start_from_nothing_restores_nothing() -> None:
    job = training_job()
    assert told(job, Reason.RESTORED_FROM_MEMORY) == []
    assert told(job, Reason.RESTORED_FROM_STORAGE) == []


def test_a_restore_from_storage_is_told_as_such() -> None:
    job = training_job()
    job.run(2)
    for id_ in (S0, S1, S2):
        job.kill_slice(id_)
    job.run(5)
    assert told(job, Reason.RESTORED_FROM_MEMORY) == []
    assert len(told(job, Reason.RESTORED_FROM_STORAGE)) == 1


def test_bad_sources_are_told_together_once() -> None:
    job = training_job()
    for id_ in (S0, S1):
        job.agents[HostId(id_, 0)].rejects = (f"host {id_}/0: checksum of block 3", "peer: timeout")
    job.kill_worker(HostId(S1, 0))
    job.run(3)
    (text,) = told(job, Reason.SOURCE_REJECTED)
    assert "host 0/0: checksum of block 3" in text
    assert "host 1/0: checksum of block 3" in text
    assert text.count("peer: timeout") == 1
