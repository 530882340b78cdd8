"""Values of a database on a POSIX file system, written from and read into the caller's memory.

No copy is made on the way where a chunk lies in one piece; a checksum is computed of each block
just before it is written or just after it was read, while the processor has it at hand. The
system calls run in a few threads, so that some write while others wait for a sync.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from everstep.runtime.storage.chunks import (
    BLOCK_BYTES,
    CRC_BYTES,
    Array,
    Bytes,
    StoredDamage,
    Wanted,
    encoded,
    extend_crc,
    noted,
    taking,
)
from everstep.runtime.storage.ocdbt import Entry, Extent, Root, encode_tree
from everstep.runtime.storage.posix import translated

INLINE_BYTES_MAX = 1024
"""Smaller values lie in the index itself."""
NODE_BYTES_MAX = 8_000_000
THREADS = 4
_BATCH_BYTES = 8 << 20
"""Small values go through the threads in batches of about this."""
_SMALL_BYTES = 256 << 10
_GAP_BYTES = 64 << 10


class DataWriter:
    """The data files of one database that is being made. Not for two threads at once.

    Durability: after `finish` values and index are synced, directories not.
    """

    def __init__(self, folder: str, *, file_bytes: int, in_flight_bytes: int) -> None:
        """Write below a folder, which need not exist.

        Args:
            folder: of the database, absolute.
            file_bytes: a file is closed, and synced, when it has about so many bytes.
            in_flight_bytes: `put` waits while more than that has been put and not written.
        """
        self.crcs: dict[str, int] = {}
        """CRC-32C by key, of what was put; complete after `finish`."""
        self._folder = folder
        self._file_bytes = file_bytes
        self._in_flight_max = in_flight_bytes
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-write")
        self._batch: list[tuple[str, Array, Sequence[int]]] = []
        self._batch_bytes = 0
        self._in_flight: dict[Future[None], int] = {}
        self._entries: dict[str, bytes | Extent] = {}
        self._lock = threading.Lock()
        self._made: list[_DataFile] = []
        """Since the last `finish`."""
        self._idle: list[_DataFile] = []
        """Open files that no thread is writing."""

    def put(self, key: str, part: Array, chunk: Sequence[int]) -> None:
        """Begin to write a chunk. `part` must not change until `finish` or `close`.

        Raises:
            StorageRefused, StorageUnavailable: this or an earlier one could not be written.
        """
        self._batch.append((key, part, chunk))
        self._batch_bytes += part.nbytes
        if self._batch_bytes >= _BATCH_BYTES:
            self._submit()

    def put_inline(self, key: str, value: bytes) -> None:
        """Put a value into the index."""
        self._entries[key] = value

    def finish(self, manifest: Callable[[Root], bytes]) -> None:
        """Write all that was put, then the index and the manifest; sync them.

        Args:
            manifest: encodes the manifest of a tree.
        """
        self._submit()
        self._settle_down(list(self._in_flight))
        entries: list[Entry] = sorted((key.encode(), v) for key, v in self._entries.items())
        file = self._take_file()
        nodes, root = encode_tree(
            entries, file=file.name, offset=file.size, node_bytes=NODE_BYTES_MAX
        )
        file.add(np.frombuffer(nodes, np.uint8))
        self._idle.append(file)
        open_files, self._idle = self._idle, []
        self._settle_down([self._threads.submit(file.finish) for file in open_files])
        with _synced_file(os.path.join(self._folder, "manifest.ocdbt")) as descriptor:
            _write_all(descriptor, [manifest(root)])
        self._made = []

    def close(self) -> None:
        """Stop, whatever was reached. Nobody looks at the memory that was put any more.

        Files of values that were put since the last `finish` are removed: where the disk is full,
        the space is needed to say so.
        """
        for task in self._in_flight:
            task.cancel()
        self._threads.shutdown()
        for file in self._made:
            file.abandon()
        self._made, self._idle = [], []

    def _submit(self) -> None:
        if not self._batch:
            return
        batch, size = self._batch, self._batch_bytes
        self._batch, self._batch_bytes = [], 0
        while self._in_flight and sum(self._in_flight.values()) + size > self._in_flight_max:
            self._settle_down([next(iter(self._in_flight))])
        self._in_flight[self._threads.submit(self._write, batch)] = size

    def _settle_down(self, tasks: Sequence[Future[None]]) -> None:
        """Wait for tasks; their first failure is raised."""
        for task in tasks:
            task.result()
            self._in_flight.pop(task, None)

    def _write(self, batch: Sequence[tuple[str, Array, Sequence[int]]]) -> None:
        file = self._take_file()
        for key, part, chunk in batch:
            value, crc = file.append(part, chunk)
            self._entries[key] = value
            self.crcs[key] = crc
        if file.size >= self._file_bytes:
            file.finish()
        else:
            with self._lock:
                self._idle.append(file)

    def _take_file(self) -> _DataFile:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        file = _DataFile(self._folder)
        with self._lock:
            self._made.append(file)
        return file


class _DataFile:
    """One file, appended to. For one thread at a time."""

    def __init__(self, folder: str) -> None:
        # A random name: no two writers, and no second try of one, ever meet.
        self.name = f"d/{secrets.token_hex(16)}"
        self.size = 0
        self._small = bytearray()
        self._path = os.path.join(folder, self.name)
        with _in_our_words(self._path):
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._descriptor = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
            )

    def append(self, part: Array, chunk: Sequence[int]) -> tuple[bytes | Extent, int]:
        """Append a chunk and its checksum. Returns where it lies, or all of it if it is small."""
        crc = 0
        if math.prod(chunk) * part.itemsize + CRC_BYTES <= INLINE_BYTES_MAX:
            value = b"".join(block.tobytes() for block in encoded(part, chunk))
            crc = extend_crc(crc, np.frombuffer(value, np.uint8))
            return value + crc.to_bytes(CRC_BYTES, "little"), crc
        offset = self.size
        for block in encoded(part, chunk):
            crc = extend_crc(crc, block)
            self.add(block)
        self.add(np.frombuffer(crc.to_bytes(CRC_BYTES, "little"), np.uint8))
        return Extent(self.name, offset, self.size - offset), crc

    def add(self, data: Bytes) -> None:
        self.size += data.size
        if data.size < _SMALL_BYTES:
            self._small += data.data
            if len(self._small) < BLOCK_BYTES:
                return
            self._write([self._small])
        else:
            self._write([self._small, data.data] if self._small else [data.data])
        self._small = bytearray()

    def finish(self) -> None:
        """Sync and close."""
        with _in_our_words(self._path):
            try:
                if self._small:
                    self._write([self._small])
                os.fsync(self._descriptor)
            finally:
                self._close()

    def abandon(self) -> None:
        """Close and remove."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write(self, buffers: Sequence[memoryview | bytearray]) -> None:
        with _in_our_words(self._path):
            _write_all(self._descriptor, buffers)


Stored = tuple[Extent, Wanted]


def read_values(
    folder: str, wanted: Sequence[Stored], threads: ThreadPoolExecutor
) -> dict[int, StoredDamage]:
    """Read chunks, those of one file together and in order.

    Args:
        folder: of the database, absolute.
        wanted: where each lies, in any order.
        threads: that read.

    Returns:
        The first damage of each request that has one.

    Raises:
        StorageUnavailable, StorageRefused: storage did not answer, or said no.

    Blocking: until all is read; nothing is written into a target after that.
    """
    damages: dict[int, StoredDamage] = {}
    ordered = sorted(wanted, key=lambda pair: (pair[0].file, pair[0].offset))
    tasks = [threads.submit(_read_batch, folder, batch, damages) for batch in _batches(ordered)]
    wait(tasks)
    for task in tasks:
        task.result()
    return damages


def index_files(folder: str) -> tuple[str, ...]:
    """Files of a database that has no values of its own, by path below its folder."""
    with _in_our_words(folder):
        return ("manifest.ocdbt", *(f"d/{name}" for name in os.listdir(os.path.join(folder, "d"))))


def read_extent(folder: str, extent: Extent) -> bytes:
    """Read one small value. Raises `StoredDamage` when it is not there."""
    path = os.path.join(folder, extent.file)
    data = np.empty(extent.length, np.uint8)
    with _opened(path) as descriptor:
        _reading(descriptor, path, extent.offset)(data)
    return data.tobytes()


def _batches(stored: Sequence[Stored]) -> Iterator[Sequence[Stored]]:
    first, size = 0, 0
    for index, (extent, _) in enumerate(stored):
        if index > first and (size >= _BATCH_BYTES or extent.file != stored[first][0].file):
            yield stored[first:index]
            first, size = index, 0
        size += extent.length
    if stored:
        yield stored[first:]


def _runs(batch: Sequence[Stored]) -> Iterator[Sequence[Stored]]:
    """What is read in one go: small values that lie close together, else one."""
    first = 0
    for index in range(1, len(batch) + 1):
        if index < len(batch):
            before, extent, start = batch[index - 1][0], batch[index][0], batch[first][0].offset
            if (
                before.length <= _SMALL_BYTES
                and extent.length <= _SMALL_BYTES
                and extent.offset - before.offset - before.length <= _GAP_BYTES
                and extent.offset + extent.length - start <= BLOCK_BYTES
            ):
                continue
        yield batch[first:index]
        first = index


def _read_batch(folder: str, batch: Sequence[Stored], damages: dict[int, StoredDamage]) -> None:
    path = os.path.join(folder, batch[0][0].file)
    found: dict[int, StoredDamage] = {}
    try:
        with _opened(path) as descriptor:
            first, last = batch[0][0], batch[-1][0]
            length = last.offset + last.length - first.offset
            with contextlib.suppress(OSError):
                # Only advice: so many bytes are read ahead while others are looked at.
                os.posix_fadvise(descriptor, first.offset, length, os.POSIX_FADV_WILLNEED)
            for run in _runs(batch):
                _read_run(descriptor, path, run, found)
    except StoredDamage as damage:
        for _, wanted in batch:
            found.setdefault(wanted.request, damage)
    # Who looks after it wants to know the file, from the step's folder on.
    name = f"{os.path.basename(folder.rstrip('/'))}/{batch[0][0].file}"
    for request, one in found.items():
        damages.setdefault(
            request,
            StoredDamage(one.expected, f"{one.found} in {name}", is_checksum=one.is_checksum),
        )


def _read_run(
    descriptor: int, path: str, run: Sequence[Stored], damages: dict[int, StoredDamage]
) -> None:
    start = run[0][0].offset
    if len(run) == 1:
        with noted(run[0][1].request, damages):
            run[0][1].accept(_reading(descriptor, path, start))
        return
    together = np.empty(run[-1][0].offset + run[-1][0].length - start, np.uint8)
    try:
        _reading(descriptor, path, start)(together)
    except StoredDamage as damage:
        for _, one in run:
            damages.setdefault(one.request, damage)
        return
    for extent, one in run:
        with noted(one.request, damages):
            one.accept(taking(together[extent.offset - start :]))


def _reading(descriptor: int, path: str, offset: int) -> Callable[[Bytes], None]:
    """The next bytes of a file."""
    position = offset

    def take(buffer: Bytes) -> None:
        nonlocal position
        view = buffer.data
        while view:
            with _in_our_words(path):
                count = os.preadv(descriptor, [view], position)
            if count == 0:
                raise StoredDamage(
                    f"{len(view)} more bytes in {os.path.basename(path)}",
                    "its end",
                    is_checksum=False,
                )
            position += count
            view = view[count:]

    return take


@contextlib.contextmanager
def _opened(path: str) -> Generator[int]:
    """A file to be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        name = os.path.basename(path)
        raise StoredDamage(f"the data file {name}", "nothing", is_checksum=False) from error
    except OSError as error:
        raise translated(error, path) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _in_our_words(path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise translated(error, path) from error


@contextlib.contextmanager
def _synced_file(path: str) -> Generator[int]:
    """A new file, or an old one emptied; synced when the block ends well."""
    with _in_our_words(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, buffers: Sequence[memoryview | bytearray | bytes]) -> None:
    left = [memoryview(buffer) for buffer in buffers]
    while left:
        count = os.writev(descriptor, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
