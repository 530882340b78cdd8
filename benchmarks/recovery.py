"""From a loss to the first finished step after it: killed workers, killed slices, notices.

Three slices of one host with one device each, the compile cache warm, the tiny program with about
9 MB of state. Beside it the same with fresh interpreters: the program starts a thread at import, so
that it cannot be forked. What is measured ends when the slowest host has finished the first step of
the next incarnation.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.figures import Arguments, Figure, compared, reaching
from benchmarks.slices import SliceJob, Unmeasured, running_job

PROGRAM = {"REDUCTION": "fast", "WIDTH": "65536", "BATCH": "12", "STEP_S": "0.02"}
SNAPSHOT_EVERY = 5
WORKER_S_MAX = 0.6
FRESH_RATIO_MAX = 1 / 3


@dataclass(slots=True)
class Sample:
    """What happened in one kind of loss."""

    seconds: list[float] = field(default_factory=list[float])
    lost_steps: list[int] = field(default_factory=list[int])
    failures: list[str] = field(default_factory=list[str])

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("nan")


def run(arguments: Arguments) -> list[Figure]:
    draw = random.Random(arguments.seed)
    count = 3 if arguments.quick else 20
    with running_job(PROGRAM, snapshot_every=SNAPSHOT_EVERY) as job:
        _warm_up(job)
        workers = _repeat(job, draw, count, _kill_worker)
        slices = _repeat(job, draw, count, _kill_slice)
        notices = _repeat(job, draw, count, _notice)
    with running_job(PROGRAM | {"FAULT": "thread-at-import"}, snapshot_every=SNAPSHOT_EVERY) as job:
        _warm_up(job)
        fresh = _repeat(job, draw, max(3, count // 2), _kill_worker)
    return _figures(workers, slices, notices, fresh)


def _figures(workers: Sample, slices: Sample, notices: Sample, fresh: Sample) -> list[Figure]:
    killed = Figure(name="worker killed → next step done, median", value=workers.median_s, unit="s")
    beside = compared(
        "worker killed, forked against fresh interpreter",
        workers.median_s,
        "s",
        against="fresh interpreter",
        against_value=fresh.median_s,
    )
    figures = [
        reaching(killed, f"≤ {WORKER_S_MAX} s", workers.median_s <= WORKER_S_MAX),
        reaching(beside, "≤ 1/3", (beside.ratio or 1.0) <= FRESH_RATIO_MAX),
        Figure(name="slice killed → next step done, median", value=slices.median_s, unit="s"),
        Figure(name="notice → next step done, median", value=notices.median_s, unit="s"),
    ]
    for name, sample in (("worker", workers), ("slice", slices), ("notice", notices)):
        if sample.seconds:
            slowest = Figure(name=f"{name}: slowest", value=max(sample.seconds), unit="s")
            figures.append(slowest)
    every = (workers, slices, notices)
    tried = sum(len(s.seconds) + len(s.failures) for s in every)
    bad = [f for s in every for f in s.failures]
    bad += [
        f"{n} steps lost" for s in (workers, slices) for n in s.lost_steps if n > SNAPSHOT_EVERY
    ]
    bad += [f"{n} steps lost in spite of a notice" for n in notices.lost_steps if n > 0]
    figures.append(
        reaching(
            Figure(name=f"hung or lost too much, of {tried}", value=len(bad), unit=""),
            "0" if not bad else f"0; first: {bad[0]}",
            not bad,
        )
    )
    return figures


def _warm_up(job: SliceJob) -> None:
    """Visit every slice count once, so that its programs are in the compile cache."""
    for _ in range(2):
        for slice_id in range(job.slice_count):
            _kill_slice(job, slice_id)
    _kill_worker(job, 0)


def _repeat(
    job: SliceJob,
    draw: random.Random,
    count: int,
    disturb: Callable[[SliceJob, int], tuple[float, int]],
) -> Sample:
    sample = Sample()
    for _ in range(count):
        slice_id = draw.randrange(job.slice_count)
        try:
            seconds, lost = disturb(job, slice_id)
        except Unmeasured as error:
            sample.failures.append(str(error))
            continue
        sample.seconds.append(seconds)
        sample.lost_steps.append(lost)
    return sample


def _kill_worker(job: SliceJob, slice_id: int) -> tuple[float, int]:
    before = job.status()
    return _measure(job, job.kill_worker(slice_id), before.incarnation, job.slice_count)


def _kill_slice(job: SliceJob, slice_id: int) -> tuple[float, int]:
    before = job.status()
    result = _measure(job, job.kill_slice(slice_id), before.incarnation, job.slice_count - 1)
    _grow_back(job, slice_id)
    return result


def _notice(job: SliceJob, slice_id: int) -> tuple[float, int]:
    before = job.status()
    at_s = job.give_notice(slice_id, 15.0)
    result = _measure(job, at_s, before.incarnation, job.slice_count - 1)
    job.kill_slice(slice_id)
    _grow_back(job, slice_id)
    return result


def _measure(job: SliceJob, at_s: float, before: int, slices: int) -> tuple[float, int]:
    status = job.wait_trained(before + 1, slices, steps=1)
    seconds = job.first_step_at_s(status.incarnation) - at_s
    since = [r for r in status.recoveries if r.incarnation > before]
    lost = sum(r.lost_steps or 0 for r in since)
    # Steps enough for a snapshot, so that the next loss finds one as a long run would.
    job.wait_trained(status.incarnation, slices, steps=SNAPSHOT_EVERY + 2)
    # Nor is a long run without its spare workers, which take a moment to get warm.
    job.wait_spares(slices)
    return seconds, lost


def _grow_back(job: SliceJob, slice_id: int) -> None:
    before = job.status().incarnation
    job.give_back(slice_id)
    job.wait_trained(before + 1, job.slice_count, steps=SNAPSHOT_EVERY + 2)
