"""Values of a database in an object store: sent from and taken into the caller's memory.

As on a file system (`storage.datafiles`), but what is one file there is several objects here,
each sent by a request of its own while others are under way, and the index is an object by
itself, so that it can be fetched without the values.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from everstep.runtime.errors import InvariantViolated, StorageUnavailable
from everstep.runtime.storage.chunks import (
    CRC_BYTES,
    Array,
    Bytes,
    StoredDamage,
    Wanted,
    encoded,
    extend_crc,
    noted,
)
from everstep.runtime.storage.datafiles import INLINE_BYTES_MAX, NODE_BYTES_MAX
from everstep.runtime.storage.objects import Body, Objects, Stream
from everstep.runtime.storage.ocdbt import Entry, Extent, Root, encode_tree
from everstep.runtime.storage.store import Location, StorageMissing

MANIFEST = "manifest.ocdbt"
OBJECT_BYTES = 8 << 20
"""Smaller values are put together to objects of about this; a larger one is an object by itself."""
THREADS = 8
_GAP_BYTES = 256 << 10
"""Bytes between two values that are fetched and thrown away rather than asked around."""
_READS = 3
"""A value that arrives damaged is asked for again: most damage is done on the way."""

Values = Sequence[tuple[str, Array, Sequence[int]]]


class ObjectWriter:
    """The objects of one database that is being made. Not for two threads at once.

    Durability: after `finish` values, index and manifest are on storage, in this order.
    """

    def __init__(self, location: Location, *, in_flight_bytes: int) -> None:
        self.crcs: dict[str, int] = {}
        """CRC-32C by key, of what was put; complete after `finish`."""
        self._objects = objects_of(location)
        self._prefix = location.path
        self._in_flight_max = in_flight_bytes
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-write")
        self._batch: list[tuple[str, Array, Sequence[int]]] = []
        self._batch_bytes = 0
        self._in_flight: dict[Future[None], int] = {}
        self._entries: dict[str, bytes | Extent] = {}

    def put(self, key: str, part: Array, chunk: Sequence[int]) -> None:
        """Begin to write a chunk. `part` must not change until `finish` or `close`.

        Raises:
            StorageRefused, StorageUnavailable: this or an earlier one could not be written.
        """
        length = stored_bytes(part, chunk)
        if length <= INLINE_BYTES_MAX:
            value, self.crcs[key] = _small_value(part, chunk)
            self.put_inline(key, value)
            return
        self._batch.append((key, part, chunk))
        self._batch_bytes += length
        if self._batch_bytes >= OBJECT_BYTES:
            self._submit()

    def put_inline(self, key: str, value: bytes) -> None:
        """Put a value into the index."""
        self._entries[key] = value

    def finish(self, manifest: Callable[[Root], bytes]) -> None:
        """Write all that was put, then the index and the manifest.

        Args:
            manifest: encodes the manifest of a tree.
        """
        self._submit()
        self._settle_down(list(self._in_flight))
        entries: list[Entry] = sorted((key.encode(), v) for key, v in self._entries.items())
        file = _new_name()
        nodes, root = encode_tree(entries, file=file, offset=0, node_bytes=NODE_BYTES_MAX)
        self._create(file, nodes)
        self._objects.replace(self._prefix + MANIFEST, manifest(root))

    def close(self) -> None:
        """Stop, whatever was reached. Nobody looks at the memory that was put any more."""
        for task in self._in_flight:
            task.cancel()
        self._threads.shutdown()

    def _submit(self) -> None:
        if not self._batch:
            return
        batch, size = self._batch, self._batch_bytes
        self._batch, self._batch_bytes = [], 0
        while self._in_flight and sum(self._in_flight.values()) + size > self._in_flight_max:
            self._settle_down([next(iter(self._in_flight))])
        self._in_flight[self._threads.submit(self._write, batch, size)] = size

    def _settle_down(self, tasks: Sequence[Future[None]]) -> None:
        """Wait for tasks; their first failure is raised."""
        for task in tasks:
            task.result()
            self._in_flight.pop(task, None)

    def _write(self, batch: Values, size: int) -> None:
        name = _new_name()
        self._create(name, Body(size, lambda: self._blocks(batch)))
        offset = 0
        for key, part, chunk in batch:
            length = stored_bytes(part, chunk)
            self._entries[key] = Extent(name, offset, length)
            offset += length

    def _blocks(self, batch: Values) -> Iterator[Bytes]:
        for key, part, chunk in batch:
            crc = 0
            for block in encoded(part, chunk):
                crc = extend_crc(crc, block)
                yield block
            self.crcs[key] = crc
            yield np.frombuffer(crc.to_bytes(CRC_BYTES, "little"), np.uint8)

    def _create(self, name: str, body: Body | bytes) -> None:
        if not self._objects.create(self._prefix + name, body):
            raise StorageUnavailable(
                f"{self._objects.uri}/{self._prefix}{name}: an object of this random name is there"
            )


class ObjectValues:
    """Values in objects; the array library has read their index."""

    def __init__(self, location: Location, index: Mapping[str, bytes | Extent]) -> None:
        self._objects = objects_of(location)
        self._prefix = location.path
        self._index = index
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-read")

    def small(self, key: str) -> bytes:
        """One value, or nothing."""
        value = self._index.get(key, b"")
        if isinstance(value, bytes):
            return value
        data = np.empty(value.length, np.uint8)
        stream = self._opened(value.file, value.offset, value.offset + value.length)
        try:
            stream.take(data)
        except StorageMissing as error:
            raise _lost(value.file, error) from error
        finally:
            stream.close()
        return data.tobytes()

    def read(self, wanted: Sequence[Wanted]) -> dict[int, StoredDamage]:
        """Read chunks, those that lie together by one request.

        Returns:
            The first damage of each request that has one.
        """
        damages: dict[int, StoredDamage] = {}
        stored: list[tuple[Extent, Wanted]] = []
        for one in wanted:
            with noted(one.request, damages):
                value = self._index.get(one.key)
                if value is None:
                    raise StoredDamage(f"a chunk {one.key}", "nothing", is_checksum=False)
                if isinstance(value, bytes):
                    one.accept_all(value)
                else:
                    one.check_length(value.length)
                    stored.append((value, one))
        left = stored
        found: dict[int, StoredDamage] = {}
        for attempt in range(_READS):
            found = {}
            runs = list(_runs(sorted(left, key=_place), alone=attempt > 0))
            tasks = [self._threads.submit(self._read_run, run, found) for run in runs]
            wait(tasks)
            for task in tasks:
                task.result()
            left = [(extent, one) for extent, one in left if id(one) in found]
            if not left:
                break
        for _, one in left:
            damages.setdefault(one.request, found[id(one)])
        return damages

    def _read_run(
        self, run: Sequence[tuple[Extent, Wanted]], damages: dict[int, StoredDamage]
    ) -> None:
        """Read chunks of one object, in order. Damage is noted by the chunk that has it."""
        first, last = run[0][0], run[-1][0]
        stream = self._opened(first.file, first.offset, last.offset + last.length)
        at = first.offset
        try:
            for number, (extent, one) in enumerate(run):
                try:
                    if extent.offset > at:
                        stream.take(np.empty(extent.offset - at, np.uint8))
                    with noted(id(one), damages):
                        one.accept(stream.take)
                except StorageMissing as error:
                    damage = _lost(extent.file, error)
                    damages.update((id(other), damage) for _, other in run[number:])
                    return
                at = extent.offset + extent.length
        finally:
            stream.close()

    def _opened(self, file: str, start: int, stop: int) -> Stream:
        return self._objects.open(self._prefix + file, start, stop)


def objects_of(location: Location) -> Objects:
    """The way to a location's bucket; it must have one."""
    if location.objects is None:
        raise InvariantViolated(f"{location} has no objects")
    return location.objects


def stored_bytes(part: Array, chunk: Sequence[int]) -> int:
    return math.prod(chunk) * part.itemsize + CRC_BYTES


def _new_name() -> str:
    # A random name: no two writers, and no second try of one, ever meet.
    return f"d/{secrets.token_hex(16)}"


def _small_value(part: Array, chunk: Sequence[int]) -> tuple[bytes, int]:
    value = b"".join(block.tobytes() for block in encoded(part, chunk))
    crc = extend_crc(0, np.frombuffer(value, np.uint8))
    return value + crc.to_bytes(CRC_BYTES, "little"), crc


def _place(stored: tuple[Extent, Wanted]) -> tuple[str, int]:
    return stored[0].file, stored[0].offset


def _runs(
    stored: Sequence[tuple[Extent, Wanted]], *, alone: bool
) -> Iterator[Sequence[tuple[Extent, Wanted]]]:
    """What is asked for by one request."""
    first = 0
    for index in range(1, len(stored) + 1):
        if index < len(stored) and not alone:
            before, extent, start = stored[index - 1][0], stored[index][0], stored[first][0]
            end = before.offset + before.length
            if (
                extent.file == before.file
                and 0 <= extent.offset - end <= _GAP_BYTES
                and extent.offset + extent.length - start.offset <= OBJECT_BYTES
            ):
                continue
        yield stored[first:index]
        first = index


def _lost(file: str, error: StorageMissing) -> StoredDamage:
    return StoredDamage(f"the object {file}", str(error.found), is_checksum=False)
