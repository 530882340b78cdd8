"""Checkpoints of Orbax, for those above: which steps a folder has, and a reader for each item.

It never writes or deletes. Orbax has no ledger: a step is there when its folder has its final name,
or its marker where nothing can be renamed. Bytes of arrays have no checksum unless Orbax was told
to write one; `ForeignReader.is_verified` says which it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from everstep.controller.api.ids import Step
from everstep.runtime.errors import CheckpointInvalid, ConfigurationError, ManifestCorrupt
from everstep.runtime.storage.foreign_reader import ForeignReader
from everstep.runtime.storage.foreign_steps import (
    ForeignItem,
    ForeignRun,
    ForeignStep,
    ItemKind,
    refuse_item,
)
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.store import StorageMissing, Store


class ForeignCheckpoint:
    """One finished step of Orbax."""

    def __init__(self, run: ForeignRun, found: ForeignStep) -> None:
        self._run, self._found = run, found
        self.where = f"{run.store.uri}/{found.folder}"

    @property
    def step(self) -> Step:
        return self._found.step

    @property
    def committed_at_s(self) -> float | None:
        """Unix seconds; None when the step's files do not say."""
        return self._found.committed_at_s

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the user said of the step: Orbax's custom metadata and metrics, where there are."""
        both = {"custom_metadata": self._found.custom_metadata, "metrics": self._found.metrics}
        return {name: value for name, value in both.items() if value}

    @property
    def items(self) -> Mapping[str, ItemKind]:
        """What the step is made of, by Orbax's names."""
        return {name: item.kind for name, item in self._found.items.items()}

    def steps(self) -> tuple[Step, ...]:
        """All finished steps beside it, oldest first."""
        return self._run.steps()

    def kind(self, item: str) -> ItemKind | None:
        """Of an item; None when there is none of this name. `state` may be any only tree."""
        found = self._found.item(item)
        return found.kind if found is not None else None

    def reader(self, item: str = "state") -> ForeignReader:
        """Open a tree.

        Raises:
            ConfigurationError: there is no such item.
            CheckpointInvalid: it is in a form that is not read, or damaged.
            StorageUnavailable: storage did not answer.
        """
        return ForeignReader(self._run.store, self._found, self._named(item))

    def json(self, item: str) -> Any:
        """The value of a JSON item.

        Raises:
            as `reader`.
        """
        found = self._named(item)
        if found.kind is not ItemKind.JSON:
            raise refuse_item(self._run.store.uri, self._found, found)
        return self._decoded(found)

    def _decoded(self, item: ForeignItem) -> Any:
        path = f"{item.folder}/{item.json_file}"
        try:
            return json.loads(self._run.store.read(path))
        except StorageMissing as error:
            raise ManifestCorrupt(self.where, path, "a file", "nothing") from error
        except ValueError as error:
            raise ManifestCorrupt(self.where, path, "JSON", str(error)) from error

    def _named(self, item: str) -> ForeignItem:
        found = self._found.item(item)
        if found is None:
            have = ", ".join(self._found.items) or "none"
            raise ConfigurationError(f"item of step {self.step}", item, f"one of {have}")
        return found


def foreign_steps(place: str | Store) -> tuple[Step, ...]:
    """The finished steps that Orbax wrote into a folder; none when it never did.

    Raises:
        ConfigurationError: not an address, or one step is there twice.
        StorageUnavailable: storage did not answer.
    """
    return ForeignRun(_store(place)).steps()


def open_foreign(place: str | Store, step: int | None = None) -> ForeignCheckpoint:
    """Open a step that Orbax wrote.

    Args:
        place: the folder that a `CheckpointManager` was given, or that of one checkpoint.
        step: the newest when None.

    Raises:
        ConfigurationError: there is no such step; names those that are there.
        CheckpointInvalid: the step's own file is damaged.
        StorageUnavailable: storage did not answer.
    """
    run = ForeignRun(_store(place))
    steps = run.steps()
    wanted = steps[-1] if step is None and steps else step
    found = run.open(Step(wanted)) if wanted is not None else None
    if found is None:
        have = ", ".join(map(str, steps)) or "none"
        raise ConfigurationError("step", "newest" if step is None else step, f"one of {have}")
    return ForeignCheckpoint(run, found)


def is_foreign(place: str | Store) -> bool:
    """Whether Orbax has finished a step in a folder."""
    try:
        return bool(foreign_steps(place))
    except CheckpointInvalid:
        return True


def _store(place: str | Store) -> Store:
    return open_store(place) if isinstance(place, str) else place
