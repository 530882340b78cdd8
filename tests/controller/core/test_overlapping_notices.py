"""A notice first seen when the members stop for something else: what that slice holds is not lost.

Of a state that is sharded across slices a slice holds what nobody else does, and its memory lives
until its deadline.
"""

from __future__ import annotations

import pytest

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.core.model import WriteDirective
from simulated_job import SimulatedJob

S0, S1, S2 = SliceId(0), SliceId(1), SliceId(2)


def training_job() -> SimulatedJob:
    job = SimulatedJob(make_spec())
    job.run(3)
    assert job.training() == {0, 1, 2}
    return job


def doomed_by_request(job: SimulatedJob) -> dict[str, tuple[SliceId, ...]]:
    written = [action for action in job.performed if isinstance(action, WriteDirective)]
    return {
        request.id: request.doomed
        for action in written
        if (request := action.directive.request) is not None
    }


def advance_to_answer(job: SimulatedJob) -> None:
    """Let time pass, unseen by the controller, until the lead has answered."""
    for _ in range(200):
        job.advance()
        lead = job.agents[HostId(S0, 0)]
        if lead.report is not None and lead.report.held is not None:
            return
    raise AssertionError("the lead never answered")


def test_a_notice_seen_with_the_answer_to_another_one_is_drained_too() -> None:
    job = training_job()
    job.notify(S1, 20)
    job.advance()
    job.run_pass()
    advance_to_answer(job)
    job.notify(S2, 20)
    job.run_pass()
    assert job.ledger.incarnation == 1, "nobody goes on before that slice was asked"
    job.run(4)
    assert doomed_by_request(job) == {"1-1": (1,), "1-2": (1, 2)}
    assert job.training() == {0}
    assert job.ledger.incarnation == 2
    (row,) = job.status.recoveries
    assert row.lost_steps == 0


def test_a_notice_seen_with_a_killed_worker_is_drained_in_the_next_incarnation() -> None:
    job = training_job()
    job.kill_worker(HostId(S0, 0))
    job.advance()
    job.notify(S1, 20)
    job.run_pass()
    assert set(job.ledger.members) == {0, 1, 2}, "its memory is read from as a member's"
    job.run(5)
    assert doomed_by_request(job) == {"2-1": (1,)}
    assert job.training() == {0, 2}
    assert job.ledger.incarnation == 3
    first, second = job.status.recoveries
    assert (first.cause, first.to_slices) == ("WorkerKilled", 3)
    assert (second.cause, second.slice, second.lost_steps) == ("PreemptionNotice", 1, 0)
    assert (job.status.restarts.failures, job.status.restarts.disruptions) == (1, 1)


@pytest.mark.parametrize("notice_s", [1, 4])
def test_a_notice_that_leaves_no_time_for_another_start_excludes_its_slice_at_once(
    notice_s: float,
) -> None:
    job = training_job()
    job.kill_worker(HostId(S0, 0))
    job.advance()
    job.notify(S1, notice_s)
    job.run_pass()
    assert 1 not in job.ledger.members


def test_a_slice_that_is_gone_already_is_not_waited_for() -> None:
    job = training_job()
    job.kill_worker(HostId(S0, 0))
    job.advance()
    job.notify(S1, 20)
    job.kill_slice(S1)
    job.run_pass()
    assert 1 not in job.ledger.members
