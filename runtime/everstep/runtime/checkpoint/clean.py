"""Delete what is not needed any more. Only the holder of the newest claim does; a reader never."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.controller.api.ids import Step
from everstep.runtime.checkpoint.retention import KEPT_ALWAYS
from everstep.runtime.storage.history import Claim
from everstep.runtime.storage.ledger import FOLDER, RunLedger
from everstep.runtime.storage.store import Store

_DRAFT = re.compile(r"step-(\d{10,})-(\d{6,})-(\d+)")


def drop(store: Store, ledger: RunLedger, steps: Sequence[Step]) -> tuple[str, ...]:
    """Drop committed steps: first in the ledger, then their folders.

    Steps that no longer exist, or are among the newest, or were committed by another job, are
    left alone: what was chosen may be out of date by now.

    Returns:
        Folders that were deleted.

    Raises:
        Fenced: a newer incarnation has the run; nothing more is deleted.

    Durability: after a crash within, a step exists whole, or does not exist and a part of its
    folder is left for `collect`.
    """
    claim = ledger.verify_claim()
    deleted: list[str] = []
    for step in steps:
        commits = ledger.commits()
        chosen = [c for c in commits[:-KEPT_ALWAYS] if c.step == step]
        if not chosen or chosen[0].job_uid != claim.job_uid:
            continue
        ledger.append_dropped(step)
        store.delete_tree(chosen[0].folder)
        deleted.append(chosen[0].folder)
    return tuple(deleted)


def collect(store: Store, ledger: RunLedger) -> tuple[str, ...]:
    """Delete what killed writers and replaced commits have left.

    That is: drafts of earlier claims, folders of dropped steps, and own commits that this run
    replaced or has overtaken. Drafts of the own claim may be in use and stay (`discard`); nothing
    that does not look like a draft of ours is touched.

    Returns:
        Folders that were deleted.

    Raises:
        Fenced: a newer incarnation has the run; nothing is deleted.
    """
    claim = ledger.verify_claim()
    deleted: list[str] = []
    for found in collectable(ledger, store.list(""), claim):
        if found.is_superseded:
            ledger.append_dropped(found.step, found.folder)
        store.delete_tree(found.folder)
        deleted.append(found.folder)
    store.sweep(FOLDER)
    return tuple(deleted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectable:
    """A folder that no step needs."""

    folder: str
    step: Step
    why: str
    is_superseded: bool
    """The ledger still names it: it is dropped there before it is deleted."""


def collectable(ledger: RunLedger, names: Sequence[str], claim: Claim) -> tuple[Collectable, ...]:
    """What `collect` deletes in the name of a claim.

    Args:
        ledger: of the run, refreshed.
        names: of what lies in the run's folder.
        claim: the newest.
    """
    live = {commit.folder for commit in ledger.commits()}
    steps = {commit.step for commit in ledger.commits()}
    newest = max(steps, default=-1)
    superseded = {commit.folder: commit for commit in ledger.superseded()}
    dropped = ledger.dropped_folders()
    found: list[Collectable] = []
    for name in names:
        match = _DRAFT.fullmatch(name)
        if match is None or name in live:
            continue
        left = superseded.get(name)
        if left is not None:
            # Left behind by a run that went back: kept until this run has come as far.
            is_needless = left.step in steps or left.step <= newest
            if left.job_uid != claim.job_uid or not is_needless:
                continue
            why = "replaced by a later commit of this run"
        elif name in dropped:
            why = "its step was dropped"
        elif int(match[2]) < claim.number:
            why = "the draft of an incarnation that is over"
        else:
            continue
        found.append(
            Collectable(
                folder=name, step=Step(int(match[1])), why=why, is_superseded=left is not None
            )
        )
    return tuple(found)
