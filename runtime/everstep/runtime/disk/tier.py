"""Write local copies: one owner's folder, which nobody else writes to."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from everstep.controller.api.ids import HostId, Incarnation, Step
from everstep.runtime.disk.choice import (
    Found,
    choose_removed,
    choose_room,
    is_left_behind,
    next_number,
)
from everstep.runtime.disk.copies import read_copy
from everstep.runtime.disk.record import (
    LOCK,
    RECORD,
    CopyRecord,
    bytes_name,
    copy_folder,
    encode_record,
    number_of,
    run_folder,
    size_bytes,
)
from everstep.runtime.errors import EverstepError, StorageRefused, StorageUnavailable
from everstep.runtime.layout.checksums import crc_of
from everstep.runtime.layout.manifest import BLOCK_BYTES, Plot, SnapshotManifest
from everstep.runtime.storage.posix import PosixStore, sync_directory, translated

SPARE_BYTES = 16 << 20
"""Left free on the disk: of records, and for whoever else has files there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What is copied of one item: memory as a plot divides it."""

    plot: Plot
    memory: NDArray[np.uint8]
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    crcs: tuple[tuple[int, ...], ...] | None = None
    """Of the blocks, when they are known; else they are computed on the way."""


class DiskTier:
    """One owner's copies of one run. One thread at a time.

    Invariants: (1) a copy has its record only when all its bytes are on the disk; (2) one process
    writes to an owner's folder; (3) no more than `latest` copies stay, and one more while one is
    being written.
    """

    def __init__(self, path: str, *, run: str, owner: str, latest: int) -> None:
        self._store = PosixStore(path)
        self._base = run_folder(run)
        self._run, self._owner, self._latest = run, owner, latest
        self._folder = f"{self._base}/{owner}"
        self._lock: int | None = None

    @property
    def path(self) -> str:
        """Of this owner's folder."""
        return self._store.full(self._folder)

    def open(self) -> None:
        """Make the folder, and become its owner. Again is no error.

        Raises:
            StorageRefused: it cannot be made, or another live process has it.
            StorageUnavailable: the disk does not answer.
        """
        lock = os.path.join(self.path, LOCK)
        if self._lock is not None and not _is_at(self._lock, lock):
            # Somebody has deleted the folder, perhaps the whole disk was made anew.
            self.close()
        if self._lock is None:
            make_folder(self.path)
            self._lock = _take_lock(lock)
            if self._lock is None:
                raise StorageRefused(
                    self.path, "the folder of another live process", "a folder of its own for each"
                )

    def close(self) -> None:
        """Give the folder up; the copies stay."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def write(
        self,
        contents: Mapping[str, Content],
        *,
        step: Step,
        incarnation: Incarnation,
        host: HostId,
        digest: str,
        step_durable: Step | None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> CopyRecord:
        """Write a copy, then delete what it makes needless.

        Args:
            contents: by item. Their memory must not change meanwhile.
            step: that it is of.
            incarnation: in which it was held.
            host: that held it.
            digest: see `CopyRecord`.
            step_durable: newest step that durable storage has, as far as is known.
            is_wanted: asked before each block; False gives the copy up.

        Raises:
            StorageRefused: no room (with the figures), read-only, no permission.
            StorageUnavailable: the disk fails, or the copy was given up.

        Durability: on return the copy outlives any crash. After a crash within it is whole or
        it is none, and every earlier copy that stays is whole.
        Blocking: for all of the writing.
        """
        self.open()
        found = self._look(self._folder)
        self._make_room(found, contents, step_durable)
        folder = f"{self._folder}/{copy_folder(next_number(found))}"
        full = self._store.full(folder)
        try:
            make_folder(full)
            record = CopyRecord(
                run=self._run,
                owner=self._owner,
                step=step,
                incarnation=incarnation,
                digest=digest,
                items={
                    name: SnapshotManifest(
                        step=step,
                        incarnation=incarnation,
                        host=host,
                        plot=content.plot,
                        crcs=_write_bytes(os.path.join(full, bytes_name(name)), content, is_wanted),
                        extra=dict(content.extra),
                    )
                    for name, content in contents.items()
                },
            )
            self._store.write_durable(f"{folder}/{RECORD}", encode_record(record))
        except BaseException as error:
            # Room is what may be missing: nothing half-written is left, if that can be helped.
            with contextlib.suppress(EverstepError):
                self._store.delete_tree(folder)
            if isinstance(error, OSError):
                raise translated(error, error.filename or full) from error
            raise
        self._clean(step_durable)
        return record

    def _make_room(
        self, found: list[Found], contents: Mapping[str, Content], step_durable: Step | None
    ) -> None:
        wanted = sum(content.plot.size_bytes for content in contents.values()) + SPARE_BYTES
        room = choose_room(
            found, wanted_bytes=wanted, free_bytes=self._free(), step_durable=step_durable
        )
        self._delete(self._folder, room.removed)
        free = self._free()
        # What was half-written has counted for nothing, so the disk is asked again.
        if free < wanted:
            raise StorageRefused(
                self.path, f"{free} bytes free", f"{wanted} for a copy of this host's part"
            )

    def _free(self) -> int:
        try:
            found = os.statvfs(self.path)
        except OSError as error:
            raise translated(error, self.path) from error
        return found.f_bavail * found.f_frsize

    def _clean(self, step_durable: Step | None) -> None:
        """Delete older copies, what was never finished, and what owners left that are gone."""
        self._delete(self._folder, choose_removed(self._look(self._folder), latest=self._latest))
        for owner in self._store.list(self._base):
            if owner != self._owner:
                # What cannot be deleted there is no failure of the copy that was written here.
                with contextlib.suppress(EverstepError):
                    self._clean_after(owner, step_durable)

    def _clean_after(self, owner: str, step_durable: Step | None) -> None:
        """Delete the folder of an owner that is gone, when it is of no more use."""
        folder = f"{self._base}/{owner}"
        lock = _take_lock(os.path.join(self._store.full(folder), LOCK))
        if lock is None:
            return
        try:
            if is_left_behind(self._look(folder), step_durable=step_durable):
                self._delete(self._base, [owner])
        finally:
            os.close(lock)

    def _look(self, folder: str) -> list[Found]:
        found: list[Found] = []
        for name in self._store.list(folder):
            if name == LOCK:
                continue
            try:
                copy = read_copy(self._store, f"{folder}/{name}", run=self._run)
            except EverstepError:
                copy = None
            found.append(
                Found(
                    name=name,
                    number=number_of(name),
                    step=None if copy is None else copy.record.step,
                    size_bytes=0 if copy is None else size_bytes(copy.record),
                )
            )
        return found

    def _delete(self, folder: str, names: tuple[str, ...] | list[str]) -> None:
        for name in names:
            # The record first: what is left by a crash is then no copy.
            self._store.delete_tree(f"{folder}/{name}/{RECORD}")
            self._store.delete_tree(f"{folder}/{name}")


def make_folder(full: str) -> None:
    """Make a folder and its parents, each name durable.

    Raises:
        StorageRefused, StorageUnavailable: it cannot be made.
    """
    missing: list[str] = []
    while not os.path.isdir(full) and os.path.dirname(full) != full:
        missing.append(full)
        full = os.path.dirname(full)
    try:
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                # What is in there is somebody's model.
                os.mkdir(folder, 0o700)
            sync_directory(os.path.dirname(folder))
    except OSError as error:
        raise translated(error, error.filename or full) from error


def _take_lock(path: str) -> int | None:
    """Become the owner of a folder; None when a live process is. It ends with the process."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
    except OSError as error:
        raise translated(error, path) from error
    if not _is_at(descriptor, path):
        # Its last owner was cleaned up after between the two calls.
        os.close(descriptor)
        return None
    return descriptor


def _is_at(descriptor: int, path: str) -> bool:
    """Whether a path still names the file that is open."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    own = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)


def _write_bytes(
    path: str, content: Content, is_wanted: Callable[[], bool]
) -> tuple[tuple[int, ...], ...]:
    """Write an item's bytes, synced; returns the checksums of their blocks."""
    known = content.crcs
    crcs: list[tuple[int, ...]] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for position, shard in enumerate(content.plot.shards):
            data = content.memory[shard.offset : shard.offset + shard.size_bytes]
            found: list[int] = []
            for start in range(0, data.size, BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                if not is_wanted():
                    raise StorageUnavailable(f"{path}: given up: the memory is needed")
                if known is None:
                    found.append(crc_of(block))
                _write_all(descriptor, block, shard.offset + start)
            crcs.append(tuple(found) if known is None else known[position])
        os.ftruncate(descriptor, content.plot.size_bytes)
        os.fsync(descriptor)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(descriptor)
    return tuple(crcs)


def _write_all(descriptor: int, block: NDArray[np.uint8], offset: int) -> None:
    done = 0
    while done < block.size:
        done += os.pwrite(descriptor, block.data[done:], offset + done)
