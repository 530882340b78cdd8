"""What a clean-up would delete, without deleting it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from everstep.runtime.checkpoint.clean import collectable
from everstep.runtime.checkpoint.retention import choose_dropped
from everstep.runtime.cli.opened import OpenedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """See `checkpoint.retention.RetentionRule`."""

    latest: int
    every_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    folder: str
    step: int | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanUp:
    kept: tuple[int, ...]
    deleted: tuple[Deleted, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_clean_up(run: OpenedRun, *, latest: int, every_steps: int | None, now_s: float) -> CleanUp:
    """What the run's own job would delete after its next commit, by these rules."""
    claim = run.ledger.newest_claim
    job_uid = claim.job_uid if claim is not None else None
    dropped = choose_dropped(
        run.commits, Rule(latest=latest, every_steps=every_steps), now_s, job_uid=job_uid
    )
    deleted = [
        Deleted(folder=commit.folder, step=commit.step, why="not kept by these rules")
        for commit in run.commits
        if commit.step in dropped
    ]
    if claim is not None:
        deleted.extend(
            Deleted(folder=found.folder, step=found.step, why=found.why)
            for found in collectable(run.ledger, run.store.list(""), claim)
        )
    kept = tuple(commit.step for commit in run.commits if commit.step not in dropped)
    return CleanUp(kept=kept, deleted=tuple(deleted))
