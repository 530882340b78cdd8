"""What is announced: the step is held outside before anybody leaves."""

from __future__ import annotations

from typing import Any

import pytest

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.reasons import Reason
from everstep.controller.api.status import Phase
from everstep.controller.api.wire import Command, ExitCause, RequestKind
from everstep.controller.core.ledger import Stage
from everstep.controller.core.model import NoticeClass, StopSlice, WriteDirective
from simulated_job import SimulatedJob, Timing

S0, S1, S2 = SliceId(0), SliceId(1), SliceId(2)


def training_job(*, timing: Timing | None = None, **spec: Any) -> SimulatedJob:
    job = SimulatedJob(make_spec(**spec), timing=timing)
    job.run(3)
    assert job.training() == frozenset(range(job.spec.slices.desired))
    return job


def requests(job: SimulatedJob) -> list[str]:
    """Ids of all requests that were written, in order."""
    found: list[str] = []
    for action in job.performed:
        if isinstance(action, WriteDirective) and action.directive.request is not None:
            if action.directive.request.id not in found:
                found.append(action.directive.request.id)
    return found


def test_a_notice_costs_no_step() -> None:
    job = training_job()
    job.notify(S1, 20)
    job.advance()
    job.run_pass()
    assert job.directive is not None
    request = job.directive.request
    assert request is not None
    assert (request.kind, request.doomed, request.durable) == (RequestKind.LEAVE, (1,), False)
    assert request.deadline_s == pytest.approx(job.notices[S1].deadline_s - 2, abs=0.01)
    job.run(3)
    assert job.training() == {0, 2}
    (row,) = job.status.recoveries
    assert (row.cause, row.slice, row.lost_steps) == ("PreemptionNotice", 1, 0)
    assert row.drain_s == job.timing.hold_s
    assert not job.agents[HostId(S1, 0)].is_alive
    assert job.status.restarts.disruptions == 1
    assert job.status.restarts.failures == 0
    assert job.status.checkpoint.budget_seconds_learnt == pytest.approx(0.15)


def test_a_step_that_one_host_began_after_the_others_left_is_not_lost() -> None:
    job = training_job()
    job.agents[HostId(S2, 0)].begins_ahead = True
    job.notify(S1, 20)
    job.run(4)
    assert job.training() == {0, 2}
    (row,) = job.status.recoveries
    assert row.lost_steps == 0
    assert row.step_before == row.step_restored


def test_the_survivors_are_told_before_the_doomed_are_stopped() -> None:
    job = training_job()
    job.notify(S0, 20)
    job.performed.clear()
    job.run(3)
    last_run = next(
        index
        for index, action in enumerate(job.performed)
        if isinstance(action, WriteDirective) and action.directive.incarnation == 2
    )
    stops = [i for i, action in enumerate(job.performed) if isinstance(action, StopSlice)]
    assert stops
    assert min(stops) > last_run


def test_a_repeated_notice_asks_for_nothing_new() -> None:
    job = training_job()
    job.notify(S1, 20)
    job.run(0.1)
    notice = job.notices[S1]
    for _ in range(10):
        job.notices[S1] = notice
        job.run(0.5)
    assert requests(job) == ["1-1"]
    assert job.ledger.incarnation == 2


def test_a_second_notice_joins_the_first_while_it_drains() -> None:
    """One save, one reschedule, both slices excluded."""
    job = training_job(timing=Timing(hold_s=3.5))
    job.notify(S0, 20)
    job.run(0.3)
    job.notify(S1, 17)
    job.run(5)
    assert requests(job) == ["1-1", "1-2"]
    assert job.ledger.incarnation == 2
    assert job.training() == {2}
    assert job.status.restarts.disruptions == 2
    (row,) = job.status.recoveries
    assert (row.slice, row.from_slices, row.to_slices) == (0, 3, 1)


def test_a_notice_of_all_slices_makes_the_step_durable_and_waits() -> None:
    """All are taken, then one comes back."""
    job = training_job(on_loss="WaitThenShrink", wait_s=3)
    for id_ in (S0, S1, S2):
        job.notify(id_, 15)
    job.run(1)
    assert job.directive is not None
    assert requests(job) == ["1-1"]
    step = job.committed
    job.run(30)
    assert job.ledger.stage is Stage.WAIT
    assert job.status.phase is Phase.RESCHEDULING
    assert job.status.conditions[0].reason == Reason.BELOW_MINIMUM_SLICES.value
    assert job.ledger.incarnation == 1
    job.give(S2)
    job.run(3)
    assert job.training() == {2}
    row = job.status.recoveries[-1]
    assert (row.source, row.step_restored, row.lost_steps) == ("storage", step, 0)


def test_a_withdrawn_notice_is_forgotten() -> None:
    """Before the members agreed."""
    job = training_job(timing=Timing(hold_s=3.5))
    job.notify(S1, 20)
    job.run(0.3)
    assert job.status.phase is Phase.CHECKPOINTING
    job.withdraw(S1)
    job.run(2)
    assert job.ledger.incarnation == 1
    assert job.ledger.incident is None
    assert job.directive is not None
    assert job.directive.request is None
    assert job.training() == {0, 1, 2}
    assert job.status.restarts.disruptions == 0


def test_members_that_left_for_a_withdrawn_notice_are_called_back() -> None:
    job = training_job()
    job.notify(S1, 20)
    job.run_pass()
    # The members leave, and before the controller looks again the notice is gone.
    while not any(agent.held for agent in job.agents.values()):
        job.advance()
    job.withdraw(S1)
    job.run(2)
    assert job.training() == {0, 1, 2}
    assert job.ledger.incarnation == 2
    assert job.ledger.cause is Reason.NOTICE_WITHDRAWN
    assert job.status.restarts.disruptions == 0
    assert job.status.recoveries[-1].lost_steps == 0


def test_a_request_withdrawn_too_late_is_healed() -> None:
    job = training_job()
    job.notify(S1, 20)
    job.run_pass()
    while not any(agent.held for agent in job.agents.values()):
        for agent in job.agents.values():
            agent.held = None
        job.advance()
    for agent in job.agents.values():
        # Their answer gets lost, their leaving does not.
        assert agent.report is not None
        agent.held = None
    job.advance()
    job.withdraw(S1)
    job.run(2)
    assert job.training() == {0, 1, 2}
    assert job.ledger.cause is Reason.NOTICE_WITHDRAWN


@pytest.mark.parametrize("notice_s", [0.5, 2.0, 8.0])
def test_a_short_notice_keeps_most_of_itself(notice_s: float) -> None:
    """The notice shorter than the budget: a margin is a share of what there is."""
    job = training_job()
    job.notify(S1, notice_s)
    job.run_pass()
    assert job.directive is not None
    assert job.directive.request is not None
    left_s = job.directive.request.deadline_s - job.now_s
    assert left_s == pytest.approx(max(0.75 * notice_s, notice_s - 2))
    job.run(4)
    assert job.training() == {0, 2}
    assert job.status.recoveries[-1].lost_steps == 0


def test_a_deadline_that_is_past_is_acted_on_at_once() -> None:
    job = training_job()
    job.notify(S1, -3)
    job.run_pass()
    assert job.ledger.incarnation == 2
    assert requests(job) == []


def test_a_drain_does_not_wait_for_a_deadline_far_away() -> None:
    job = training_job(timing=Timing(hold_s=1e6), scale_up={"mode": "Never"})
    job.notify(S1, 7200, NoticeClass.PLANNED)
    job.run(26)
    assert job.training() == {0, 2}


def test_an_answer_that_never_comes_costs_the_deadline_and_no_more() -> None:
    """Invariant 5."""
    job = training_job(timing=Timing(hold_s=1e6), scale_up={"mode": "Never"})
    job.notify(S1, 10)
    job.run(7.8)
    assert job.ledger.incarnation == 1
    job.run(2)
    assert job.ledger.incarnation == 2
    assert job.training() == {0, 2}
    assert "event/drained-1-1" in job.events
    assert job.events["event/drained-1-1"].reason is Reason.DEADLINE_MISSED


def test_a_slice_that_dies_before_its_deadline_ends_the_drain() -> None:
    """The doomed slice is gone before anybody answered."""
    job = training_job(timing=Timing(hold_s=5), scale_up={"mode": "Never"})
    job.notify(S0, 20)
    job.run(0.5)
    job.take(S0)
    job.run(1)
    assert job.training() == {1, 2}
    row = job.status.recoveries[-1]
    assert row.cause == "PreemptionNotice"
    assert row.drain_s is not None
    assert job.status.restarts.disruptions == 1


def test_an_error_after_a_notice_is_its_consequence() -> None:
    """What breaks while slices leave is not counted as a failure."""
    job = training_job(timing=Timing(hold_s=30), scale_up={"mode": "Never"})
    job.notify(S1, 40)
    job.run(0.5)
    job.raise_in_worker(HostId(S1, 0), "BrokenPipeError: loader")
    job.run(4)
    assert job.training() == {0, 2}
    assert job.status.restarts.failures == 0
    assert job.status.restarts.disruptions == 1
    assert job.status.recoveries[-1].cause == "PreemptionNotice"


def test_an_error_without_a_notice_is_a_failure() -> None:
    """An exception is never called a preemption."""
    job = training_job()
    job.raise_in_worker(HostId(S1, 0), "MemoryError")
    job.run(1)
    assert job.status.restarts.failures == 1
    assert job.status.restarts.disruptions == 0
    assert job.ledger.turnover is not None
    assert job.ledger.turnover.reason is Reason.USER_ERROR


def test_a_signal_to_an_agent_is_a_notice() -> None:
    job = training_job(hosts=2, scale_up={"mode": "Never"})
    job.terminate(HostId(S1, 1), 10)
    job.run(2)
    assert job.training() == {0, 2}
    assert job.status.recoveries[-1].cause == "PreemptionNotice"
    assert not any(agent.is_alive for host, agent in job.agents.items() if host.slice == S1)


def test_world_and_agent_announce_the_same_event_once() -> None:
    job = training_job()
    job.notify(S1, 20)
    job.terminate(HostId(S1, 0), 15)
    job.run(3)
    assert job.ledger.incarnation == 2
    assert job.status.restarts.disruptions == 1


def test_a_planned_notice_can_be_ignored() -> None:
    job = training_job(disruption={"plannedAction": "Ignore"})
    job.notify(S1, 5, NoticeClass.PLANNED)
    job.run(3)
    assert job.ledger.incarnation == 1
    assert requests(job) == []
    job.take(S1)
    job.run(2)
    assert job.training() == {0, 2}
    assert job.status.recoveries[-1].cause == "SliceLost"


def test_a_planned_notice_can_mean_a_checkpoint_only() -> None:
    job = training_job(disruption={"plannedAction": "CheckpointOnly"})
    job.notify(S1, 30, NoticeClass.PLANNED)
    job.run_pass()
    assert job.directive is not None
    assert job.directive.request is not None
    assert job.directive.request.kind is RequestKind.CHECKPOINT
    assert job.directive.request.durable
    job.run(5)
    assert job.ledger.incarnation == 1
    assert requests(job) == ["1-1"]
    assert job.committed > 30
    assert job.training() == {0, 1, 2}


@pytest.mark.parametrize("action", ["Ignore", "CheckpointOnly"])
def test_an_imminent_notice_is_always_heeded(action: str) -> None:
    job = training_job(disruption={"plannedAction": action})
    job.notify(S1, 20)
    job.run(3)
    assert job.training() == {0, 2}


def test_a_notice_before_the_first_step_saves_nothing_and_loses_nothing() -> None:
    """Before step 1."""
    job = SimulatedJob(make_spec(), timing=Timing(restore_s=5))
    job.run(2)
    assert job.ledger.stage is Stage.RUN
    job.notify(S1, 20)
    job.run(8)
    assert job.training() == {0, 2}
    assert requests(job) == []


def test_a_slice_under_notice_is_not_chosen() -> None:
    """A notice in the gap between two incarnations."""
    job = training_job(on_loss="WaitThenShrink", wait_s=4)
    job.kill_slice(S1)
    job.run(0.2)
    job.notify(S1, 30)
    job.run(6)
    assert job.training() == {0, 2}
    assert job.ledger.incarnation == 2


def waiting_job() -> SimulatedJob:
    """It has lost a slice and waits for it; the survivors hold a step that storage has not."""
    job = training_job(on_loss="WaitThenShrink", wait_s=600)
    job.take(S0)
    job.run(0.2)
    assert job.ledger.stage is Stage.WAIT
    assert job.committed < max(job.agents[HostId(S1, 0)].memory)
    return job


def lose_and_notify(job: SimulatedJob, notice_s: float = 20) -> None:
    """Slice 0 is lost; while the job waits for it, slice 1 is announced to go."""
    job.kill_slice(S0, capacity_gone=True)
    job.run(0.1)
    assert job.ledger.stage is Stage.WAIT
    job.notify(S1, notice_s)


def test_what_a_waiting_survivor_holds_is_durable_before_it_is_let_go() -> None:
    job = training_job(on_loss="WaitThenShrink", wait_s=0.5, scale_up={"mode": "Never"})
    held = max(job.agents[HostId(S1, 0)].memory)
    assert job.committed < held
    lose_and_notify(job)
    job.run(0.5)
    assert job.ledger.stage is Stage.WAIT
    assert job.ledger.members == (1, 2)
    assert job.status.conditions[0].reason == Reason.PREEMPTION_NOTICE.value
    assert job.status.wait_until_s is not None
    assert job.status.wait_until_s <= job.now_s + 20
    while job.committed < held:
        assert job.agents[HostId(S1, 0)].is_alive
        job.run(0.1)
    job.run(2)
    assert job.training() == {2}
    assert job.ledger.incarnation == 2
    assert job.status.restarts.disruptions == 2
    assert job.status.restarts.failures == 0


def test_a_notice_to_a_survivor_does_not_end_the_wait_for_a_replacement() -> None:
    job = waiting_job()
    job.notify(S1, 20)
    job.run(8)
    assert job.ledger.stage is Stage.WAIT
    assert job.committed >= max(job.agents[HostId(S1, 0)].memory)
    job.run(14)
    assert job.ledger.members == (2,)
    for id_ in (S0, S1):
        job.give(id_)
    job.run(5)
    assert job.training() == {0, 1, 2}
    assert job.ledger.incarnation == 2
    assert job.status.restarts.disruptions == 2


def test_a_survivor_that_cannot_save_is_not_waited_for() -> None:
    job = training_job(on_loss="WaitThenShrink", wait_s=0.5, scale_up={"mode": "Never"})
    job.refuses_saves = True
    lose_and_notify(job, notice_s=600)
    job.run(3.5)
    assert job.training() == {2}


def test_a_survivor_that_does_not_answer_is_waited_for_until_its_budget_is_over() -> None:
    job = training_job(on_loss="WaitThenShrink", wait_s=0.5, scale_up={"mode": "Never"})
    for id_ in (S1, S2):
        job.agents[HostId(id_, 0)].is_deaf = True
    lose_and_notify(job, notice_s=600)
    job.run(5)
    assert job.ledger.stage is Stage.WAIT
    job.agents[HostId(S2, 0)].is_deaf = False
    job.run(3)
    assert job.training() == {2}


def test_a_notice_withdrawn_from_a_survivor_keeps_it() -> None:
    job = training_job(on_loss="WaitThenShrink", wait_s=0.5, scale_up={"mode": "Never"})
    lose_and_notify(job)
    job.run(0.3)
    job.withdraw(S1)
    job.run(2)
    assert job.training() == {1, 2}
    assert job.status.restarts.disruptions == 1


def test_under_the_policy_fail_a_survivor_that_has_to_leave_ends_the_job() -> None:
    job = training_job(on_loss="Fail")
    job.raise_in_worker(HostId(S0, 0))
    job.run(0.2)
    assert job.ledger.stage is Stage.WAIT
    job.notify(S1, 20)
    job.run(6)
    assert job.ledger.finish is not None
    assert job.ledger.finish.reason is Reason.LOSS_FORBIDDEN


def test_a_worker_that_ends_in_a_drain_does_not_cost_what_the_doomed_slice_holds() -> None:
    job = training_job(timing=Timing(hold_s=30), scale_up={"mode": "Never"})
    job.notify(S1, 40)
    job.run(0.5)
    held = max(job.agents[HostId(S1, 0)].memory)
    job.kill_worker(HostId(S2, 0))
    job.run(2.4)
    assert job.ledger.stage is Stage.WAIT
    assert job.agents[HostId(S1, 0)].is_alive
    job.run(3)
    assert job.committed >= held
    assert job.training() == {0, 2}
    assert job.status.restarts.disruptions == 1


def test_survivors_of_no_allowed_count_leave_with_the_doomed() -> None:
    job = training_job(desired=4, slices={"min": 1, "allowedCounts": [2, 4]})
    job.notify(S0, 20)
    job.run_pass()
    assert job.directive is not None
    assert job.directive.request is not None
    assert job.directive.request.doomed == (0, 3)
    job.run(3)
    assert job.training() == {1, 2}


def test_below_the_minimum_the_hold_is_durable() -> None:
    job = training_job(slices={"min": 3})
    job.notify(S1, 20)
    job.run(2)
    assert job.committed == job.status.checkpoint.last_committed.step  # type: ignore[union-attr]
    assert job.ledger.stage is Stage.WAIT
    assert job.directive is not None
    assert job.directive.command is Command.WAIT


def test_under_the_policy_fail_the_step_is_durable_before_the_job_fails() -> None:
    job = training_job(on_loss="Fail")
    step = job.step()
    job.notify(S1, 20)
    job.run(2)
    assert job.ledger.finish is not None
    assert job.ledger.finish.reason is Reason.LOSS_FORBIDDEN
    assert job.committed >= step


def test_a_step_held_late_by_a_consequence_is_still_taken() -> None:
    job = training_job(timing=Timing(hold_s=0.5))
    job.notify(S1, 20)
    job.run(0.2)
    agent = job.agents[HostId(S1, 0)]
    job.end_worker(agent, ExitCause.CONSEQUENCE, alone=True)
    job.run(4)
    assert job.training() == {0, 2}
    assert job.status.restarts.failures == 0
