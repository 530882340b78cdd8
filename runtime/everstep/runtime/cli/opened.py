"""A run as the command line sees it: steps, and a reader for each item of a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.checkpoint.foreign import foreign_steps, open_foreign
from everstep.runtime.errors import CheckpointInvalid, ConfigurationError
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.dtypes import itemsize
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import Leaf, TreeSpec
from everstep.runtime.storage.foreign_steps import ItemKind
from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.manifest import PYTREE
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.reader import CheckpointReader, read_item_file, read_manifest
from everstep.runtime.storage.store import Store

READ_BYTES = 64 << 20
"""So much of a leaf is read at once."""


class ItemReader(Protocol):
    """What is asked of one item of a step: `CheckpointReader` and `ForeignReader` have it."""

    @property
    def tree(self) -> TreeSpec: ...
    @property
    def extra(self) -> Mapping[str, str]: ...
    @property
    def chunks(self) -> Mapping[int, tuple[int, ...]]: ...

    def read_many(self, reads: Sequence[tuple[Region, NDArray[Any]]]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedStep:
    """A step whose small files were verified."""

    step: Step
    commit: Commit
    items: Mapping[str, ItemReader]
    """Those of arrays."""
    others: Mapping[str, tuple[str, ...]]
    """The files of the rest."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.items, *self.others)

    @property
    def size_bytes(self) -> int:
        return sum(tree_bytes(reader.tree) for reader in self.items.values())

    @property
    def leaves(self) -> int:
        return sum(len(reader.tree.leaves) for reader in self.items.values())


class OpenedRun:
    """The steps of a folder or bucket, also while a job writes to it."""

    def __init__(self, uri: str) -> None:
        """Read the ledger.

        Raises:
            ConfigurationError: not an address, or nothing is there.
            ManifestCorrupt: the ledger cannot be read.
            StorageUnavailable: storage did not answer.
        """
        self.uri = absolute(uri)
        self.store = open_store(self.uri)
        self.ledger = RunLedger(self.store)
        self.ledger.refresh()
        self.commits = self.ledger.commits()
        self.is_foreign = self.ledger.newest_claim is None
        """Orbax wrote it: there is no ledger, and a step is there when its folder is finished."""
        if self.is_foreign:
            self.commits = tuple(_foreign_commits(self.store))
        if not self.commits and self.is_foreign:
            raise ConfigurationError(
                "URI", uri, "a folder or bucket with checkpoints; this one has none"
            )

    def commit(self, step: int | None) -> Commit:
        """The commit of a step, of the newest when None."""
        if not self.commits:
            raise ConfigurationError("URI", self.uri, "a run with a committed step")
        if step is None:
            return self.commits[-1]
        for found in self.commits:
            if found.step == step:
                return found
        have = ", ".join(str(c.step) for c in self.commits)
        raise ConfigurationError("--step", step, f"one of {have}")

    def open(self, commit: Commit) -> OpenedStep:
        """Open a step.

        Raises:
            CheckpointInvalid: a small file is missing or altered.
        """
        if self.is_foreign:
            return _open_foreign(self.store, commit)
        manifest = read_manifest(self.store, commit)
        items: dict[str, ItemReader] = {
            name: CheckpointReader(self.store, commit, name)
            for name, item in manifest.items.items()
            if item.handler == PYTREE
        }
        others = {
            name: item.files for name, item in manifest.items.items() if item.handler != PYTREE
        }
        for name, files in others.items():
            for file in files:
                read_item_file(self.store, commit, manifest, name, file)
        return OpenedStep(step=commit.step, commit=commit, items=items, others=others)

    def opened(self) -> Iterator[tuple[Commit, OpenedStep | CheckpointInvalid]]:
        """All steps, oldest first; a damaged one as its error."""
        for commit in self.commits:
            try:
                yield commit, self.open(commit)
            except CheckpointInvalid as error:
                yield commit, error


def _foreign_commits(store: Store) -> Iterator[Commit]:
    for step in foreign_steps(store):
        found = open_foreign(store, step)
        notes = {name: json.dumps(value) for name, value in found.metadata.items()}
        yield Commit(
            step=step,
            incarnation=Incarnation(0),
            folder=found.where.removeprefix(f"{store.uri}/"),
            digest="",
            committed_at_s=found.committed_at_s or 0.0,
            extra=notes,
            number=0,
            claim=0,
            job_uid="orbax",
        )


def _open_foreign(store: Store, commit: Commit) -> OpenedStep:
    found = open_foreign(store, commit.step)
    trees = [name for name, kind in found.items.items() if kind is ItemKind.TREE]
    items: dict[str, ItemReader] = {name: found.reader(name) for name in trees}
    others = {name: (kind.value,) for name, kind in found.items.items() if name not in trees}
    return OpenedStep(step=commit.step, commit=commit, items=items, others=others)


def absolute(uri: str) -> str:
    """An address as storage wants it: a path may be relative here."""
    return uri if "://" in uri else os.path.abspath(os.path.expanduser(uri))


def leaf_bytes(leaf: Leaf) -> int:
    """As stored; plain values count nothing."""
    if not leaf.is_stored_as_bytes:
        return 0
    return whole(leaf.shape).size * itemsize(leaf.dtype)


def tree_bytes(tree: TreeSpec) -> int:
    return sum(leaf_bytes(leaf) for leaf in tree.leaves)


def spans(leaf: Leaf, chunk: Sequence[int], limit_bytes: int = READ_BYTES) -> Iterator[Box]:
    """Boxes that tile a leaf, made of whole chunks, each of about `limit_bytes` at most.

    A box is a run of chunks along the last axes: in C order, so that joined they are the leaf.
    Never less than one chunk.
    """
    if 0 in leaf.shape:
        return
    if not leaf.shape:
        yield Box((), ())
        return
    width = itemsize(leaf.dtype)
    yield from _divided(whole(leaf.shape), tuple(chunk), width, limit_bytes, axis=0)


def _divided(
    box: Box, chunk: tuple[int, ...], width: int, limit_bytes: int, axis: int
) -> Iterator[Box]:
    if axis == len(chunk) or box.size * width <= limit_bytes:
        yield box
        return
    row_bytes = box.size // box.shape[axis] * width
    rows = max(limit_bytes // row_bytes // chunk[axis], 1) * chunk[axis]
    for start in range(box.start[axis], box.stop[axis], rows):
        stop = min(start + rows, box.stop[axis])
        part = Box(
            (*box.start[:axis], start, *box.start[axis + 1 :]),
            (*box.stop[:axis], stop, *box.stop[axis + 1 :]),
        )
        yield from _divided(part, chunk, width, limit_bytes, axis + 1)
