"""A member that hangs where no deadline finds it yet, while the others' collectives give up."""

from __future__ import annotations

import pytest

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.wire import ExitCause
from everstep.controller.core.model import EmitEvent
from simulated_job import SimulatedJob, Worker

HOSTS = tuple(HostId(SliceId(id_), 0) for id_ in range(3))
GAVE_UP = "XlaRuntimeError: Gloo context initialization failed: connect timeout"


def give_up(job: SimulatedJob, *hosts: HostId) -> None:
    for host in hosts:
        job.end_worker(job.agents[host], ExitCause.CONSEQUENCE, message=GAVE_UP, alone=True)


def failures(job: SimulatedJob) -> list[EmitEvent]:
    return [event for event in job.events.values() if event.id.startswith("failure-")]


@pytest.mark.parametrize("absent", HOSTS, ids=str)
@pytest.mark.parametrize("worker", [Worker.RESTORING, Worker.TRAINING])
def test_the_one_that_goes_on_living_is_the_first_cause(absent: HostId, worker: Worker) -> None:
    job = SimulatedJob(make_spec())
    job.run(3)
    job.agents[absent].worker = worker
    give_up(job, *(host for host in HOSTS if host != absent))
    # Not more than the others need for being heard.
    job.run(3)
    (row,) = job.status.recoveries
    assert (row.cause, row.slice) == ("WorkerHung", absent.slice)
    (failure,) = failures(job)
    assert failure.message.startswith(f"Rank {absent.slice} (host {absent}) hangs.")
    assert GAVE_UP in failure.message
    assert job.status.restarts.failures == 1


def test_one_that_sees_it_a_moment_later_is_not_blamed() -> None:
    job = SimulatedJob(make_spec())
    job.run(3)
    give_up(job, *HOSTS[:2])
    job.run(1.5)
    assert not job.status.recoveries
    give_up(job, HOSTS[2])
    job.run(3)
    (row,) = job.status.recoveries
    assert row.cause == "CollectiveError"


def test_a_primary_cause_that_comes_late_is_still_the_first() -> None:
    job = SimulatedJob(make_spec())
    job.run(3)
    give_up(job, *HOSTS[:2])
    job.run(0.7)
    job.end_worker(job.agents[HOSTS[2]], ExitCause.SIGNALED, signal=9, alone=True)
    job.run(3)
    (row,) = job.status.recoveries
    assert (row.cause, row.slice) == ("WorkerKilled", HOSTS[2].slice)


@pytest.mark.parametrize("behind", HOSTS, ids=str)
def test_of_several_that_hung_together_the_one_that_was_behind_is_the_cause(behind: HostId) -> None:
    job = SimulatedJob(make_spec())
    job.run(3)
    # Its deadline is over a moment after that of the others, which waited for it.
    for host in sorted(HOSTS, key=lambda host: host == behind):
        stage = 3 if host == behind else 4
        message = f"no first step; stage {stage}"
        agent = job.agents[host]
        job.end_worker(agent, ExitCause.HUNG, message=message, alone=True, stage=stage)
        job.run(0.2)
    job.run(2)
    (row,) = job.status.recoveries
    assert (row.cause, row.slice) == ("WorkerHung", behind.slice)
    (failure,) = failures(job)
    assert failure.message.startswith(f"Rank {behind.slice} (host {behind}) ended")
    assert job.status.restarts.failures == 1
