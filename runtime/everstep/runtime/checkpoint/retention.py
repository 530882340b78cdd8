"""Which committed steps may go. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from everstep.controller.api.ids import Step
from everstep.runtime.storage.history import Commit

KEPT_ALWAYS = 2
"""So many of the newest commits stay, whatever is asked: when the newest turns out to be damaged
there is one more."""


METADATA = "metadata"
"""Key of `Commit.extra` under which a step's metadata lies, as JSON."""


class RetentionRule(Protocol):
    @property
    def latest(self) -> int:
        """Keep so many of the newest."""
        ...

    @property
    def every_steps(self) -> int | None:
        """Keep every step that is a multiple of this, for ever."""
        ...


class WiderRule(RetentionRule, Protocol):
    """Rules that a program on its own may have; a job has those above."""

    @property
    def every_seconds(self) -> float | None:
        """Keep one step of every so many seconds, the first of each, for ever."""
        ...

    @property
    def best(self) -> int:
        """Keep so many of the steps with the best `metric`."""
        ...

    @property
    def metric(self) -> str:
        """Name of a number in the step's metadata."""
        ...

    @property
    def mode(self) -> str:
        """`min` or `max`: which is better."""
        ...


def choose_dropped(
    commits: Sequence[Commit],
    retention: RetentionRule | WiderRule,
    now_s: float,
    *,
    job_uid: str | None = None,
) -> tuple[Step, ...]:
    """The steps to drop, oldest first.

    Args:
        commits: the steps that exist, newest last. A draft is not among them, so it neither counts
            nor goes.
        retention: a step stays when any of its rules wants it.
        now_s: Unix seconds. Times of the commits alone decide, so a clock that jumps drops nothing.
        job_uid: the job that asks; what other jobs committed is not its to drop.
    """
    del now_s
    kept = {commit.step for commit in commits[-max(retention.latest, KEPT_ALWAYS) :]}
    every = retention.every_steps
    kept |= {commit.step for commit in commits if every and commit.step % every == 0}
    seconds: float | None = getattr(retention, "every_seconds", None)
    if seconds:
        kept |= _first_of_each(commits, seconds)
    best: int = getattr(retention, "best", 0)
    if best:
        kept |= _best(
            commits, best, getattr(retention, "metric", ""), getattr(retention, "mode", "")
        )
    return tuple(
        commit.step
        for commit in commits
        if commit.step not in kept and job_uid in (None, commit.job_uid)
    )


def _first_of_each(commits: Sequence[Commit], seconds: float) -> set[Step]:
    """The first step, and each that is committed so many seconds after the last one kept."""
    kept: set[Step] = set()
    last_s: float | None = None
    for commit in commits:
        if last_s is None or not last_s <= commit.committed_at_s < last_s + seconds:
            kept.add(commit.step)
            last_s = commit.committed_at_s
    return kept


def _best(commits: Sequence[Commit], count: int, metric: str, mode: str) -> set[Step]:
    """Steps with the best numbers; one without the number, or with none that compares, is none."""
    measured = [
        (value, commit.step) for commit in commits if (value := _number(commit, metric)) is not None
    ]
    # At an equal number the newer step is the better one.
    sign = -1.0 if mode == "max" else 1.0
    measured.sort(key=lambda pair: (sign * pair[0], -pair[1]))
    return {step for _, step in measured[:count]}


def _number(commit: Commit, metric: str) -> float | None:
    try:
        found = msgspec.json.decode(commit.extra.get(METADATA, "null"))
    except msgspec.DecodeError:
        return None
    value = found.get(metric) if isinstance(found, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)
