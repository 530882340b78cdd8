"""What is lost without notice, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, SliceId, Step
from everstep.controller.api.reasons import Reason
from everstep.controller.api.status import Phase
from everstep.controller.api.wire import Command, ExitCause
from everstep.controller.core.ledger import Stage
from simulated_job import SimulatedJob, Worker

S0, S1, S2 = SliceId(0), SliceId(1), SliceId(2)


def training_job(**spec: Any) -> SimulatedJob:
    job = SimulatedJob(make_spec(**spec))
    job.run(3)
    assert job.training() == frozenset(range(job.spec.slices.desired))
    return job


def test_the_first_start_is_one_incarnation_with_all_slices() -> None:
    job = training_job()
    assert job.ledger.incarnation == 1
    assert job.status.phase is Phase.RUNNING
    assert job.status.recoveries == ()
    assert job.status.slices is not None
    assert job.status.slices.ready == 3


def test_a_killed_worker_costs_no_slice_and_no_wait() -> None:
    job = training_job()
    before = job.step()
    job.kill_worker(HostId(S1, 0))
    job.advance()
    job.run_pass()
    assert job.directive is not None
    assert (job.directive.incarnation, job.directive.command) == (2, Command.RUN)
    job.run(2)
    assert job.training() == {0, 1, 2}
    assert job.ledger.incarnation == 2
    assert job.status.restarts.failures == 1
    assert job.status.restarts.disruptions == 0
    (row,) = job.status.recoveries
    assert (row.cause, row.slice, row.from_slices, row.to_slices) == ("WorkerKilled", 1, 3, 3)
    assert row.step_before == before
    assert row.lost_steps == 0
    assert row.total_s is not None
    assert row.total_s < 1.0


def test_a_lost_slice_is_a_disruption_and_the_others_go_on() -> None:
    job = training_job()
    job.kill_slice(S0, capacity_gone=True)
    job.run(2)
    assert job.training() == {1, 2}
    assert job.ledger.incarnation == 2
    assert job.status.restarts.disruptions == 1
    assert job.status.restarts.failures == 0
    assert job.status.recoveries[-1].cause == "SliceLost"
    assert job.status.slice_statuses[0].state == "Gone"
    assert job.directive is not None
    assert job.directive.lead == HostId(S1, 0)


def test_one_lost_host_takes_its_slice_with_it() -> None:
    job = training_job(hosts=2)
    job.kill_agent(HostId(S1, 1))
    job.run(2)
    assert job.training() == {0, 2}
    assert job.status.recoveries[-1].cause == "HostLost"
    assert not job.agents[HostId(S1, 0)].is_alive or job.ledger.standby


def test_a_frozen_slice_is_lost_when_its_reports_are_too_old() -> None:
    job = training_job(scale_up={"mode": "Never"})
    job.freeze(S2)
    job.run(1.8)
    assert job.ledger.incarnation == 1
    job.run(2)
    assert job.training() == {0, 1}
    assert job.status.recoveries[-1].cause == "AgentSilent"
    assert not job.agents[HostId(S2, 0)].is_alive
    assert job.status.restarts.failures == 0


def test_a_short_silence_is_only_a_suspicion() -> None:
    job = training_job()
    job.freeze(S2)
    job.run(1.5)
    assert job.status.slice_statuses[2].state == "Suspect"
    job.thaw(S2)
    job.run(3)
    assert job.ledger.incarnation == 1
    assert job.status.slice_statuses[2].state == "Ready"


def test_consequences_wait_for_their_cause() -> None:
    """The siblings of a silent slice end first, and the first cause is still found."""
    job = training_job()
    job.freeze(S0)
    for agent in job.agents.values():
        if agent.host.slice != S0:
            job.end_worker(agent, ExitCause.CONSEQUENCE, alone=True)
    job.run(5)
    assert job.training() >= {1, 2}
    assert job.status.restarts.failures == 0
    assert job.status.recoveries[0].cause == "AgentSilent"


def test_consequences_without_any_cause_are_charged() -> None:
    job = training_job()
    job.end_worker(job.agents[HostId(S1, 0)], ExitCause.CONSEQUENCE)
    job.run(0.8)
    assert job.ledger.incarnation == 1
    job.run(3)
    assert job.training() == {0, 1, 2}
    assert job.status.recoveries[-1].cause == "CollectiveError"
    assert job.status.restarts.failures == 1


def test_a_failure_is_taken_back_when_its_host_proves_to_be_lost() -> None:
    """G10: a worker's end was seen a moment before the end of its slice."""
    job = training_job()
    job.kill_worker(HostId(S1, 0))
    job.run(0.2)
    assert job.ledger.budgets.failures == 1
    job.kill_slice(S1, capacity_gone=True)
    job.run(3)
    assert job.training() == {0, 2}
    assert job.status.restarts.failures == 0
    assert job.status.restarts.disruptions == 1


def test_a_second_loss_during_a_recovery_is_one_more_incarnation() -> None:
    job = training_job()
    job.kill_slice(S0, capacity_gone=True)
    job.run(0.2)
    assert job.ledger.incarnation == 2
    job.kill_slice(S1, capacity_gone=True)
    job.run(2)
    assert job.ledger.incarnation == 3
    assert job.training() == {2}
    assert [row.to_slices for row in job.status.recoveries] == [2, 1]


def test_two_losses_seen_together_are_one_incident() -> None:
    job = training_job()
    job.kill_slice(S0, capacity_gone=True)
    job.kill_slice(S1, capacity_gone=True)
    job.run(2)
    assert job.ledger.incarnation == 2
    assert job.training() == {2}
    assert job.status.restarts.disruptions == 2


def test_everything_killed_at_once_restarts_from_storage() -> None:
    job = training_job(scale_up={"mode": "Never"})
    job.kill_slice(S0, capacity_gone=True)
    job.kill_slice(S1)
    job.kill_slice(S2)
    job.run(3)
    assert job.training() == {1, 2}
    assert job.ledger.incarnation == 2
    row = job.status.recoveries[-1]
    assert row.source == "storage"
    assert row.lost_steps == row.step_before - Step(20)
    assert row.step_before - Step(20) < job.commit_every


def test_a_silent_majority_is_an_outage_and_not_a_loss() -> None:
    """Invariant 6: processes live, reports do not come."""
    job = training_job()
    job.cut_reports = True
    job.run(10)
    assert job.ledger.incarnation == 1
    assert job.ledger.outage_since_s is not None
    assert job.status.conditions[0].reason == Reason.CONTROL_PLANE_OUTAGE.value
    job.cut_reports = False
    job.run(2)
    assert job.ledger.outage_since_s is None
    assert job.ledger.incarnation == 1
    assert job.training() == {0, 1, 2}


def test_an_outage_pauses_no_longer_than_a_hang_may_last() -> None:
    job = training_job()
    for id_ in (S0, S1, S2):
        job.freeze(id_)
    job.run(21)
    assert job.ledger.incarnation == 1
    job.run(8)
    assert job.ledger.incarnation > 1
    assert job.training() == {0, 1, 2}


def test_half_of_two_slices_is_a_loss_and_not_an_outage() -> None:
    job = training_job(desired=2, scale_up={"mode": "Never"})
    job.freeze(S1)
    job.run(5)
    assert job.training() == {0}


def test_a_single_frozen_slice_is_replaced() -> None:
    job = training_job(desired=1)
    job.freeze(S0)
    job.run(6)
    assert job.training() == {0}
    assert job.ledger.incarnation == 2


def test_hosts_that_do_not_join_are_named_by_the_lead_and_lost() -> None:
    job = training_job(scale_up={"mode": "Never"})
    job.kill_worker(HostId(S0, 0))
    # Alive, reporting, and deaf: it follows no directive any more.
    job.agents[HostId(S2, 0)].is_deaf = True
    job.run(22)
    assert job.training() == frozenset()
    job.run(12)
    assert job.training() == {0, 1, 2}
    assert not job.agents[HostId(S2, 0)].is_deaf
    assert [row.cause for row in job.status.recoveries] == ["WorkerKilled", "JoinTimedOut"]
    assert job.status.restarts.failures == 2


def test_a_lead_that_does_not_join_is_lost_by_the_clock() -> None:
    job = training_job(scale_up={"mode": "Never"})
    job.kill_worker(HostId(S1, 0))
    job.agents[HostId(S0, 0)].is_deaf = True
    job.run(35)
    assert job.training() == {0, 1, 2}
    assert not job.agents[HostId(S0, 0)].is_deaf


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("ShrinkImmediately", {0, 2}),
        ("WaitThenShrink", set()),
        ("WaitForReplacement", set()),
        ("Fail", set()),
    ],
)
def test_the_policy_decides_about_a_lost_slice(policy: str, expected: set[int]) -> None:
    job = training_job(on_loss=policy)
    job.kill_slice(S1, capacity_gone=True)
    job.run(3)
    assert job.training() == expected
    if policy == "Fail":
        assert job.ledger.finish is not None
        assert job.ledger.finish.reason is Reason.LOSS_FORBIDDEN
        return
    if policy != "ShrinkImmediately":
        assert job.directive is not None
        assert job.directive.command is Command.WAIT
        assert [member.slice for member in job.directive.members] == [0, 2]
        assert job.status.conditions[0].reason == Reason.WAITING_FOR_REPLACEMENT.value
    job.run(6)
    assert job.training() == (set() if policy == "WaitForReplacement" else {0, 2})
    job.give(S1)
    job.run(8)
    assert job.training() == {0, 1, 2}


@pytest.mark.parametrize("policy", ["WaitThenShrink", "WaitForReplacement"])
def test_a_slice_whose_capacity_is_there_is_replaced_as_a_unit(policy: str) -> None:
    """Patience pays when the slice is soon back; there is no shrink in between."""
    job = training_job(on_loss=policy, hosts=2)
    job.kill_agent(HostId(S1, 0))
    job.run(4)
    assert job.training() == {0, 1, 2}
    assert job.ledger.incarnation == 2
    pids = {agent.pid for agent in job.agents.values() if agent.host.slice == S1}
    assert min(pids) > 106
    assert job.status.recoveries[-1].lost_steps == 0


def test_losses_while_waiting_join_the_wait() -> None:
    job = training_job(on_loss="WaitThenShrink")
    job.kill_slice(S1, capacity_gone=True)
    job.run(2)
    assert job.ledger.stage is Stage.WAIT
    job.kill_slice(S2, capacity_gone=True)
    job.run(1)
    assert job.ledger.members == (0,)
    job.run(4)
    assert job.training() == {0}
    assert job.ledger.incarnation == 2
    assert job.status.restarts.disruptions == 2


def test_below_the_minimum_it_waits_and_says_so() -> None:
    job = training_job(slices={"min": 2})
    job.kill_slice(S0, capacity_gone=True)
    job.kill_slice(S1, capacity_gone=True)
    job.run(30)
    assert job.ledger.stage is Stage.WAIT
    assert job.status.phase is Phase.RESCHEDULING
    assert job.status.conditions[0].reason == Reason.BELOW_MINIMUM_SLICES.value
    job.give(S0)
    job.run(3)
    assert job.training() == {0, 2}
    assert job.status.recoveries[-1].source == "memory"


def test_only_allowed_counts_are_used() -> None:
    job = training_job(desired=4, slices={"min": 1, "allowedCounts": [1, 2, 4]})
    job.kill_slice(S1, capacity_gone=True)
    job.run(3)
    assert job.training() == {0, 2}
    assert job.status.phase is Phase.RUNNING
    job.give(S1)
    job.run(6)
    assert job.training() == {0, 1, 2, 3}


def test_an_agent_that_cannot_begin_is_a_failure_with_its_own_words() -> None:
    job = SimulatedJob(make_spec(desired=1, restart={"maxRestarts": 1}))
    words = "spec.runtime.agentPort: found port 7070 taken; expected a free port"
    for _ in range(400):
        job.run(0.1)
        for agent in job.agents.values():
            if agent.is_alive and agent.report is not None:
                agent.report = replace(agent.report, address_refused=words)
                job.kill_agent(agent.host)
    assert job.status.phase is Phase.FAILED
    assert words in job.status.message
    assert job.status.restarts.failures == 2
    assert job.status.restarts.disruptions == 0
    assert job.ledger.incarnation == 2


def test_steps_that_the_survivors_tell_of_while_the_job_waits_count_as_lost() -> None:
    job = training_job(on_loss="WaitThenShrink", wait_s=1.0)
    before = job.step()
    for agent in job.agents.values():
        # Finished since their last reports.
        agent.step = before + 7
    job.kill_slice(S0, capacity_gone=True)
    job.run_pass()
    assert job.ledger.stage is Stage.WAIT
    job.run(3)
    (row,) = job.status.recoveries
    assert row.step_before == before + 7
    assert row.step_restored is not None
    assert row.lost_steps is not None
    assert row.lost_steps == before + 7 - row.step_restored
    assert row.lost_steps >= 7


def test_an_agent_that_ends_itself_before_its_first_report_is_a_failure_with_a_limit() -> None:
    job = SimulatedJob(make_spec(desired=1, restart={"maxRestarts": 2}))
    for _ in range(2000):
        job.run(0.05)
        for agent in list(job.agents.values()):
            if agent.is_alive and agent.report is None:
                job.kill_agent(agent.host, exit_code=1)
        if job.status.phase is Phase.FAILED:
            break
    assert job.status.phase is Phase.FAILED
    assert "ended with code 1 before its first report" in job.status.message
    assert job.status.restarts.failures == 3
    assert job.status.restarts.disruptions == 0


def test_a_program_that_never_reaches_main_is_given_up_after_a_few_tries() -> None:
    job = SimulatedJob(make_spec(restart={"maxRestarts": 50}))
    for _ in range(600):
        for agent in list(job.agents.values()):
            if agent.is_alive and agent.worker is Worker.RESTORING:
                job.end_worker(
                    agent,
                    ExitCause.USER_ERROR,
                    message="ModuleNotFoundError: No module named 'mine'",
                    before_main=True,
                )
        job.advance()
        job.run_pass()
        if job.ledger.stage is Stage.FINISHED:
            break
    assert job.ledger.incarnation == 3
    assert job.ledger.finish is not None
    assert job.ledger.finish.reason is Reason.USER_ERROR
    assert "No module named 'mine'" in job.ledger.finish.message
    assert "3 times in a row" in job.ledger.finish.message


def fail_at_import(job: SimulatedJob, messages: Iterator[str]) -> None:
    """Every worker that is started ends before `es.main`, with the next of the messages."""
    incarnation, message = job.ledger.incarnation, ""
    for _ in range(600):
        if job.ledger.incarnation > incarnation:
            incarnation = job.ledger.incarnation
            message = next(messages, "")
        for agent in list(job.agents.values()):
            if message and agent.is_alive and agent.worker is Worker.RESTORING:
                job.end_worker(agent, ExitCause.USER_ERROR, message=message, before_main=True)
        job.advance()
        job.run_pass()


def test_errors_at_import_that_differ_are_not_given_up_early() -> None:
    job = SimulatedJob(make_spec(restart={"maxRestarts": 50}))
    fail_at_import(job, iter(["OSError: busy", "OSError: away", "ValueError: late"]))
    assert job.ledger.finish is None
    assert job.training() == {0, 1, 2}


def test_other_failures_do_not_count_as_tries_of_an_import() -> None:
    job = SimulatedJob(make_spec(restart={"maxRestarts": 50}))
    kills = 0
    for _ in range(100):
        job.advance()
        if kills < 2 and any(one.worker is Worker.RESTORING for one in job.agents.values()):
            job.kill_worker(HostId(S0, 0))
            kills += 1
        job.run_pass()
        if job.status.restarts.failures == 2:
            break
    fail_at_import(job, iter(["OSError: busy"]))
    assert job.status.restarts.failures == 3
    assert job.training() == {0, 1, 2}


def test_a_program_that_once_trained_is_tried_for_as_long_as_the_budget_allows() -> None:
    job = training_job()
    for _ in range(400):
        for agent in list(job.agents.values()):
            if agent.is_alive and agent.worker in (Worker.RESTORING, Worker.TRAINING):
                job.end_worker(agent, ExitCause.USER_ERROR, before_main=True)
        job.advance()
        job.run_pass()
    assert job.status.restarts.failures > 3
    assert job.ledger.stage is not Stage.FINISHED
    job.run(20)
    assert job.training() == {0, 1, 2}


def end_all(job: SimulatedJob, **signals: int) -> None:
    for id_ in (S0, S1, S2):
        agent = job.agents[HostId(id_, 0)]
        signal = signals.get(f"s{id_}")
        job.end_worker(agent, ExitCause.CONSEQUENCE, signal=signal, alone=True)
    job.run(3)


def test_the_one_worker_that_aborted_is_the_cause_of_the_others_collective_errors() -> None:
    job = training_job()
    end_all(job, s1=6)
    (row,) = job.status.recoveries
    assert (row.cause, row.slice) == ("WorkerKilled", 1)


def test_aborts_of_several_workers_have_no_first_cause() -> None:
    job = training_job()
    end_all(job, s1=6, s2=6)
    (row,) = job.status.recoveries
    assert row.cause == "CollectiveError"
