"""Read a committed checkpoint: any box of any leaf, into memory that the caller owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.errors import ChecksumMismatch, ManifestCorrupt, check
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.dtypes import numpy_dtype
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.storage import manifest as files
from everstep.runtime.storage.chunks import StoredDamage, cells
from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.store import StorageMissing, Store
from everstep.runtime.storage.tensors import ArrayPlan, ArrayRead, ArrayReader

Array = NDArray[Any]


class CheckpointReader:
    """One checkpoint, opened. Any thread. Never writes or deletes.

    Every byte is checked (G9): the small files against the digests in `everstep.json`, that file
    against the digest in the ledger, every chunk against the checksum noted when it was written.
    """

    def __init__(
        self,
        store: Store,
        commit: Commit,
        item: str = files.STATE,
        *,
        manifest: files.CheckpointManifest | None = None,
    ) -> None:
        """Open one item of a checkpoint, and verify its small files.

        Args:
            store: of the run.
            commit: of the step.
            item: which of its parts.
            manifest: from `read_manifest`, where the caller has it already.

        Raises:
            KeyError: the step has no item of this name.
            ManifestCorrupt: a file is missing, or is not what was committed.
            ChecksumMismatch: a small file was altered.
            StorageUnavailable: storage did not answer; that says nothing about the checkpoint.
        """
        self._store = store
        self.commit = commit
        self.item = item
        self.where = f"{store.uri}/{commit.folder}"
        self.manifest = manifest or read_manifest(store, commit)
        self._item = self.manifest.items[item]
        contents = {
            name: self._verified(name)
            for name in self.manifest.files
            if _belongs(name, item, self.manifest)
        }
        self._crcs: dict[int, dict[tuple[int, ...], int]] = {}
        for writer in self._item.writers:
            name = files.part_name(writer, item)
            self._note_checksums(files.decode_part(contents[name], where=self.where, name=name))
        self._arrays = ArrayReader(store.location(f"{commit.folder}/{item}"))

    @property
    def tree(self) -> TreeSpec:
        return self._item.tree

    @property
    def extra(self) -> Mapping[str, str]:
        return self.manifest.extra | self._item.extra

    @property
    def chunks(self) -> Mapping[int, tuple[int, ...]]:
        """Chunk shape by leaf: reads along its borders touch no byte too many."""
        return self._item.chunks

    def read_into(self, leaf: int, box: Box, out: Array) -> None:
        """Read one region. See `read_many`."""
        self.read_many([(Region(leaf, box), out)])

    def read_many(self, reads: Sequence[tuple[Region, Array]]) -> None:
        """Read regions together, each into its own array of the region's shape and dtype.

        Raises:
            ChecksumMismatch: names the leaf, the region and the file.
            ManifestCorrupt: a chunk or its description is missing or unreadable.

        Blocking: until all are read; what is in flight at once is what was asked for. The arrays
        are undefined after an error.
        """
        failures: dict[int, StoredDamage] = {}
        begun: list[tuple[int, ArrayRead]] = []
        for number, (region, out) in enumerate(reads):
            if region.box.is_empty:
                continue
            try:
                begun.append((number, self._read(region, out)))
            except StoredDamage as damage:
                failures[number] = damage
        # All are read, also after a failure: none may be written into after the return.
        damages = self._arrays.read([read for _, read in begun])
        failures.update((begun[at][0], damage) for at, damage in damages.items())
        if failures:
            number, first = min(failures.items())
            kind = ChecksumMismatch if first.is_checksum else ManifestCorrupt
            where = self._describe(reads[number][0])
            raise kind(self.where, where, first.expected, first.found) from first

    def plan(self, leaf: int) -> ArrayPlan:
        """How a leaf's array is stored."""
        name = self._item.arrays[leaf]
        spec = self.tree.leaves[leaf]
        if name is None or leaf not in self._item.chunks:
            raise ManifestCorrupt(self.where, spec.name, "an array", "no array")
        return ArrayPlan(
            name=name, dtype=spec.dtype, shape=spec.shape, chunk=self._item.chunks[leaf]
        )

    def _read(self, region: Region, out: Array) -> ArrayRead:
        plan = self.plan(region.leaf)
        check(
            whole(plan.shape).contains(region.box)
            and out.shape == region.box.shape
            and out.dtype == numpy_dtype(plan.dtype),
            f"{self._describe(region)} is read into {out.dtype} {out.shape}",
        )
        crcs = self._crcs.get(region.leaf, {})
        lacking = [cell for cell in cells(region.box, plan.chunk) if cell not in crcs]
        if lacking:
            raise StoredDamage(
                "a checksum of every chunk", f"none of {lacking[0]}", is_checksum=False
            )
        return ArrayRead(plan=plan, box=region.box, out=out, crcs=crcs)

    def _note_checksums(self, part: files.PartRecord) -> None:
        for region, crcs in zip(part.regions, part.crcs, strict=True):
            noted = self._crcs.setdefault(region.leaf, {})
            noted.update(zip(cells(region.box, self._item.chunks[region.leaf]), crcs, strict=True))

    def _verified(self, name: str) -> bytes:
        return _verified(self._store, self.commit, self.where, self.manifest, name)

    def _describe(self, region: Region) -> str:
        name = self.tree.leaves[region.leaf].name
        return f"{name} region {list(region.box.start)} to {list(region.box.stop)}"


def read_manifest(store: Store, commit: Commit) -> files.CheckpointManifest:
    """What a step is made of.

    Raises:
        ManifestCorrupt: the file is missing, or is not what was committed.
    """
    where = f"{store.uri}/{commit.folder}"
    data = _small(store, commit, where, files.MANIFEST)
    return files.decode_manifest(data, expected_digest=commit.digest, where=where)


def read_item_file(
    store: Store, commit: Commit, manifest: files.CheckpointManifest, item: str, path: str
) -> bytes:
    """One file of an item that a handler wrote, verified.

    Raises:
        KeyError: the item has no such file.
        ManifestCorrupt, ChecksumMismatch: it is not what was committed.
    """
    name = f"{item}/{path}"
    if name not in manifest.files:
        raise KeyError(name)
    return _verified(store, commit, f"{store.uri}/{commit.folder}", manifest, name)


def _verified(
    store: Store, commit: Commit, where: str, manifest: files.CheckpointManifest, name: str
) -> bytes:
    data = _small(store, commit, where, name)
    found = files.digest(data)
    if found != manifest.files[name]:
        raise ChecksumMismatch(where, name, manifest.files[name], found)
    return data


def _small(store: Store, commit: Commit, where: str, name: str) -> bytes:
    try:
        return store.read(f"{commit.folder}/{name}")
    except StorageMissing as error:
        raise ManifestCorrupt(where, name, "a file", "nothing") from error


def _belongs(name: str, item: str, manifest: files.CheckpointManifest) -> bool:
    """Whether a small file is one item's own, or of the step as a whole."""
    others = {
        *(f"{other}/" for other in manifest.items if other != item),
        *(
            files.part_name(writer, other)
            for other, one in manifest.items.items()
            if other != item
            for writer in one.writers
        ),
    }
    return not any(name == other or name.startswith(other) for other in others)


def read_leaf(reader: CheckpointReader, leaf: int) -> Array:
    """A whole leaf, in fresh memory."""
    spec = reader.tree.leaves[leaf]
    out = np.empty(spec.shape, numpy_dtype(spec.dtype))
    reader.read_into(leaf, whole(spec.shape), out)
    return out
