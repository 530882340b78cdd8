"""What can be known to fail before a state is copied."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from everstep.runtime.errors import ConfigurationError, StateRefused, StorageRefused
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.store import Store


def check_step(step: Any, least: int | None) -> None:
    """A step is a whole number, after the last that was saved and not before one restored."""
    is_whole = isinstance(step, int) and not isinstance(step, bool)
    if not is_whole or step < 0:
        raise ConfigurationError("step", step, "a whole number, 0 or more")
    if least is not None and step < least:
        raise ConfigurationError("step", step, f"{least} or more, after what was saved or restored")


def check_not_behind(step: int, ledger: RunLedger) -> None:
    """A program that has restored nothing does not go back behind what a run has reached."""
    newest = max((commit.step for commit in ledger.commits()), default=None)
    if newest is not None and step <= newest:
        raise ConfigurationError(
            "step",
            step,
            f"more than {newest}, the newest of this run; to go on from it or to go back, restore "
            "the step to go on from; to begin anew, take another folder",
        )


def check_not_behind_orbax(step: int, others: Sequence[int]) -> None:
    """Steps that Orbax wrote are in no ledger, so nothing of ours replaces them."""
    newest = max(others, default=-1)
    if step <= newest:
        raise ConfigurationError(
            "step", step, f"more than {newest}, the newest that Orbax wrote into this folder"
        )


def check_folder(store: Store, size_bytes: int) -> None:
    """Whether a local folder can be written, and has room for a step.

    Args:
        store: of the run.
        size_bytes: of the whole step, all processes together: they write to one file system.
    """
    location = store.location("space")
    if location.driver != "file":
        return
    folder = os.path.dirname(location.path.rstrip("/"))
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < size_bytes:
        raise StorageRefused(
            store.uri, f"{free_bytes} bytes free", f"{size_bytes} bytes for the step"
        )
    if found.f_flag & os.ST_RDONLY:
        raise StorageRefused(folder, "a read-only file system", "one that can be written")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageRefused(folder, "no permission to write", "a folder that this user may write")


def check_fence(ledger: RunLedger) -> None:
    """Raise `Fenced` when another program has taken the run. One question to storage."""
    if ledger.is_behind():
        ledger.verify_claim()


def json_of(metadata: Mapping[str, Any] | None) -> Any:
    """A copy of a step's metadata, as it will be read."""
    if metadata is None:
        return None
    try:
        return json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise StateRefused(
            "metadata", str(error), "a value that JSON holds; float(x) of a number in an array"
        ) from error
