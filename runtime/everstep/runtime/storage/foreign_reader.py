"""Read a tree that Orbax wrote as if it were one of ours, as far as its files allow.

No digest and no ledger speaks for these files. What has a checksum of its own is compared with it
(the index of a database, zarr3's index of a shard, an array with such a codec); for the bytes of
most arrays there is none, and `is_verified` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.controller.api.ids import Step
from everstep.runtime.errors import CheckpointInvalid, ChecksumMismatch, ManifestCorrupt, check
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.dtypes import STORABLE, numpy_dtype
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.scalars import Scalar
from everstep.runtime.layout.tree import Leaf, TreeSpec
from everstep.runtime.storage import foreign_tree as orbax
from everstep.runtime.storage.chunks import StoredDamage
from everstep.runtime.storage.foreign_arrays import ForeignArrays, StoredArray
from everstep.runtime.storage.foreign_steps import (
    DATABASE_FILE,
    ForeignItem,
    ForeignRun,
    ForeignStep,
    ItemKind,
    refuse_item,
)
from everstep.runtime.storage.store import Store

Array = NDArray[Any]


class ForeignReader:
    """One tree of a finished step of Orbax, opened. Any thread. Never writes or deletes.

    It has the methods of `CheckpointReader`. `fitted` makes a reader whose tree has a program's
    own words for its leaves.
    """

    def __init__(self, store: Store, step: ForeignStep, item: ForeignItem) -> None:
        """Open the tree, and read what is no array.

        Raises:
            CheckpointInvalid: a form that is not read; says what would do.
            ManifestCorrupt: a file is missing, or does not decode.
            StorageUnavailable: storage did not answer; that says nothing about the checkpoint.
        """
        if item.kind is not ItemKind.TREE:
            raise refuse_item(store.uri, step, item)
        self.step = step.step
        self.item = item.name
        self.where = f"{store.uri}/{item.folder}"
        self._names: list[str] = []
        self._stored: dict[int, Leaf] = {}
        self._scalars: dict[int, Scalar] = {}
        self._chunks: dict[int, tuple[int, ...]] = {}
        self._checked: dict[int, bool] = {}
        found = orbax.decode_tree(store.read(f"{item.folder}/{orbax.TREE_FILE}"), where=self.where)
        is_ocdbt = DATABASE_FILE in item.names if found.is_ocdbt is None else found.is_ocdbt
        if is_ocdbt and DATABASE_FILE not in item.names:
            # Its parts may be there: Orbax makes one of them when all processes are done.
            raise ManifestCorrupt(self.where, DATABASE_FILE, "the index of the arrays", "nothing")
        self._arrays = ForeignArrays(
            store.location(item.folder),
            is_ocdbt=is_ocdbt,
            is_zarr3=found.is_zarr3,
            is_whole=found.is_whole,
        )
        self._tree = self._read_tree(store, item, found)

    @property
    def tree(self) -> TreeSpec:
        return self._tree

    @property
    def extra(self) -> Mapping[str, str]:
        """Nothing: values of Python scalars are in the tree."""
        return {}

    @property
    def chunks(self) -> Mapping[int, tuple[int, ...]]:
        """Chunk shape by leaf: reads along its borders touch no byte too many."""
        return self._chunks

    @property
    def is_verified(self) -> bool:
        """Whether every array has checksums, so that what is read is what was written."""
        return all(self._checked.values())

    @property
    def unverified(self) -> tuple[str, ...]:
        """Names of the leaves whose bytes nothing can be compared with."""
        return tuple(
            self._tree.leaves[leaf].name for leaf, ok in sorted(self._checked.items()) if not ok
        )

    def fitted(self, wanted: TreeSpec) -> ForeignReader:
        """The same tree in a program's words, where they say the same; leaves keep their index."""
        other = object.__new__(ForeignReader)
        other.__dict__.update(self.__dict__)
        other._tree = orbax.fitted(self._tree, self._stored, self._scalars, wanted)
        return other

    def read_into(self, leaf: int, box: Box, out: Array) -> None:
        """Read one region. See `read_many`."""
        self.read_many([(Region(leaf, box), out)])

    def read_many(self, reads: Sequence[tuple[Region, Array]]) -> None:
        """Read regions together, each into its own array of the region's shape and dtype.

        Raises:
            ChecksumMismatch: a checksum, where there is one, is not that of the bytes.
            ManifestCorrupt: a chunk or its description is missing or unreadable.

        Blocking: until all are read; what is in flight at once is what was asked for. The arrays
        are undefined after an error.
        """
        begun: list[tuple[str, Box, Array]] = []
        numbers: list[int] = []
        for number, (region, out) in enumerate(reads):
            leaf = self._tree.leaves[region.leaf]
            if region.leaf not in self._chunks:
                raise ManifestCorrupt(self.where, leaf.name, "an array", "no array")
            check(
                whole(leaf.shape).contains(region.box)
                and out.shape == region.box.shape
                and out.dtype == numpy_dtype(leaf.dtype),
                f"{self._describe(region)} is read into {out.dtype} {out.shape}",
            )
            if not region.box.is_empty:
                begun.append((self._names[region.leaf], region.box, out))
                numbers.append(number)
        damages = self._arrays.read(begun)
        if damages:
            at, damage = min(damages.items())
            raise self._damaged(self._describe(reads[numbers[at]][0]), damage) from damage

    def _read_tree(self, store: Store, item: ForeignItem, found: orbax.ForeignTree) -> TreeSpec:
        strings: Mapping[str, str] = {}
        if orbax.STRINGS_FILE in item.names:
            data = store.read(f"{item.folder}/{orbax.STRINGS_FILE}")
            strings = orbax.decode_strings(data, where=self.where)
        kinds = self._key_kinds(store, item)
        for leaf in found.leaves:
            if leaf.is_elsewhere:
                raise CheckpointInvalid(
                    self.where,
                    leaf.where,
                    "an array or text: restore it with Orbax, and save it again",
                    "a value in the file of structure of an old version",
                )
        self._names = [leaf.array for leaf in found.leaves]
        described = self._arrays.describe(leaf.array for leaf in found.leaves if leaf.has_array)
        leaves: list[Leaf] = []
        for index, leaf in enumerate(found.leaves):
            if leaf.is_empty:
                leaves.append(orbax.empty_leaf(leaf))
            elif leaf.is_text:
                if leaf.array not in strings:
                    raise ManifestCorrupt(self.where, leaf.where, "a text", "nothing")
                leaves.append(orbax.text_leaf(leaf, strings[leaf.array]))
            else:
                array = self._array(leaf, described[leaf.array])
                self._chunks[index], self._checked[index] = array.chunk, array.is_checked
                kind = kinds.get(leaf.array)
                leaves.append(orbax.array_leaf(leaf, array.dtype, array.shape, kind))
        return self._with_scalars(found.leaves, leaves)

    def _array(self, leaf: orbax.ForeignLeaf, found: StoredArray | StoredDamage) -> StoredArray:
        if isinstance(found, StoredDamage):
            raise self._damaged(f"{leaf.where} ({leaf.value_type})", found) from found
        if found.dtype not in STORABLE:
            raise CheckpointInvalid(self.where, leaf.where, "a numeric dtype of JAX", found.dtype)
        return found

    def _with_scalars(self, found: Sequence[orbax.ForeignLeaf], leaves: Sequence[Leaf]) -> TreeSpec:
        """Read the arrays of rank 0 that a type of Python can hold: they may be such values."""
        small = {
            index: leaf
            for index, leaf in enumerate(leaves)
            if index in self._chunks and not leaf.shape
        }
        held = [index for index, leaf in small.items() if orbax.python_type(leaf.dtype)]
        values = self._arrays.scalars([self._names[index] for index in held])
        for index in held:
            value = values[self._names[index]]
            if isinstance(value, StoredDamage):
                raise self._damaged(leaves[index].name, value) from value
            self._scalars[index] = np.asarray(value).item()
        self._stored = small
        return TreeSpec(
            leaves=tuple(
                orbax.with_scalar(leaf, self._scalars[index])
                if index in self._scalars and orbax.is_python(found[index], leaf)
                else leaf
                for index, leaf in enumerate(leaves)
            )
        )

    def _key_kinds(self, store: Store, item: ForeignItem) -> dict[str, str]:
        """Kinds of typed keys; the files say it of the arrays that each process wrote."""
        kinds: dict[str, str] = {}
        if orbax.ARRAYS_FOLDER in item.names:
            folder = f"{item.folder}/{orbax.ARRAYS_FOLDER}"
            for name in store.list(folder):
                data = store.read(f"{folder}/{name}")
                kinds |= orbax.decode_key_kinds(data, where=self.where, name=name)
        return kinds

    def _damaged(self, where: str, damage: StoredDamage) -> CheckpointInvalid:
        kind = ChecksumMismatch if damage.is_checksum else ManifestCorrupt
        return kind(self.where, where, damage.expected, damage.found)

    def _describe(self, region: Region) -> str:
        name = self._tree.leaves[region.leaf].name
        return f"{name} region {list(region.box.start)} to {list(region.box.stop)}"


def open_foreign_item(store: Store, step: Step, item: str) -> ForeignReader | None:
    """One tree of a step that Orbax wrote; None when there is no such step.

    Raises:
        CheckpointInvalid: the step has no item of this name, or it cannot be read.
        StorageUnavailable: storage did not answer.
    """
    run = ForeignRun(store)
    found = run.open(step)
    if found is None:
        return None
    wanted = found.item(item)
    if wanted is None:
        have = ", ".join(found.items) or "none"
        raise CheckpointInvalid(f"{store.uri}, step {step}", item, "an item of this name", have)
    return ForeignReader(run.store, found, wanted)
