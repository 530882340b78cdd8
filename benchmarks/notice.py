"""From a notice to the step held outside the doomed slice.

Bounded by one step (the members agree on the next boundary), the copy into the slots, and
protocol: the reach is one step + 1.3 × the copy + 100 ms. Both are measured in the same run: the
step from the job's own metrics, the copy as a plain one of as many bytes into touched memory.
"""

from __future__ import annotations

import itertools
import statistics
import time

import numpy as np

from benchmarks.figures import Arguments, Figure, compared, reaching
from benchmarks.slices import SliceJob, running_job

BYTES_PER_WIDTH = 2 * 4 * 17
"""Parameters and momentum of the tiny program: 16 inputs and 1 output for each hidden unit."""
WIDTHS = {"0.1 MiB": 1024, "9 MiB": 65536, "64 MiB": 493448}
PROTOCOL_S = 0.1


def run(arguments: Arguments) -> list[Figure]:
    count = 2 if arguments.quick else 7
    figures: list[Figure] = []
    for name, width in WIDTHS.items():
        if arguments.quick and width > 65536:
            continue
        environment = {
            "REDUCTION": "fast",
            "WIDTH": str(width),
            "BATCH": "12",
            "STEP_S": "0.1",
        }
        with running_job(environment, snapshot_every=1000) as job:
            measured = [_notice(job, n % job.slice_count) for n in range(count)]
        seconds = statistics.median(s for s, _ in measured)
        step_s = statistics.median(step for _, step in measured)
        bound_s = step_s + 1.3 * _copy_s(width * BYTES_PER_WIDTH) + PROTOCOL_S
        figure = compared(
            f"notice → held outside, {name} a host",
            seconds,
            "s",
            against="1 step + 1.3 × copy + 100 ms",
            against_value=bound_s,
        )
        figures.append(reaching(figure, "≤ 1", seconds <= bound_s))
    return figures


def _notice(job: SliceJob, slice_id: int) -> tuple[float, float]:
    """Seconds from the notice to the acknowledgement, and the median step before it."""
    job.run.read_metrics()
    recent = [job.run.lines[s].at_s for s in sorted(job.run.lines)[-12:]]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(recent))
    before = job.status()
    ids = {report.held.request_id for report in job.reports() if report.held is not None}
    at_s = job.give_notice(slice_id, 30.0)
    held: list[float] = []

    def is_held(_: object) -> bool:
        found = job.held_at_s(max(ids, default=None))
        if found is not None and found >= at_s:
            held.append(found)
        return bool(held)

    job.wait("the step held", is_held)
    job.wait_trained(before.incarnation + 1, job.slice_count - 1)
    job.kill_slice(slice_id)
    grown = job.status().incarnation + 1
    job.give_back(slice_id)
    job.wait_trained(grown, job.slice_count, steps=14)
    return held[0] - at_s, step_s


def _copy_s(size_bytes: int) -> float:
    """A plain copy into memory that was touched before."""
    source = np.ones(max(1, size_bytes // 4), np.float32)
    target = np.ones_like(source)
    taken: list[float] = []
    for _ in range(7):
        started_s = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - started_s)
    return statistics.median(taken)
