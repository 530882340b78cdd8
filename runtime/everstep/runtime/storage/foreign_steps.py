"""Steps that Orbax wrote into a folder: which there are, which are finished, what is in them.

A step is a folder named by its number, with a prefix and zeros or without (`12`, `000012`,
`ckpt_12`). On a file system it is finished when it has its final name; where nothing can be
renamed, when it has its marker. A folder that is itself one checkpoint is a run of one step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from everstep.controller.api.ids import Step
from everstep.runtime.errors import (
    CheckpointInvalid,
    ConfigurationError,
    ManifestCorrupt,
    StorageRefused,
)
from everstep.runtime.storage.foreign_tree import TREE_FILE
from everstep.runtime.storage.manifest import STATE
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.store import StorageMissing, Store

STEP_FILE = "_CHECKPOINT_METADATA"
MARKER = "commit_success.txt"
STRUCTURE_FILE = "checkpoint"
"""The tree, in the form of versions before `_METADATA`."""
DATABASE_FILE = "manifest.ocdbt"
_TEMPORARY = ".orbax-checkpoint-tmp"
_NAME = re.compile(r"(?:(.+)_)?(\d+)")
_JSON_FILES = ("metadata", "metrics")
_NO_ITEM = frozenset({"d", "array_metadatas"})


class ItemKind(Enum):
    TREE = "tree"
    JSON = "json"
    STRUCTURE = "structure"
    """A tree of a version before `_METADATA`: not read."""
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignItem:
    """One of Orbax's checkpointables."""

    name: str
    folder: str
    """Relative to the store."""
    kind: ItemKind
    handler: str
    """Orbax's name of what wrote it; empty when it is not said."""
    names: tuple[str, ...]
    """Of the files and folders in it."""

    @property
    def json_file(self) -> str:
        return next(name for name in _JSON_FILES if name in self.names)


class _StepFile(msgspec.Struct, frozen=True):
    item_handlers: dict[str, str] | str | None = None
    metrics: Any = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | msgspec.UnsetType | None = msgspec.UNSET
    custom_metadata: Any = None

    @property
    def is_begun_only(self) -> bool:
        """Orbax writes the file twice; versions that did not write times say nothing."""
        return self.commit_timestamp_nsecs is None and self.init_timestamp_nsecs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStep:
    """A finished step."""

    step: Step
    folder: str
    items: Mapping[str, ForeignItem]
    committed_at_s: float | None
    """None when its files do not say."""
    metrics: Any
    custom_metadata: Any

    def item(self, name: str) -> ForeignItem | None:
        """The item of this name.

        `state`, which is one tree to us, is also the only tree of a step that has one only: Orbax
        has several names for that (`default`, none at all).
        """
        if name in self.items:
            return self.items[name]
        trees = [i for i in self.items.values() if i.kind in (ItemKind.TREE, ItemKind.STRUCTURE)]
        return trees[0] if name == STATE and len(trees) == 1 else None


class ForeignRun:
    """The steps of a folder that Orbax has written to. Never writes or deletes."""

    def __init__(self, store: Store) -> None:
        """Look at nothing yet.

        Args:
            store: of the folder that `CheckpointManager` was given, or of one checkpoint.
        """
        self.uri = store.uri
        self._store = store
        self._folders: dict[Step, str] | None = None

    @property
    def store(self) -> Store:
        """Where the folders of steps are: of one checkpoint, the folder above."""
        self._find()
        return self._store

    def steps(self) -> tuple[Step, ...]:
        """The finished steps, oldest first.

        Raises:
            ConfigurationError: two folders are one step.
            StorageUnavailable: storage did not answer.
        """
        return tuple(sorted(self._find()))

    @property
    def is_one_checkpoint(self) -> bool:
        """Whether the folder is itself a checkpoint, and not one of steps."""
        return self.store.uri != self.uri

    def open(self, step: Step) -> ForeignStep | None:
        """A step and what is in it; None when there is no such step.

        Raises:
            ManifestCorrupt: the step's own file does not decode.
        """
        folder = self._find().get(step)
        if folder is None:
            return None
        names = _names(self._store, folder)
        file = self._step_file(folder, names) or _StepFile()
        committed = file.commit_timestamp_nsecs
        return ForeignStep(
            step=step,
            folder=folder,
            items={item.name: item for item in self._items(folder, names, file)},
            committed_at_s=committed / 1e9 if isinstance(committed, int) else None,
            metrics=file.metrics,
            custom_metadata=file.custom_metadata,
        )

    def _find(self) -> dict[Step, str]:
        if self._folders is None:
            self._folders = self._found()
        return self._folders

    def _found(self) -> dict[Step, str]:
        names = self._store.list("")
        if _has_step_file(names) or self._has_structure("", names):
            self._store, name = _above(self._store)
            return {_step_of(name) or Step(0): name} if self._is_finished(name) else {}
        folders: dict[Step, str] = {}
        for name in names:
            step = _step_of(name)
            if step is None or not self._is_step(name) or not self._is_finished(name):
                continue
            if step in folders:
                raise ConfigurationError(
                    self.uri,
                    f"step {step} twice ({folders[step]}, {name})",
                    "one folder a step; the address of one of them reads that one",
                )
            folders[step] = name
        if not folders and self._has_item("", names):
            # One checkpoint without a file of its own, as old versions left it.
            self._store, name = _above(self._store)
            return {_step_of(name) or Step(0): name} if self._is_finished(name) else {}
        return folders

    def _is_step(self, folder: str) -> bool:
        names = _names(self._store, folder)
        if _has_step_file(names) or self._has_structure(folder, names):
            return True
        return self._has_item(folder, names)

    def _has_item(self, folder: str, names: tuple[str, ...]) -> bool:
        """Whether some folder in this one is the folder of a tree, and no step by itself."""
        for name in _visible(names):
            path = f"{folder}/{name}" if folder else name
            below = _names(self._store, path)
            is_tree = TREE_FILE in below or self._has_structure(path, below)
            if is_tree and STEP_FILE not in below:
                return True
        return False

    def _has_structure(self, folder: str, names: tuple[str, ...]) -> bool:
        """Whether the file of old versions is there; a folder of that name is something else."""
        path = f"{folder}/{STRUCTURE_FILE}" if folder else STRUCTURE_FILE
        return STRUCTURE_FILE in names and not _names(self._store, path)

    def _kind(self, folder: str, names: tuple[str, ...]) -> ItemKind:
        if TREE_FILE in names:
            return ItemKind.TREE
        if self._has_structure(folder, names):
            return ItemKind.STRUCTURE
        if any(name in names for name in _JSON_FILES):
            return ItemKind.JSON
        return ItemKind.OTHER

    def _is_finished(self, folder: str) -> bool:
        if _TEMPORARY in folder:
            return False
        names = _names(self._store, folder)
        if MARKER in names:
            return True
        if self._store.location(folder).driver != "file":
            return False
        try:
            file = self._step_file(folder, names)
        except ManifestCorrupt:
            # A damaged step is there: whoever opens it is told.
            return True
        return file is None or not file.is_begun_only

    def _step_file(self, folder: str, names: tuple[str, ...]) -> _StepFile | None:
        if STEP_FILE not in names:
            return None
        data = self._store.read(f"{folder}/{STEP_FILE}")
        try:
            return msgspec.json.decode(data, type=_StepFile)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ManifestCorrupt(
                f"{self._store.uri}/{folder}", STEP_FILE, "Orbax's file of a step", str(error)
            ) from error

    def _items(self, folder: str, names: tuple[str, ...], file: _StepFile) -> Iterator[ForeignItem]:
        handlers = file.item_handlers
        kind = self._kind(folder, names)
        if kind is not ItemKind.JSON and (kind is not ItemKind.OTHER or DATABASE_FILE in names):
            handler = handlers if isinstance(handlers, str) else ""
            yield ForeignItem(name=STATE, folder=folder, kind=kind, handler=handler, names=names)
            return
        by_name = handlers if isinstance(handlers, dict) else {}
        for name in _visible(names):
            below = _names(self._store, f"{folder}/{name}")
            if below:
                yield ForeignItem(
                    name=name,
                    folder=f"{folder}/{name}",
                    kind=self._kind(f"{folder}/{name}", below),
                    handler=by_name.get(name, ""),
                    names=below,
                )


def refuse_item(uri: str, step: ForeignStep, item: ForeignItem) -> CheckpointInvalid:
    """Why an item that is there is not read, and what would do."""
    where = f"{uri}/{item.folder}"
    remedy = "a tree with _METADATA: restore it with Orbax, and save it again"
    if item.kind is ItemKind.STRUCTURE:
        found = f"the file {STRUCTURE_FILE!r} of an Orbax before 0.4, and no {TREE_FILE}"
        return CheckpointInvalid(where, f"step {step.step}, {item.name}", remedy, found)
    if DATABASE_FILE in item.names:
        found = f"arrays, and no {TREE_FILE} that tells their tree"
    else:
        found = f"files of {item.handler or 'a handler that is not named'}"
    return CheckpointInvalid(where, f"step {step.step}, {item.name}", remedy, found)


def _step_of(name: str) -> Step | None:
    match = _NAME.fullmatch(name)
    return None if match is None or not name.isascii() else Step(int(match[2]))


def _has_step_file(names: tuple[str, ...]) -> bool:
    """Whether a folder with these names in it is a step, or the folder of an item."""
    return any(name in names for name in (STEP_FILE, TREE_FILE, MARKER))


def _above(store: Store) -> tuple[Store, str]:
    """The folder in which a store's own folder is, and its name there."""
    place = store.location("x")
    if place.driver == "file":
        folder = place.path.rstrip("/").rpartition("/")[0]
        above, _, name = folder.rpartition("/")
        return open_store(above or "/"), name
    above, _, name = store.uri.rstrip("/").rpartition("/")
    return open_store(above), name


def _visible(names: tuple[str, ...]) -> Iterator[str]:
    """What may be an item, of the names in a step's folder."""
    for name in names:
        if not name.startswith(("_", ".", "ocdbt.process_")) and _TEMPORARY not in name:
            if name not in _NO_ITEM:
                yield name


def _names(store: Store, folder: str) -> tuple[str, ...]:
    """What is in a folder; nothing when it is a file."""
    try:
        return store.list(folder)
    except StorageMissing:
        return ()
    except StorageRefused as error:
        if isinstance(error.__cause__, NotADirectoryError):
            return ()
        raise
