"""Which committed steps may go. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from everstep.controller.api.ids import Step
from everstep.runtime.storage.history import Commit

KEPT_ALWAYS = 2
"""So many of the newest commits stay, whatever is asked: when the newest turns out to be damaged
there is one more."""


class RetentionRule(Protocol):
    @property
    def latest(self) -> int:
        """Keep so many of the newest."""
        ...

    @property
    def every_steps(self) -> int | None:
        """Keep every step that is a multiple of this, for ever."""
        ...


def choose_dropped(
    commits: Sequence[Commit],
    retention: RetentionRule,
    now_s: float,
    *,
    job_uid: str | None = None,
) -> tuple[Step, ...]:
    """The steps to drop, oldest first.

    Args:
        commits: the steps that exist, newest last. A draft is not among them, so it neither counts
            nor goes.
        retention: a step stays when any of its rules wants it.
        now_s: Unix seconds; for rules of age, of which there are none yet.
        job_uid: the job that asks; what other jobs committed is not its to drop.
    """
    del now_s
    newest = {commit.step for commit in commits[-max(retention.latest, KEPT_ALWAYS) :]}
    every = retention.every_steps
    return tuple(
        commit.step
        for commit in commits
        if commit.step not in newest
        and not (every and commit.step % every == 0)
        and job_uid in (None, commit.job_uid)
    )
