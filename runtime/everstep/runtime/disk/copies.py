"""Find local copies on this host's disk, and read them. Never writes or deletes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.disk.record import (
    LOCK,
    RECORD,
    CopyRecord,
    bytes_name,
    decode_record,
    run_folder,
)
from everstep.runtime.errors import (
    CheckpointInvalid,
    ChecksumMismatch,
    EverstepError,
    ManifestCorrupt,
    StorageUnavailable,
)
from everstep.runtime.layout.checksums import crc_of
from everstep.runtime.layout.manifest import BLOCK_BYTES, SnapshotManifest
from everstep.runtime.storage.posix import PosixStore
from everstep.runtime.storage.store import StorageMissing


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCopy:
    """A copy whose record is whole. Its bytes are verified when they are read."""

    folder: str
    """Absolute."""
    record: CopyRecord

    def open(self, item: str) -> LocalBytes:
        """Open the bytes of one item.

        Raises:
            ManifestCorrupt: the file is missing, or is not as long as it was written.
        """
        return LocalBytes(os.path.join(self.folder, bytes_name(item)), self.record.items[item])


class LocalBytes:
    """The bytes of one item of a copy, readable also after the copy was deleted. Any thread."""

    def __init__(self, path: str, manifest: SnapshotManifest) -> None:
        self.path, self._manifest = path, manifest
        wanted = manifest.plot.size_bytes
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ManifestCorrupt(path, "the bytes", f"{wanted} bytes", str(error)) from error
        found = os.fstat(self.fd).st_size
        if found != wanted:
            self.close()
            raise ManifestCorrupt(path, "the bytes", f"{wanted} bytes", f"{found} bytes")

    def manifest(self) -> SnapshotManifest:
        return self._manifest

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the bytes from `offset` on, unverified.

        Raises:
            StorageUnavailable: the disk does not give them.
        """
        done = 0
        while done < out.size:
            try:
                count = os.preadv(self.fd, [out.data[done:]], offset + done)
            except OSError as error:
                raise StorageUnavailable(f"{self.path}: {error.strerror}") from error
            if not count:
                raise StorageUnavailable(f"{self.path} ends at byte {offset + done}")
            done += count

    def verify(self) -> None:
        """Read all of it once.

        Raises:
            ChecksumMismatch: names the leaf and its region.
            StorageUnavailable: the disk does not give it.
        """
        plot = self._manifest.plot
        block = np.empty(BLOCK_BYTES, np.uint8)
        for shard, crcs in zip(plot.shards, self._manifest.crcs, strict=True):
            for number, expected in enumerate(crcs):
                start = number * BLOCK_BYTES
                part = block[: min(BLOCK_BYTES, shard.size_bytes - start)]
                self.read_into(shard.offset + start, part)
                if (found := crc_of(part)) != expected:
                    box = shard.box
                    where = f"{plot.tree.leaves[shard.leaf].name} {box.start} to {box.stop}"
                    raise ChecksumMismatch(self.path, where, expected, found)

    def close(self) -> None:
        """Give the file up; again is no error."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def read_copy(store: PosixStore, folder: str, *, run: str) -> LocalCopy | None:
    """The copy in a folder; None when it was never finished.

    Raises:
        CheckpointInvalid: its record is damaged, or is of another run.
        StorageRefused, StorageUnavailable: it cannot be read.
    """
    where = store.full(folder)
    try:
        data = store.read(f"{folder}/{RECORD}")
    except StorageMissing:
        return None
    record = decode_record(data, where=where)
    if record.run != run:
        raise CheckpointInvalid(where, RECORD, f"a copy of run {run}", f"one of run {record.run}")
    return LocalCopy(folder=where, record=record)


def find_copies(path: str, run: str) -> tuple[tuple[LocalCopy, ...], tuple[str, ...]]:
    """All copies of a run on this disk, whoever wrote them.

    Args:
        path: folder of the local tier.
        run: whose steps.

    Returns:
        The copies, newest step first; and in words what was passed over.

    Raises:
        StorageRefused, StorageUnavailable: the folder cannot be read.
    """
    store = PosixStore(path)
    found: list[LocalCopy] = []
    passed: list[str] = []
    base = run_folder(run)
    for owner in store.list(base):
        for name in store.list(f"{base}/{owner}"):
            if name == LOCK:
                continue
            folder = f"{base}/{owner}/{name}"
            try:
                copy = read_copy(store, folder, run=run)
            except EverstepError as error:
                passed.append(str(error))
                continue
            if copy is None:
                passed.append(f"{store.full(folder)}: a copy that was never finished")
            else:
                found.append(copy)
    return tuple(sorted(found, key=lambda copy: -copy.record.step)), tuple(passed)
