"""Growing, scaling, suspending, deleting, failing, finishing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step
from everstep.controller.api.reasons import Reason
from everstep.controller.api.spec import JobSpec
from everstep.controller.api.status import Phase
from everstep.controller.api.wire import Command, ExitCause, WorkerExit
from everstep.controller.core.ledger import Stage
from everstep.controller.core.saving import SAVE_PATIENCE_S
from simulated_job import SimulatedJob, Timing

S0, S1, S2 = SliceId(0), SliceId(1), SliceId(2)


def training_job(*, timing: Timing | None = None, steps: int = 10_000, **spec: Any) -> SimulatedJob:
    job = SimulatedJob(make_spec(**spec), timing=timing, steps_total=steps)
    job.run(2.6 + job.timing.start_s)
    assert job.training() == frozenset(range(job.spec.slices.desired))
    return job


def with_desired(spec: JobSpec, desired: int) -> JobSpec:
    return replace(spec, slices=replace(spec.slices, desired=desired))


def test_capacity_that_comes_back_is_grown_into_without_losing_a_step() -> None:
    job = training_job()
    job.kill_slice(S1, capacity_gone=True)
    job.run(3)
    job.give(S1)
    job.run(0.4)
    assert job.ledger.standby == ()
    job.run(4)
    assert job.training() == {0, 1, 2}
    row = job.status.recoveries[-1]
    assert (row.cause, row.from_slices, row.to_slices, row.lost_steps) == ("ScaleUp", 2, 3, 0)
    assert job.status.phase is Phase.RUNNING
    assert job.status.restarts.disruptions == 1


def test_training_goes_on_while_the_new_agents_come_up() -> None:
    job = training_job(timing=Timing(start_s=1, import_s=2))
    job.run(4)
    job.kill_slice(S1, capacity_gone=True)
    job.run(3)
    job.give(S1)
    job.run(1)
    before = job.step()
    job.run(2)
    assert job.step() > before + 10
    job.run(4)
    assert job.training() == {0, 1, 2}


def test_capacity_that_comes_back_in_pieces_is_one_growth() -> None:
    job = training_job(scale_up={"stabilizationSeconds": 2})
    job.kill_slice(S1, capacity_gone=True)
    job.kill_slice(S2, capacity_gone=True)
    job.run(3)
    job.give(S1)
    job.run(1.5)
    job.give(S2)
    job.run(8)
    assert job.training() == {0, 1, 2}
    assert [row.cause for row in job.status.recoveries] == ["SliceLost", "ScaleUp"]


@pytest.mark.parametrize(
    "scale_up",
    [
        {"mode": "Never"},
        {"minUptimeSeconds": 100},
        {"cooldownSeconds": 100},
        {"stabilizationSeconds": 100},
    ],
    ids=str,
)
def test_the_times_hold_growing_back(scale_up: dict[str, Any]) -> None:
    job = training_job(scale_up=scale_up)
    job.kill_slice(S1, capacity_gone=True)
    job.run(3)
    job.give(S1)
    job.run(20)
    assert job.training() == {0, 2}
    assert job.ledger.incarnation == 2
    assert job.status.phase is Phase.RUNNING
    assert job.status.conditions[0].reason == Reason.RUNNING_DEGRADED.value
    if scale_up.get("mode") != "Never":
        job.run(90, tick_s=0.5)
        assert job.training() == {0, 1, 2}


def test_a_storm_pauses_growing_and_fails_nothing() -> None:
    job = training_job(restart={"maxDisruptionsPerHour": 2})
    for _ in range(2):
        job.kill_slice(S1, capacity_gone=True)
        job.run(2)
        job.give(S1)
        job.run(8)
    assert job.training() == {0, 2}
    assert job.status.conditions[0].reason == Reason.DISRUPTION_STORM.value
    assert job.ledger.finish is None
    job.now_s += 3600
    job.run(8)
    assert job.training() == {0, 1, 2}


def condition(job: SimulatedJob, type_: str) -> tuple[str, str]:
    found = next(one for one in job.status.conditions if one.type == type_)
    return found.status, found.reason


def lose_each_minute(job: SimulatedJob, id_: SliceId, count: int) -> None:
    """Its agents die, its capacity stays: a replacement can come at once."""
    for _ in range(count):
        job.kill_slice(id_)
        job.run(60, tick_s=0.5)


def test_in_a_storm_a_lost_slice_is_not_replaced_until_the_hour_is_over() -> None:
    job = training_job(on_loss="WaitForReplacement", restart={"maxDisruptionsPerHour": 3})
    began_s = job.now_s
    lose_each_minute(job, S1, 2)
    assert job.training() == {0, 1, 2}
    lose_each_minute(job, S1, 3)
    paused_at = job.ledger.incarnation
    assert paused_at == 3
    assert job.ledger.stage is Stage.WAIT
    assert condition(job, "Ready") == ("False", Reason.DISRUPTION_STORM.value)
    assert condition(job, "Degraded") == ("True", Reason.DISRUPTION_STORM.value)
    assert "0, 2" in job.status.message
    assert job.status.wait_until_s is not None
    assert began_s + 3600 <= job.status.wait_until_s <= began_s + 3720
    job.run(600, tick_s=1.0)
    assert job.ledger.incarnation == paused_at
    assert job.ledger.finish is None
    assert job.ledger.members == (0, 2)
    job.now_s = job.status.wait_until_s - 2
    job.run(1, tick_s=0.5)
    assert job.ledger.incarnation == paused_at
    job.run(12)
    assert job.training() == {0, 1, 2}
    told = [one for one in job.events.values() if one.reason is Reason.DISRUPTION_STORM]
    assert len(told) == 1


def test_in_a_storm_survivors_that_may_go_on_do_and_only_get_fewer() -> None:
    job = training_job(
        desired=4, slices={"min": 2}, wait_s=1000, restart={"maxDisruptionsPerHour": 1}
    )
    lose_each_minute(job, S1, 2)
    assert job.training() == {0, 2, 3}
    assert condition(job, "Degraded") == ("True", Reason.DISRUPTION_STORM.value)
    lose_each_minute(job, S0, 1)
    assert job.training() == {2, 3}
    lose_each_minute(job, S2, 1)
    assert job.ledger.stage is Stage.WAIT
    assert condition(job, "Ready") == ("False", Reason.DISRUPTION_STORM.value)
    assert job.ledger.incarnation == 3


def test_in_a_storm_nobody_waits_for_a_replacement_that_is_not_started() -> None:
    job = training_job(on_loss="WaitThenShrink", wait_s=1000, restart={"maxDisruptionsPerHour": 1})
    job.kill_slice(S1)
    job.run(3)
    assert job.training() == {0, 2}


def test_many_slices_lost_together_are_one_disruption_of_a_storm() -> None:
    job = training_job(desired=4, restart={"maxDisruptionsPerHour": 3})
    for id_ in (S0, S1, S2):
        job.kill_slice(id_)
    job.run(10)
    assert job.training() == {0, 1, 2, 3}
    assert job.status.restarts.disruptions == 3


def test_a_raised_limit_ends_the_pause_at_once() -> None:
    job = training_job(on_loss="WaitForReplacement", restart={"maxDisruptionsPerHour": 1})
    lose_each_minute(job, S1, 1)
    assert job.ledger.stage is Stage.WAIT
    restart = replace(job.spec.restart, max_disruptions_per_hour=5)
    job.respec(replace(job.spec, restart=restart))
    job.run(4)
    assert job.training() == {0, 1, 2}


def test_a_paused_job_can_be_suspended_and_deleted() -> None:
    job = training_job(on_loss="WaitForReplacement", restart={"maxDisruptionsPerHour": 1})
    lose_each_minute(job, S1, 1)
    job.respec(replace(job.spec, suspend=True))
    job.run(6)
    assert job.status.phase is Phase.SUSPENDED
    job.is_deleting = True
    job.run(10)
    assert job.is_removed


def test_a_slice_that_does_not_come_up_does_not_stop_the_training() -> None:
    job = training_job()
    job.kill_slice(S1, capacity_gone=True)
    job.run(3)
    job.give(S1)
    until_s = job.now_s + 40
    starts = 0
    while job.now_s < until_s:
        job.advance()
        job.run_pass()
        agent = job.agents[HostId(S1, 0)]
        if agent.is_alive:
            starts += 1
            job.kill_agent(HostId(S1, 0))
    assert job.training() == {0, 2}
    assert job.ledger.incarnation == 2
    # It is tried again and again, more and more seldom; the window lets a few through each time.
    assert 3 <= job.ledger.standby[0].attempts <= 6
    assert starts < 150
    job.run(30)
    assert job.training() == {0, 1, 2}


def test_a_slice_lost_while_growing_is_left_out() -> None:
    job = training_job(timing=Timing(hold_s=2))
    job.kill_slice(S1, capacity_gone=True)
    job.run(5)
    job.give(S1)
    while job.ledger.incident is None:
        job.run(0.1)
    job.kill_slice(S1, capacity_gone=True)
    job.run(5)
    assert job.training() == {0, 2}
    assert job.ledger.incident is None


def test_fewer_desired_slices_leave_from_the_end() -> None:
    job = training_job()
    job.respec(with_desired(job.spec, 2))
    job.run(3)
    assert job.training() == {0, 1}
    row = job.status.recoveries[-1]
    assert (row.cause, row.lost_steps) == ("ScaleDown", 0)
    assert job.status.restarts.disruptions == 0
    assert not job.agents[HostId(S2, 0)].is_alive


def test_more_desired_slices_are_brought_at_once_when_asked() -> None:
    job = training_job(
        desired=2, slices={"max": 3}, scale_up={"minUptimeSeconds": 900, "cooldownSeconds": 900}
    )
    job.respec(with_desired(job.spec, 3))
    job.run(3)
    assert job.training() == {0, 1, 2}
    assert job.status.recoveries[-1].cause == "ScaleUp"
    assert not job.ledger.grow_asked


def test_scaling_back_and_forth_before_the_members_agreed_changes_nothing() -> None:
    job = training_job(timing=Timing(hold_s=4))
    spec = job.spec
    job.respec(with_desired(spec, 2))
    job.run(0.3)
    assert job.ledger.incident is not None
    job.respec(spec)
    job.run(3)
    assert job.ledger.incarnation == 1
    assert job.training() == {0, 1, 2}


def test_suspension_makes_the_step_durable_and_frees_everything() -> None:
    job = training_job()
    job.respec(replace(job.spec, suspend=True))
    job.run(3)
    assert job.status.phase is Phase.SUSPENDED
    assert not any(agent.is_alive for agent in job.agents.values())
    step = job.committed
    assert step > 20
    job.run(20)
    writes = job.writes
    job.run(20)
    assert job.writes == writes
    assert job.ledger.incarnation == 1
    job.respec(replace(job.spec, suspend=False))
    job.run(3)
    assert job.training() == {0, 1, 2}
    row = job.status.recoveries[-1]
    assert (row.cause, row.source, row.step_restored) == ("Resumed", "storage", step)
    assert row.lost_steps == 0


def test_a_job_can_be_suspended_and_resumed_many_times() -> None:
    job = training_job()
    for n in range(5):
        job.respec(replace(job.spec, suspend=True))
        job.run(3)
        assert job.status.phase is Phase.SUSPENDED
        job.respec(replace(job.spec, suspend=False))
        job.run(3)
        assert job.training() == {0, 1, 2}
        assert job.ledger.incarnation == n + 2


def test_a_job_that_is_born_suspended_waits_for_its_first_start() -> None:
    job = SimulatedJob(make_spec(suspend=True))
    job.run(3)
    assert job.status.phase is Phase.SUSPENDED
    assert job.ledger.incarnation == 0
    assert job.agents == {}
    job.respec(replace(job.spec, suspend=False))
    job.run(3)
    assert job.training() == {0, 1, 2}
    assert job.status.recoveries == ()


def test_suspension_withdrawn_before_the_members_agreed_changes_nothing() -> None:
    job = training_job(timing=Timing(hold_s=4))
    job.respec(replace(job.spec, suspend=True))
    job.run(0.3)
    job.respec(replace(job.spec, suspend=False))
    job.run(3)
    assert job.ledger.incarnation == 1
    assert job.training() == {0, 1, 2}


def test_a_loss_while_suspending_does_not_restart_anything() -> None:
    job = training_job(timing=Timing(hold_s=60))
    job.respec(replace(job.spec, suspend=True))
    job.run(0.3)
    job.kill_slice(S0, capacity_gone=True)
    job.run(10)
    assert job.status.phase is Phase.SUSPENDED
    assert job.ledger.incarnation == 1
    assert not any(agent.is_alive for agent in job.agents.values())


def test_deletion_saves_stops_and_removes() -> None:
    job = training_job()
    step = job.step()
    job.is_deleting = True
    job.run(8)
    assert job.is_removed
    assert job.committed >= step
    assert not any(agent.is_alive for agent in job.agents.values())


def test_deletion_does_not_wait_for_who_does_not_answer() -> None:
    job = training_job(timing=Timing(hold_s=1e6))
    for id_ in (S0, S1, S2):
        job.freeze(id_)
    job.is_deleting = True
    job.run(30)
    assert job.is_removed


def test_deletion_of_what_never_started_is_immediate() -> None:
    job = SimulatedJob(make_spec())
    job.is_deleting = True
    job.run(0.5)
    assert job.is_removed
    assert job.agents == {}


def test_the_active_deadline_ends_a_job_with_its_step_durable() -> None:
    job = training_job(activeDeadlineSeconds=6)
    job.run(4)
    assert job.status.phase is Phase.FAILED
    assert job.ledger.finish is not None
    assert job.ledger.finish.reason is Reason.DEADLINE_EXCEEDED
    assert job.committed >= 40


def test_the_last_step_ends_the_job_with_success() -> None:
    job = training_job(steps=40)
    job.run(8)
    assert job.status.phase is Phase.SUCCEEDED
    assert job.committed == 40
    assert not any(agent.is_alive for agent in job.agents.values())
    condition = job.status.conditions[-1]
    assert (condition.type, condition.status) == ("Succeeded", "True")


def test_a_finished_job_stays_finished() -> None:
    """Invariant 8."""
    job = training_job(steps=40)
    job.run(8)
    writes = job.writes
    job.agents.clear()
    job.directive = None
    job.take(S0)
    job.run(5)
    job.give(S0)
    job.respec(with_desired(job.spec, 2))
    job.run(20)
    assert job.status.phase is Phase.SUCCEEDED
    assert job.agents == {}
    # The spec was changed by somebody: its generation and the desired count are shown.
    assert job.writes <= writes + 3


def test_peers_that_die_after_the_lead_is_done_do_not_matter() -> None:
    job = training_job()
    job.committed = job.step()
    job.end_worker(job.agents[HostId(S0, 0)], ExitCause.DONE, alone=True)
    for id_ in (S1, S2):
        job.end_worker(job.agents[HostId(id_, 0)], ExitCause.CONSEQUENCE, alone=True)
    job.run(1)
    assert job.status.phase is Phase.SUCCEEDED


def test_an_exception_is_retried_with_growing_patience_until_the_budget_is_spent() -> None:
    job = training_job(restart={"maxRestarts": 3})
    starts: list[float] = []
    last = job.ledger.incarnation
    crash_at = job.step() + 3
    for _ in range(600):
        job.run(0.1)
        for agent in job.agents.values():
            agent.crashes_at = crash_at
        if job.ledger.incarnation != last:
            last = job.ledger.incarnation
            starts.append(job.now_s)
        if job.ledger.finish is not None:
            break
    assert job.ledger.finish is not None
    assert job.ledger.finish.reason is Reason.RESTART_BUDGET_EXHAUSTED
    assert "ValueError: crash" in job.ledger.finish.message
    gaps = [after - before for before, after in pairwise(starts)]
    assert gaps == sorted(gaps)
    assert job.ledger.budgets.failures == 4
    assert job.status.restarts.disruptions == 0


def test_disruptions_do_not_spend_the_failure_budget() -> None:
    """G10."""
    job = training_job(restart={"maxRestarts": 0})
    for _ in range(6):
        job.kill_slice(S1, capacity_gone=True)
        job.run(2)
        job.give(S1)
        job.run(6)
    assert job.ledger.finish is None
    assert job.training() == {0, 1, 2}
    assert (job.status.restarts.failures, job.status.restarts.disruptions) == (0, 6)


def test_with_no_restarts_allowed_the_first_failure_is_the_last() -> None:
    job = training_job(restart={"maxRestarts": 0})
    job.kill_worker(HostId(S1, 0))
    job.run(1)
    assert job.status.phase is Phase.FAILED


def test_many_killed_workers_with_progress_between_them_never_wait() -> None:
    job = training_job(restart={"maxRestarts": 30})
    for n in range(20):
        job.kill_worker(HostId(SliceId(n % 3), 0))
        job.run(1.5)
        assert job.training() == {0, 1, 2}
    assert all(row.schedule_s == 0 for row in job.status.recoveries)
    assert len(job.status.recoveries) == 20


def test_a_step_that_crashes_twice_right_after_its_restore_is_set_aside() -> None:
    job = training_job()
    for agent in job.agents.values():
        agent.memory = {30}
        agent.crashes_at = 31
    job.kill_worker(HostId(S0, 0))
    job.run(12)
    assert job.ledger.restore_set_aside == (30,)
    assert job.directive is not None
    assert job.directive.restore_set_aside == (30,)
    assert "event/set-aside-30" in job.events
    for agent in job.agents.values():
        agent.crashes_at = None
    job.run(20)
    assert job.training() == {0, 1, 2}


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (ExitCause.STATE_REFUSED, Reason.STATE_REFUSED),
        (ExitCause.USER_ERROR, Reason.USER_ERROR),
    ],
)
def test_what_no_restart_can_help_ends_the_job_at_once(cause: ExitCause, reason: Reason) -> None:
    job = training_job()
    agent = job.agents[HostId(S1, 0)]
    job.end_worker(agent, cause, message="params/w: found object, expected an array")
    assert isinstance(agent.exit, WorkerExit)
    agent.exit = replace(agent.exit, is_retryable=False)
    job.run(1)
    assert job.ledger.finish is not None
    assert job.ledger.finish.reason is reason
    assert "params/w" in job.ledger.finish.message


def test_a_fenced_job_stops_and_says_so() -> None:
    job = training_job()
    agent = job.agents[HostId(S0, 0)]
    job.advance()
    assert agent.report is not None
    agent.report = replace(agent.report, fenced_by=Incarnation(1))
    job.run_pass()
    assert job.ledger.finish is not None
    assert job.ledger.finish.reason is Reason.FENCED
    assert "/tmp/job" in job.ledger.finish.message
    job.run(8)
    assert not any(agent.is_alive for agent in job.agents.values())


@pytest.mark.parametrize(
    ("policy", "seconds", "expected"),
    [
        ("ShrinkImmediately", 2, {0, 2}),
        ("WaitThenShrink", 4, set()),
        ("WaitThenShrink", 8, {0, 2}),
        ("WaitForReplacement", 30, set()),
        ("Fail", 30, set()),
    ],
)
def test_a_first_start_with_too_little_capacity_follows_the_policy(
    policy: str, seconds: float, expected: set[int]
) -> None:
    job = SimulatedJob(make_spec(on_loss=policy))
    job.take(S1)
    job.run(seconds)
    assert job.training() == expected
    assert job.ledger.finish is None
    if not expected:
        assert job.status.phase is Phase.SCHEDULING
        assert job.ledger.incarnation == 0
        assert job.agents == {}
        job.give(S1)
        job.run(3)
        assert job.training() == {0, 1, 2}
        assert job.ledger.incarnation == 1


def test_steady_state_costs_no_write() -> None:
    """Invariant 7."""
    job = training_job()
    before = (job.writes, job.ledger, len(job.performed))
    step = job.step()
    job.run(60)
    assert job.step() > step + 500
    assert (job.writes, job.ledger, len(job.performed)) == before


def test_a_recovery_costs_few_writes() -> None:
    """Invariant 7: not one for each host."""
    job = training_job(desired=4, hosts=8)
    before = job.writes
    job.kill_slice(S1, capacity_gone=True)
    job.run(4)
    assert job.training() == {0, 2, 3}
    assert job.writes - before <= 6


def test_figures_are_shown_though_they_are_not_persisted() -> None:
    job = training_job()
    job.run(5)
    made = job.run_pass()
    assert made is not None
    assert not made.must_persist
    assert made.status.step == job.step()
    assert made.status.steps_per_s == 10.0
    assert made.status.checkpoint.step_snapshot == job.step()
    assert made.status.checkpoint.last_committed is not None


def test_a_lost_directive_is_written_again_with_a_newer_number() -> None:
    job = training_job()
    assert job.directive is not None
    old = job.directive
    job.directive = None
    job.run_pass()
    assert job.directive is not None
    assert job.directive.sequence > old.sequence
    assert job.directive.incarnation == old.incarnation
    job.run(2)
    assert job.ledger.incarnation == 1
    assert job.training() == {0, 1, 2}


def test_a_lost_ledger_never_brings_an_incarnation_back() -> None:
    """G6."""
    job = training_job()
    job.kill_slice(S1, capacity_gone=True)
    job.run(3)
    seen = job.observe("job")
    assert seen is not None
    from everstep.controller.api.status import JobStatus
    from everstep.controller.core.ledger import Ledger

    assert job.persist("job", Ledger(), JobStatus(), seen.precondition) is not None
    job.run(5)
    assert job.ledger.incarnation == 3
    assert job.training() == {0, 2}


def test_settings_change_with_the_next_incarnation() -> None:
    job = training_job()
    checkpoint = replace(job.spec.checkpoint, every_steps=77)
    job.respec(replace(job.spec, checkpoint=checkpoint))
    job.run(1)
    assert job.directive is not None
    assert job.directive.settings.checkpoint_every_steps == 20
    job.kill_worker(HostId(S0, 0))
    job.run(1)
    assert job.directive.settings.checkpoint_every_steps == 77


def test_tokens_are_new_for_each_incarnation_and_stay_within_one() -> None:
    job = training_job()
    assert job.directive is not None
    first = job.directive.token
    job.notify(S1, 20)
    job.run_pass()
    assert job.directive.request is not None
    assert job.directive.token == first
    job.run(3)
    assert job.directive.token != first


def test_reports_of_another_job_of_the_same_name_are_not_heard() -> None:
    job = training_job()
    agent = job.agents[HostId(S1, 0)]
    job.advance()
    assert agent.report is not None
    agent.report = replace(
        agent.report, job_uid="another", step=Step(10**6), fenced_by=Incarnation(9)
    )
    made = job.run_pass()
    assert made is not None
    assert made.status.step < 10**6
    assert job.ledger.stage is Stage.RUN


def test_a_stop_is_told_when_the_job_ends() -> None:
    job = training_job(steps=40)
    job.run(2)
    assert job.directive is not None
    assert job.directive.command is Command.STOP


def waiting_job() -> SimulatedJob:
    """It waits for a replacement, and its survivors hold a step that storage has not."""
    job = training_job(on_loss="WaitForReplacement")
    job.kill_slice(S0, capacity_gone=True)
    job.advance()
    job.run_pass()
    assert job.ledger.stage is Stage.WAIT
    assert max(job.agents[HostId(S1, 0)].memory) > job.committed
    return job


def test_a_job_that_is_suspended_while_it_waits_keeps_its_memory_until_it_is_durable() -> None:
    job = waiting_job()
    held = max(job.agents[HostId(S1, 0)].memory)
    job.respec(replace(job.spec, suspend=True))
    job.run(0.3)
    assert job.status.phase is Phase.CHECKPOINTING
    assert condition(job, "Suspended")[0] == "False"
    job.run(6)
    assert job.status.phase.value == "Suspended"
    assert condition(job, "Suspended")[0] == "True"
    assert job.committed == held
    assert job.ledger.members == ()
    assert not any(agent.is_alive for agent in job.agents.values())


def test_a_job_that_is_deleted_while_it_waits_leaves_its_newest_step_durable() -> None:
    job = waiting_job()
    held = max(job.agents[HostId(S1, 0)].memory)
    job.is_deleting = True
    job.run(10)
    assert job.is_removed
    assert job.committed == held


def test_a_suspended_job_does_not_wait_for_ever_for_memory_that_is_not_saved() -> None:
    job = waiting_job()
    for id_ in (S1, S2):
        job.agents[HostId(id_, 0)].is_deaf = True
    job.respec(replace(job.spec, suspend=True))
    job.run(SAVE_PATIENCE_S + 60, tick_s=1.0)
    assert job.ledger.members == ()
    assert "was reached, and step" in job.status.message


def test_a_suspended_job_does_not_keep_memory_that_cannot_be_saved() -> None:
    job = waiting_job()
    job.refuses_saves = True
    job.respec(replace(job.spec, suspend=True))
    job.run(4)
    assert job.ledger.members == ()
