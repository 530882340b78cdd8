"""A coordination service that ends is the cause of what its members do then."""

from __future__ import annotations

from typing import Any

import pytest

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.reasons import TABLE, Budget, Reason
from everstep.controller.api.wire import ExitCause
from simulated_job import SimulatedJob

S0, S1, S2 = SliceId(0), SliceId(1), SliceId(2)


def training_job(**spec: Any) -> SimulatedJob:
    job = SimulatedJob(make_spec(**spec))
    job.run(3)
    assert job.training() == {0, 1, 2}
    return job


def judge(job: SimulatedJob) -> None:
    job.run(4)
    assert job.training() == {0, 1, 2}
    assert job.ledger.incarnation == 2
    (row,) = job.status.recoveries
    assert (row.cause, row.slice) == ("CoordinatorLost", 0)
    assert (job.status.restarts.failures, job.status.restarts.disruptions) == (0, 1)
    told = [event for event in job.events.values() if event.reason is Reason.COORDINATOR_LOST]
    assert any(f"host {HostId(S0, 0)}:" in event.message for event in told)


def test_it_is_charged_as_the_loss_of_an_agent_is() -> None:  # G10
    assert TABLE[Reason.COORDINATOR_LOST].budget is TABLE[Reason.HOST_LOST].budget
    assert TABLE[Reason.COORDINATOR_LOST].budget is Budget.DISRUPTION


@pytest.mark.parametrize("aborts", [True, False])
def test_whose_coordinator_died_is_named_as_the_cause(aborts: bool) -> None:
    job = training_job()
    job.kill_coordinator(aborts=aborts)
    judge(job)


def test_a_single_abort_is_not_taken_for_the_cause() -> None:
    job = training_job()
    job.kill_coordinator(aborts=False)
    one = job.agents[HostId(S2, 0)]
    job.end_worker(one, ExitCause.CONSEQUENCE, signal=6, alone=True)
    judge(job)


@pytest.mark.parametrize("cause", [ExitCause.HUNG, ExitCause.STARTUP_FAILED, ExitCause.USER_ERROR])
def test_however_a_member_ends_after_it(cause: ExitCause) -> None:
    job = training_job()
    job.kill_coordinator()
    job.end_worker(job.agents[HostId(S1, 0)], cause, message="words", alone=True)
    judge(job)


def test_a_member_that_has_not_seen_it_yet_does_not_hang() -> None:
    job = training_job()
    one = job.agents[HostId(S2, 0)]
    worker = one.worker
    job.kill_coordinator()
    # It still waits in a collective.
    one.worker, one.exit = worker, None
    judge(job)


def test_the_abort_that_is_reported_first_waits_for_the_lead() -> None:
    job = training_job()
    lead = job.agents[HostId(S0, 0)]
    job.kill_coordinator()
    lost_s, lead.coordinator_lost_at_s = lead.coordinator_lost_at_s, None
    job.run(0.5)
    assert job.ledger.incarnation == 1
    lead.coordinator_lost_at_s = lost_s
    judge(job)


def test_a_lead_that_is_lost_with_its_coordinator_is_one_disruption() -> None:
    job = training_job(scale_up={"mode": "Never"})
    job.kill_coordinator()
    job.run(0.3)
    job.kill_slice(S0, capacity_gone=True)
    job.run(4)
    assert job.training() == {1, 2}
    assert job.ledger.incarnation == 2
    assert job.status.recoveries[-1].cause == "SliceLost"
    assert (job.status.restarts.failures, job.status.restarts.disruptions) == (0, 1)


def test_a_program_that_raised_well_before_it_stays_the_cause() -> None:
    job = training_job()
    lead = job.agents[HostId(S0, 0)]
    job.raise_in_worker(HostId(S1, 0))
    raised_s = job.now_s
    job.now_s += 3
    lead.coordinator_lost_at_s = job.now_s
    job.run(6)
    assert job.now_s > raised_s
    assert job.status.recoveries[0].cause == "UserError"
    assert job.status.restarts.failures == 1


def test_it_says_nothing_about_the_step_that_was_restored() -> None:
    job = training_job(restart={"maxRestarts": 0})
    for _ in range(4):
        job.kill_coordinator()
        n = job.ledger.incarnation
        while job.ledger.incarnation == n or not job.training():
            job.run(0.05)
    assert job.ledger.crash is None
    assert list(job.ledger.restore_set_aside) == []
    assert job.ledger.finish is None
