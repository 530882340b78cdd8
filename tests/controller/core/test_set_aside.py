"""A step that crashes whoever restores it is set aside; nothing else ever is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.status import Phase
from everstep.controller.api.wire import ExitCause
from simulated_job import SimulatedJob, Worker

S0, S1, S2 = SliceId(0), SliceId(1), SliceId(2)
COMMITTED = 20
Deed = Callable[[SimulatedJob], None]


def committed_job(*, max_restarts: int = 50) -> SimulatedJob:
    """Return a job that trains, with a committed step and one that only memory holds."""
    job = SimulatedJob(make_spec(restart={"maxRestarts": max_restarts}))
    while job.step() <= COMMITTED + 3:
        job.run(0.5)
    assert job.committed == COMMITTED
    return job


def ends(cause: ExitCause, signal: int | None = None, *, before_main: bool = False) -> Deed:
    def deed(job: SimulatedJob) -> None:
        one = job.agents[HostId(S1, 0)]
        job.end_worker(one, cause, signal=signal, message="words", before_main=before_main)

    return deed


def strike_restored(job: SimulatedJob, deed: Deed, *, times: int, limit_s: float = 300) -> None:
    """Let the job recover again and again; each time do it before the first new step."""
    struck: set[int] = set()
    until_s = job.now_s + limit_s
    while len(struck) < times and job.now_s < until_s and job.status.phase is not Phase.FAILED:
        job.advance(0.05)
        now = [one for one in job.agents.values() if one.is_alive]
        n = job.ledger.incarnation
        restored = all(
            one.incarnation == n
            and one.worker in (Worker.RESTORING, Worker.TRAINING)
            and one.restore is not None
            and one.step == one.restore.step > 0
            for one in now
        )
        if restored and len(now) == 3 and n not in struck:
            struck.add(n)
            deed(job)
        job.run_pass()
    assert struck


OWN_DOING = {
    "raises": ends(ExitCause.USER_ERROR),
    "exits": ends(ExitCause.EXITED_EARLY),
    "SIGSEGV": ends(ExitCause.SIGNALED, 11),
    "SIGBUS": ends(ExitCause.SIGNALED, 7),
    "SIGILL": ends(ExitCause.SIGNALED, 4),
    "SIGFPE": ends(ExitCause.SIGNALED, 8),
    "SIGABRT alone": ends(ExitCause.SIGNALED, 6),
    "SIGABRT as one of several": ends(ExitCause.CONSEQUENCE, 6),
}

NOT_ITS_DOING = {
    "SIGKILL": ends(ExitCause.SIGNALED, 9),
    "SIGTERM": ends(ExitCause.SIGNALED, 15),
    "SIGINT": ends(ExitCause.SIGNALED, 2),
    "hangs": ends(ExitCause.HUNG),
    "does not come up": ends(ExitCause.STARTUP_FAILED),
    "collective error": ends(ExitCause.CONSEQUENCE),
    "raises before main": ends(ExitCause.USER_ERROR, before_main=True),
    "agent killed": lambda job: job.kill_agent(HostId(S1, 0)),
    "lead killed": lambda job: job.kill_agent(HostId(S0, 0)),
}


@pytest.mark.parametrize("how", OWN_DOING)
def test_a_worker_that_ends_by_itself_twice_right_after_a_restore_sets_the_step_aside(
    how: str,
) -> None:
    job = committed_job()
    job.kill_worker(HostId(S2, 0))
    strike_restored(job, OWN_DOING[how], times=1)
    assert list(job.ledger.restore_set_aside) == []
    step = job.restores[job.ledger.incarnation][1]
    strike_restored(job, OWN_DOING[how], times=1)
    job.run(3)
    assert list(job.ledger.restore_set_aside) == [step]
    assert f"event/set-aside-{step}" in job.events
    job.run(30)
    assert job.training() == {0, 1, 2}


@pytest.mark.parametrize("how", NOT_ITS_DOING)
def test_what_the_step_cannot_have_caused_never_sets_it_aside(how: str) -> None:
    job = committed_job()
    job.kill_worker(HostId(S2, 0))
    strike_restored(job, NOT_ITS_DOING[how], times=6)
    job.run(5)
    assert list(job.ledger.restore_set_aside) == []
    assert job.ledger.crash is None


def test_an_exception_beside_a_killed_worker_says_nothing_about_the_step() -> None:
    def deed(job: SimulatedJob) -> None:
        # Its own agent is the quicker one to see it.
        first, killed = job.agents[HostId(S0, 0)], job.agents[HostId(S1, 0)]
        job.end_worker(first, ExitCause.USER_ERROR, message="ConnectionError", alone=True)
        job.end_worker(killed, ExitCause.SIGNALED, signal=9)

    job = committed_job()
    job.kill_worker(HostId(S2, 0))
    strike_restored(job, deed, times=4)
    assert list(job.ledger.restore_set_aside) == []


def test_a_crash_that_a_lost_slice_explains_a_moment_later_is_not_counted() -> None:
    job = committed_job()
    job.kill_worker(HostId(S2, 0))
    for _ in range(4):
        strike_restored(job, ends(ExitCause.USER_ERROR), times=1)
        job.kill_slice(S1)
        job.run(0.3)
    assert job.status.restarts.disruptions >= 4
    assert list(job.ledger.restore_set_aside) == []


def test_a_step_that_was_trained_on_from_is_counted_anew() -> None:
    job = committed_job()
    for _ in range(3):
        for agent in job.agents.values():
            agent.memory = set()
        job.kill_worker(HostId(S2, 0))
        strike_restored(job, ends(ExitCause.USER_ERROR), times=1)
        job.advance()
        job.run_pass()
        assert job.ledger.crash is not None
        restored = job.ledger.crash.step
        job.run_pass()
        while not (job.training() and job.step() == restored + 1):
            if job.training():
                # Nobody looks while it finishes a step; then it is killed.
                job.advance()
            else:
                job.run(0.1)
        job.kill_worker(HostId(S1, 0))
        job.advance()
        job.run_pass()
        assert job.ledger.crash is None
    assert list(job.ledger.restore_set_aside) == []


def test_when_every_step_is_set_aside_the_newest_is_tried_again_and_never_zero() -> None:
    job = committed_job()
    for agent in job.agents.values():
        agent.memory = set()
    job.kill_worker(HostId(S2, 0))
    strike_restored(job, ends(ExitCause.USER_ERROR), times=4)
    assert list(job.ledger.restore_set_aside) == [COMMITTED]
    assert all(step == COMMITTED for _, step in list(job.restores.values())[1:])
    job.run(40)
    assert job.training() == {0, 1, 2}
    # It trained on: the step was not to blame.
    assert list(job.ledger.restore_set_aside) == []


def test_a_step_that_crashes_for_ever_ends_the_job_by_its_budget() -> None:
    job = committed_job(max_restarts=5)
    for agent in job.agents.values():
        agent.memory = set()
    job.kill_worker(HostId(S2, 0))
    strike_restored(job, ends(ExitCause.USER_ERROR), times=50)
    assert job.status.phase is Phase.FAILED
    assert "words" in job.status.message
    assert list(job.ledger.restore_set_aside) == [COMMITTED]


KILLS = st.tuples(
    st.sampled_from(["worker", "agent", "slice"]), st.integers(0, 2), st.integers(1, 12)
)


@settings(max_examples=25, deadline=None)
@given(st.lists(KILLS, min_size=1, max_size=12))
def test_no_row_of_kills_from_outside_costs_a_committed_step(
    kills: list[tuple[str, int, int]],
) -> None:
    job = committed_job()
    for what, index, ticks in kills:
        host = HostId(SliceId(index), 0)
        if host in job.agents:
            match what:
                case "worker":
                    job.kill_worker(host)
                case "agent":
                    job.kill_agent(host)
                case _:
                    job.kill_slice(host.slice)
        job.run(ticks * 0.1)
        assert list(job.ledger.restore_set_aside) == []
    job.run(40)
    assert job.training() == {0, 1, 2}
    assert all(step >= COMMITTED for _, step in list(job.restores.values())[1:])
