"""The controller is killed at every line of every pass that decides something.

Each scenario is played once undisturbed. Then it is played again for every pass that had something
to persist or to do, and for every line of that pass: killed there, started again a second later.
The end is the same, and it takes no incarnation more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.core.ledger import Stage
from simulated_job import SimulatedJob

S0, S1, S2 = SliceId(0), SliceId(1), SliceId(2)
SECONDS = 9.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    training: frozenset[SliceId]
    incarnation: int
    stage: Stage
    failures: int
    disruptions: int
    rows: tuple[tuple[str, int, int], ...]
    is_removed: bool


def nothing(job: SimulatedJob) -> None:
    """Only the first start is played."""
    assert job.ledger.incarnation == 0


def notice(job: SimulatedJob) -> None:
    job.notify(S1, 20)


def two_notices(job: SimulatedJob) -> None:
    job.notify(S0, 20)
    job.notify(S1, 20)


def lost_slice(job: SimulatedJob) -> None:
    job.kill_slice(S0, capacity_gone=True)


def lost_host(job: SimulatedJob) -> None:
    job.kill_agent(HostId(S1, 0))


def killed_worker(job: SimulatedJob) -> None:
    job.kill_worker(HostId(S1, 0))


def exception(job: SimulatedJob) -> None:
    job.raise_in_worker(HostId(S1, 0))


def everything(job: SimulatedJob) -> None:
    for id_ in (S0, S1, S2):
        job.kill_slice(id_)


def suspension(job: SimulatedJob) -> None:
    job.respec(replace(job.spec, suspend=True))


def fewer(job: SimulatedJob) -> None:
    job.respec(replace(job.spec, slices=replace(job.spec.slices, desired=2, max=3)))


def deletion(job: SimulatedJob) -> None:
    job.is_deleting = True


SCENARIOS = (
    nothing,
    notice,
    two_notices,
    lost_slice,
    lost_host,
    killed_worker,
    exception,
    everything,
    suspension,
    fewer,
    deletion,
)


def play(
    scenario: Callable[[SimulatedJob], None], *, kill_at: tuple[int, int] | None
) -> tuple[Outcome, list[tuple[int, int]]]:
    """Play one scenario; return how it ended, and (pass, lines) of each pass that did something."""
    job = SimulatedJob(make_spec(on_loss="WaitThenShrink", wait_s=2))
    if scenario is not nothing:
        job.run(2)
    scenario(job)
    busy: list[tuple[int, int]] = []
    until_s, number, resumes_s = job.now_s + SECONDS, 0, 0.0
    while job.now_s < until_s and not job.is_removed:
        job.advance()
        if job.now_s < resumes_s:
            continue
        number += 1
        if kill_at is not None and number == kill_at[0]:
            job.run_pass(crash_after=kill_at[1])
            resumes_s = job.now_s + 1.0
            continue
        made = job.run_pass()
        if made is not None and (made.must_persist or made.actions):
            busy.append((number, len(made.actions)))
    outcome = Outcome(
        training=job.training(),
        incarnation=job.ledger.incarnation,
        stage=job.ledger.stage,
        failures=job.ledger.budgets.failures,
        disruptions=job.ledger.budgets.disruptions,
        rows=tuple((row.cause, row.from_slices, row.to_slices) for row in job.status.recoveries),
        is_removed=job.is_removed,
    )
    return outcome, busy


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_a_controller_killed_at_any_line_changes_nothing(
    scenario: Callable[[SimulatedJob], None],
) -> None:
    wanted, busy = play(scenario, kill_at=None)
    assert busy
    for number, actions in busy:
        for line in range(actions + 2):
            outcome, _ = play(scenario, kill_at=(number, line))
            assert outcome == wanted, f"killed in pass {number} after line {line}"
