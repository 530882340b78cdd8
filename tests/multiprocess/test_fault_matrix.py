"""Real trainings killed and frozen at every stage, and the same parameters at the end.

Each test is one job in one shape, which suffers several losses in a row. After each one it must
train again before a deadline, one incarnation later for each incident, and at most a snapshot
interval back; at the end it must have the losses and the parameters of a run to which nothing
happened, and leave nothing behind. Together they cover, in pairs: 1 to 4 slices, 1 and 2 hosts,
both reductions, both ways to start a worker, a state that is replicated or sharded across slices,
each process as the victim, and each stage.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.reasons import Reason
from everstep.controller.api.status import JobStatus, Recovery
from everstep.controller.api.wire import HostPhase
from everstep.runtime.checkpoint.digest import digest_newest
from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.reader import CheckpointReader, read_leaf
from trained_job import CHECKPOINT_EVERY, SNAPSHOT_EVERY, STEPS, At, Missed, Shape, TrainedJob
from waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow]

FIRST_START = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a training ended with."""

    losses: dict[int, float]
    digests: dict[str, str]
    leaves: dict[str, Any]


def outcome_of(job: TrainedJob) -> Outcome:
    step, digests = digest_newest(job.uri)
    assert step == STEPS
    store = open_store(job.uri)
    reader = CheckpointReader(store, list_commits(store)[-1])
    leaves = {
        leaf.name: read_leaf(reader, index)
        for index, leaf in enumerate(reader.tree.leaves)
        if leaf.is_stored_as_bytes
    }
    return Outcome(losses=job.run.losses(), digests=digests, leaves=leaves)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Outcome:
    """One slice, two devices, and nothing happens to it."""
    shape = Shape(slices=1, devices=2)
    job = TrainedJob(tmp_path_factory.mktemp("undisturbed"), shape, compiled)
    job.hurry()
    try:
        job.apply()
        job.finish()
        found = outcome_of(job)
        job.assert_nothing_left()
    finally:
        job.close()
    return found


Play = Callable[[Shape], TrainedJob]


@pytest.fixture
def play(tmp_path: Path, compiled: Path) -> Generator[Play]:
    """Give a job of a shape, and end it whatever the test left."""
    jobs: list[TrainedJob] = []

    def make(shape: Shape) -> TrainedJob:
        job = TrainedJob(tmp_path / "job", shape, compiled)
        jobs.append(job)
        return job

    try:
        yield make
    finally:
        for job in jobs:
            job.close()
            assert not job.processes()


def judge_end(job: TrainedJob, expected: Outcome) -> None:
    job.finish()
    found = outcome_of(job)
    assert sorted(found.losses) == list(range(1, STEPS + 1))
    if job.shape.reduction == "ordered":
        assert job.run.conflicts == [], "a replayed step had another loss"
        assert found.losses == expected.losses
        assert found.digests == expected.digests
    else:
        assert found.leaves.keys() == expected.leaves.keys()
        for name, values in found.leaves.items():
            wanted = expected.leaves[name]
            np.testing.assert_allclose(values, wanted, rtol=2e-3, atol=2e-4, err_msg=name)
        steps = sorted(expected.losses)
        np.testing.assert_allclose(
            [found.losses[step] for step in steps],
            [expected.losses[step] for step in steps],
            rtol=1e-3,
        )
    job.assert_nothing_left()


def host(slice_id: int, number: int = 0) -> HostId:
    return HostId(SliceId(slice_id), number)


def kill(pid: int | None) -> None:
    assert pid is not None, "there is nothing to kill"
    os.kill(pid, signal.SIGKILL)


def freeze(pid: int | None) -> None:
    assert pid is not None, "there is nothing to freeze"
    os.kill(pid, signal.SIGSTOP)


@contextmanager
def survived(
    job: TrainedJob,
    *members: int,
    incidents: int = 1,
    lost_max: int = SNAPSHOT_EVERY,
    failures: int = 0,
    disruptions: int = 0,
) -> Generator[list[Recovery]]:
    """Whatever is done inside, the job trains on these slices afterwards, at no other price.

    Args:
        job: that trains.
        members: the slices that it must train on.
        incidents: by how many incarnations it may grow, exactly.
        lost_max: steps that one recovery may cost.
        failures: what the failure budget is charged with, exactly.
        disruptions: what the disruption budget is charged with, exactly.
    """
    before = job.status()
    recoveries: list[Recovery] = []
    yield recoveries
    after = job.wait_trained(members, before.incarnation + incidents)
    recoveries += job.recoveries_after(before.incarnation)
    said = [(r.incarnation, r.cause, r.lost_steps, r.source) for r in recoveries]
    assert after.incarnation == before.incarnation + incidents, said
    assert all((r.lost_steps or 0) <= lost_max for r in recoveries), said
    assert charged(before, after) == (failures, disruptions), said


def charged(before: JobStatus, after: JobStatus) -> tuple[int, int]:
    return (
        after.restarts.failures - before.restarts.failures,
        after.restarts.disruptions - before.restarts.disruptions,
    )


def disturb_recovery(
    job: TrainedJob, victim: HostId, stage: At, deed: Callable[[int], None]
) -> None:
    """Kill a worker, and catch the next one of that host in a stage of its start.

    That stage may be over before it can be caught; then the same is done once more.
    """
    members = range(job.shape.slices)
    for _ in range(5):
        before, old = job.status(), job.worker(victim)
        with survived(job, *members, incidents=2, failures=2):
            kill(old)
            try:
                with job.caught(victim, stage, other_than=old, timeout_s=20.0) as pid:
                    deed(pid)
                return_now = True
            except Missed:
                return_now = False
            if not return_now:
                # The kill alone is one incident.
                job.wait_trained(members, before.incarnation + 1)
                kill(job.worker(victim))
        if return_now:
            return
    raise Missed(f"{victim} was never caught {stage.value}")


def test_one_slice_of_two_hosts_forked(play: Play, undisturbed: Outcome) -> None:
    job = play(Shape(slices=1, hosts=2))
    job.apply()
    with job.caught_importing(host(0, 1)) as program:
        kill(program)
    job.wait_trained([0], FIRST_START)
    with (
        survived(job, 0, failures=1),
        job.caught(host(0, 1), At.COPYING) as worker,
    ):
        kill(worker)
    with survived(job, 0, failures=1), job.caught(host(0, 0), At.STEPPING) as worker:
        # Frozen, it is found by its lack of progress.
        wait_for(
            lambda: job.status().restarts.failures >= 2 or None,
            what="the frozen worker to be found",
            timeout_s=30,
        )
    job.wait_committed()
    # A slice is replaced as a unit: with its only one, all memory is gone.
    with (
        survived(job, 0, lost_max=2 * CHECKPOINT_EVERY, disruptions=1) as recoveries,
        job.caught(host(0, 1), At.STEPPING),
    ):
        job.wait_collective(host(0, 0), frozen=host(0, 1))
        kill(job.agent(host(0, 0)))
    assert recoveries[-1].source == "storage"
    judge_end(job, undisturbed)


def test_two_slices_in_fresh_interpreters(play: Play, undisturbed: Outcome) -> None:
    job = play(Shape(slices=2, is_forked=False))
    job.apply()
    job.wait_trained([0, 1], FIRST_START)
    assert all("threads" in str(job.reported(one).fork_refused) for one in job.all_hosts)
    job.wait_snapshot(host(0), SNAPSHOT_EVERY)
    with survived(job, 0, 1, disruptions=1), job.caught(host(1), At.STEPPING):
        freeze(job.agent(host(1)))
    disturb_recovery(job, host(0), At.COMPILING, kill)
    job.wait_committed()
    with survived(job, 0, 1, lost_max=2 * CHECKPOINT_EVERY, disruptions=2) as recoveries:
        with job.caught_writing() as draft:
            job.kill_slices(0, 1)
        job.give_back(0, 1)
    assert recoveries[-1].source == "storage"
    assert draft not in {commit.folder for commit in list_commits(open_store(job.uri))}
    judge_end(job, undisturbed)


def test_two_slices_of_two_hosts_with_replicas_of_a_sharded_state(
    play: Play, undisturbed: Outcome
) -> None:
    shape = Shape(slices=2, hosts=2, is_spread=True, replicas=1, on_loss="ShrinkImmediately")
    job = play(shape)
    job.apply()
    job.wait_trained([0, 1], FIRST_START)
    with (
        survived(job, 0, 1, disruptions=1) as recoveries,
        job.caught(host(1, 1), At.STEPPING),
    ):
        job.wait_collective(host(0, 0), frozen=host(1, 1))
        kill(job.coordinator(host(0, 0)))
    assert recoveries[-1].cause == "CoordinatorLost"
    with survived(job, 0, 1, failures=1), job.caught(host(0, 1), At.COPYING):
        kill(job.zygote(host(0, 1)))
    # A snapshot that the next ones overwrite before a partner has it is of no use to anybody.
    job.slow_down()
    replicated = job.wait_replicated([host(0, 0), host(0, 1)], after=job.status().step)
    # G3: what only slice 1 held is in the memory of slice 0 as well.
    with survived(job, 0, disruptions=1, lost_max=STEPS) as recoveries:
        job.kill_slices(1)
    assert (recoveries[-1].step_restored or 0) >= replicated
    assert recoveries[-1].source == "memory"
    assert recoveries[-1].storage_bytes == 0
    with survived(job, 0, 1, lost_max=0):
        job.give_back(1)
    judge_end(job, undisturbed)


def test_three_slices_with_a_sharded_state_and_no_replicas(
    play: Play, undisturbed: Outcome
) -> None:
    job = play(Shape(slices=3, is_spread=True, on_loss="ShrinkImmediately"))
    job.apply()
    job.wait_trained([0, 1, 2], FIRST_START)
    disturb_recovery(job, host(2), At.RESTORING, kill)
    # G2: what only the doomed slice holds moves to the others before the deadline.
    with survived(job, 1, 2, lost_max=0, disruptions=1) as recoveries:
        deadline_s = job.give_notice(0, 12.0)
    assert recoveries[-1].storage_bytes == 0
    assert recoveries[-1].peer_bytes > 0
    assert time.time() < deadline_s, "the notice was over before the others went on"
    wait_for(lambda: job.agent(host(0)) is None, what="slice 0 to be gone", timeout_s=30)
    job.give_back(0)
    job.wait_trained([0, 1, 2], recoveries[-1].incarnation + 1)
    job.wait_committed()
    # Without a notice its part of the state is nowhere but in storage, and that is said.
    with (
        survived(job, 0, 2, lost_max=2 * CHECKPOINT_EVERY, disruptions=1) as recoveries,
        job.caught(host(1), At.COPYING),
    ):
        job.kill_slices(1)
    assert recoveries[-1].storage_bytes > 0
    assert recoveries[-1].source in ("storage", "mixed")
    assert Reason.RESTORED_FROM_STORAGE.value in {event["reason"] for event in job.events()}
    judge_end(job, undisturbed)


def test_three_slices_with_the_fast_reduction(play: Play, undisturbed: Outcome) -> None:
    job = play(Shape(slices=3, reduction="fast"))
    job.apply()
    job.wait_trained([0, 1, 2], FIRST_START)
    with survived(job, 0, 1, 2, disruptions=1), job.caught(host(1), At.STEPPING):
        job.wait_collective(host(0), frozen=host(1))
        job.freeze_slice(0)
    disturb_recovery(job, host(1), At.CONNECTING, kill)
    # A notice while the recovery from a killed worker runs.
    with survived(job, 0, 1, 2, incidents=2, failures=1, disruptions=1):
        before, doomed = job.status().incarnation, job.agent(host(2))
        kill(job.worker(host(0)))
        job.wait_decided(before + 1)
        job.give_notice(2, 3.0)
        wait_for(lambda: job.agent(host(2)) != doomed, what="slice 2 to be gone")
        job.give_back(2)
    judge_end(job, undisturbed)


def test_two_slices_with_the_fast_reduction_in_fresh_interpreters(
    play: Play, undisturbed: Outcome
) -> None:
    job = play(Shape(slices=2, reduction="fast", is_forked=False))
    job.apply()
    job.wait_trained([0, 1], FIRST_START)
    with survived(job, 0, 1, failures=1), job.caught(host(1), At.STEPPING) as worker:
        job.wait_collective(host(0), frozen=host(1))
        kill(worker)
    judge_end(job, undisturbed)


def test_three_slices_of_two_hosts_frozen_while_importing_and_while_joining(
    play: Play, undisturbed: Outcome
) -> None:
    job = play(Shape(slices=3, hosts=2))
    job.apply()
    # A program that stands still for a while costs that while, and nothing else.
    with job.caught_importing(host(1, 1)):
        wait_for(
            lambda: (said := job.report(host(0))) and said.phase is HostPhase.RESTORING,
            what="the others to begin",
            timeout_s=40,
        )
    first = job.wait_trained([0, 1, 2], FIRST_START)
    assert (first.incarnation, first.restarts.failures, first.restarts.disruptions) == (1, 0, 0)
    job.wait_snapshot(host(0), SNAPSHOT_EVERY)
    # An agent that stands still in a join holds it up until it is found silent.
    with (
        survived(job, 0, 1, 2, incidents=2, failures=1, disruptions=1),
        job.caught_joining(host(2), held_up_by=host(1, 1)) as agent,
    ):
        wait_for(
            lambda: job.agent(host(2)) not in (None, agent),
            what="the slice of the frozen agent to be replaced",
            timeout_s=40,
        )
    judge_end(job, undisturbed)


def test_four_slices_of_two_hosts(play: Play, undisturbed: Outcome) -> None:
    job = play(Shape(slices=4, hosts=2, on_loss="ShrinkImmediately"))
    job.apply()
    job.wait_trained([0, 1, 2, 3], FIRST_START)
    job.wait_snapshot(host(3, 1), SNAPSHOT_EVERY)
    with survived(job, 0, 1, 2, 3, failures=1), job.caught(host(2, 1), At.COPYING) as worker:
        kill(worker)
    # One host of the lead's slice: the slice goes as a whole.
    with survived(job, 1, 2, 3, disruptions=1), job.caught(host(0, 1), At.STEPPING):
        kill(job.agent(host(0, 1)))
        job.kill_slices(0)
    before = job.status().incarnation
    job.give_back(0)
    job.wait_trained([0, 1, 2, 3], before + 1)
    assert all(r.lost_steps == 0 for r in job.recoveries_after(before))
    judge_end(job, undisturbed)


def test_four_slices_that_shrink_to_one_and_grow(play: Play, undisturbed: Outcome) -> None:
    job = play(Shape(slices=4, on_loss="ShrinkImmediately"))
    job.apply()
    job.wait_trained([0, 1, 2, 3], FIRST_START)
    # A coordinator that stands still is in nobody's way, and gone with its incarnation.
    frozen = job.coordinator(host(0))
    freeze(frozen)
    with survived(job, 0, 1, 2, 3, failures=1):
        kill(job.worker(host(3)))
    wait_for(lambda: not Path(f"/proc/{frozen}").exists(), what="the frozen coordinator's end")
    job.wait_snapshot(host(3), SNAPSHOT_EVERY)
    # The lead, its coordinator and another one at once, and one more while that recovery runs.
    with survived(job, 3, incidents=2, disruptions=3):
        before = job.status().incarnation
        with job.caught(host(3), At.COPYING), job.unseen():
            job.kill_slices(0, 2)
        job.wait_decided(before + 1)
        job.kill_slices(1)
    before = job.status().incarnation
    job.give_back(0, 1, 2)
    after = job.wait_trained([0, 1, 2, 3], before + 1)
    assert all(r.lost_steps == 0 for r in job.recoveries_after(before)), after.recoveries
    judge_end(job, undisturbed)
