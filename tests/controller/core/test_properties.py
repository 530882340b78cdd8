"""Properties of the small decisions, for any numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.core.ledger import Stage
from everstep.controller.core.model import EmitEvent, StopSlice, WriteDirective
from everstep.controller.core.policy import largest_allowed
from simulated_job import SimulatedJob

S0, S1, S2 = SliceId(0), SliceId(1), SliceId(2)

# Each example plays seconds of virtual time; how long that takes says nothing.
plays = settings(deadline=None, max_examples=25)


def training_job(*, desired: int = 3, **spec: Any) -> SimulatedJob:
    job = SimulatedJob(make_spec(desired=desired, **spec))
    job.run(2, tick_s=0.2)
    assert job.ledger.stage is Stage.RUN
    return job


@plays
@given(
    desired=st.integers(1, 16),
    low=st.integers(1, 16),
    counts=st.none() | st.sets(st.integers(1, 16), min_size=1),
    at_most=st.integers(0, 20),
)
def test_the_chosen_count_is_the_largest_allowed_one(
    desired: int, low: int, counts: set[int] | None, at_most: int
) -> None:
    assume(low <= desired)
    slices = make_spec(desired=desired, slices={"min": low}).slices
    if counts is not None:
        slices = replace(slices, allowed_counts=tuple(sorted(counts)))
    chosen = largest_allowed(slices, at_most)
    candidates = [n for n in range(1, min(at_most, desired) + 1) if slices.allows(n)]
    assert chosen == max(candidates, default=None)


@plays
@given(notice_s=st.floats(-60, 1e7), budget_s=st.floats(1, 100), margin_share=st.floats(0, 0.9))
def test_a_drain_ends_before_its_notice_and_never_waits_absurdly(
    notice_s: float, budget_s: float, margin_share: float
) -> None:
    """(5): whatever the clock of the notice says."""
    emergency = {"budgetSeconds": budget_s, "safetyMarginSeconds": margin_share * budget_s}
    checkpoint = {"uri": "/tmp/job", "everySteps": 20, "emergency": emergency}
    job = training_job(checkpoint=checkpoint)
    job.notify(S1, notice_s)
    job.run_pass()
    incident = job.ledger.incident
    if incident is None:
        assert notice_s < 1e-6
        assert job.ledger.incarnation == 2
        return
    assert incident.deadline_s <= job.notices[S1].deadline_s
    left_s = incident.deadline_s - job.now_s
    assert 0 < left_s <= max(budget_s, 20.0) + 1e-6
    assert left_s >= min(0.75 * notice_s, budget_s) - 1e-6


@plays
@given(order=st.permutations([S0, S1, S2]), gap_s=st.sampled_from([0.0, 0.1, 0.3]))
def test_losses_in_any_order_cost_one_incarnation_each_at_most(
    order: list[SliceId], gap_s: float
) -> None:
    """(3): never more incarnations than incidents."""
    job = training_job()
    for id_ in order[:2]:
        job.kill_slice(id_, capacity_gone=True)
        if gap_s:
            job.run(gap_s)
    job.run(3)
    assert job.training() == {order[2]}
    assert 2 <= job.ledger.incarnation <= 3
    assert job.ledger.budgets.failures == 0
    assert job.ledger.budgets.disruptions == 2


@plays
@given(worker_first_s=st.sampled_from([0.1, 0.2, 0.5, 0.9]), id_=st.sampled_from([S0, S1, S2]))
def test_a_slice_that_dies_piece_by_piece_is_one_disruption(
    worker_first_s: float, id_: SliceId
) -> None:
    """(4), G10: its worker first, its agent a little later."""
    job = training_job(restart={"maxRestarts": 1})
    job.kill_worker(HostId(id_, 0))
    job.run(worker_first_s)
    job.kill_slice(id_, capacity_gone=True)
    job.run(4)
    assert job.training() == {S0, S1, S2} - {id_}
    assert (job.ledger.budgets.failures, job.ledger.budgets.disruptions) == (0, 1)


@plays
@given(count=st.integers(2, 6), silent=st.integers(1, 6))
def test_a_silence_is_an_outage_only_of_a_majority_of_at_least_two(count: int, silent: int) -> None:
    """(6)."""
    assume(silent <= count)
    job = training_job(desired=count)
    for id_ in range(silent):
        job.freeze(SliceId(id_))
    job.run(4.5, tick_s=0.3)
    is_outage = silent >= 2 and 2 * silent > count
    assert (job.ledger.outage_since_s is not None) == is_outage
    assert (job.ledger.incarnation == 1) == is_outage


@settings(deadline=None, max_examples=8)
@given(
    limit=st.integers(1, 6),
    every_s=st.sampled_from([20.0, 60.0, 90.0]),
    policy=st.sampled_from(["WaitForReplacement", "WaitThenShrink", "ShrinkImmediately"]),
    lost=st.lists(st.sampled_from([S0, S1, S2]), min_size=3, max_size=8),
)
def test_however_often_slices_are_lost_a_job_changes_a_bounded_number_of_times(
    limit: int, every_s: float, policy: str, lost: list[SliceId]
) -> None:
    """(9): and it never fails for it, and trains again when the storm is over."""
    timeouts = {"reportSeconds": 5}
    job = training_job(on_loss=policy, restart={"maxDisruptionsPerHour": limit}, timeouts=timeouts)
    for round_ in range(int(1800 / every_s)):
        job.kill_slice(lost[round_ % len(lost)])
        job.run(every_s, tick_s=1.0)
    # Each disruption may cost a loss and a growth; in the storm the job only gets smaller.
    assert job.ledger.incarnation <= 1 + 2 * limit + job.spec.slices.desired
    assert job.ledger.finish is None
    job.run(2, tick_s=1.0)
    job.now_s += 3600
    job.run(90, tick_s=0.5)
    assert job.training() == {S0, S1, S2}


@plays
@given(steps=st.integers(1, 15), after_s=st.floats(0, 50))
def test_nothing_changes_a_finished_job(steps: int, after_s: float) -> None:
    """(8)."""
    job = SimulatedJob(make_spec(), steps_total=steps)
    job.run(9, tick_s=0.3)
    before = job.ledger
    assert before.stage is Stage.FINISHED
    job.now_s += after_s
    job.agents.clear()
    for id_ in (S0, S1):
        job.take(id_)
    made = job.run_pass()
    assert made is not None
    assert made.ledger == before
    assert not [one for one in made.actions if not isinstance(one, EmitEvent)]


@plays
@given(hosts=st.integers(1, 3), lost=st.integers(0, 2))
def test_a_slice_is_replaced_as_a_unit(hosts: int, lost: int) -> None:
    """(2): its other hosts are stopped before any of it is started again."""
    assume(lost < hosts)
    job = training_job(hosts=hosts, on_loss="WaitForReplacement")
    old = {agent.pid for host, agent in job.agents.items() if host.slice == S1}
    job.kill_agent(HostId(S1, lost))
    job.performed.clear()
    job.run(4)
    assert job.training() == {0, 1, 2}
    new = {agent.pid for host, agent in job.agents.items() if host.slice == S1}
    assert not old & new
    stops = [one for one in job.performed if isinstance(one, StopSlice)]
    assert bool(stops) == (hosts > 1)


@plays
@given(st.data())
def test_directives_only_ever_get_newer(data: st.DataObject) -> None:
    """(1): numbers that agents saw never come again, even if the file is lost."""
    job = training_job()
    for _ in range(4):
        match data.draw(st.sampled_from(["kill", "lose file", "notice", "back"])):
            case "kill":
                job.kill_worker(HostId(S0, 0))
            case "lose file":
                job.directive = None
            case "notice":
                job.notify(S1, 5)
            case _:
                job.give(S1)
        job.run(1, tick_s=0.2)
    written = [one.directive for one in job.performed if isinstance(one, WriteDirective)]
    sequences = [one.sequence for one in written]
    assert sequences == sorted(set(sequences))
    incarnations = [one.incarnation for one in written]
    assert incarnations == sorted(incarnations)
