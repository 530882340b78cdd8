"""Delete what is not needed any more. Only the holder of the newest claim does; a reader never."""

from __future__ import annotations

import re
from collections.abc import Sequence

from everstep.controller.api.ids import Step
from everstep.runtime.checkpoint.retention import KEPT_ALWAYS
from everstep.runtime.errors import check
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
    live = {commit.folder: commit for commit in ledger.commits()}
    steps = {commit.step for commit in live.values()}
    newest = max(steps, default=-1)
    superseded = {commit.folder: commit for commit in ledger.superseded()}
    dropped = ledger.dropped_folders()
    deleted: list[str] = []
    for name in store.list(""):
        match = _DRAFT.fullmatch(name)
        if match is None or name in live:
            continue
        left = superseded.get(name)
        if left is not None:
            # Left behind by a run that went back: kept until this run has come as far.
            is_needless = left.step in steps or left.step <= newest
            if left.job_uid != claim.job_uid or not is_needless:
                continue
            ledger.append_dropped(left.step, left.folder)
        elif name not in dropped and int(match[2]) >= claim.number:
            continue
        check(name not in live, f"{name} is collected and exists")
        store.delete_tree(name)
        deleted.append(name)
    store.sweep(FOLDER)
    return tuple(deleted)
