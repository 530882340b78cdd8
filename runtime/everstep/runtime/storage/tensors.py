"""Arrays on storage: the only door to tensorstore.

zarr3 arrays in OCDBT databases, one database a writer, merged by reference into one; a `crc32c`
codec after the bytes, no compression. Which arrays, chunks and boxes is decided elsewhere. On a
POSIX file system the values go by our own system calls (`storage.datafiles`), elsewhere by the
array library's; what is stored is the same.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import unquote

import numpy as np
import tensorstore as ts

from everstep.runtime.errors import StateRefused, StorageRefused, StorageUnavailable
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.dtypes import STORABLE, numpy_dtype
from everstep.runtime.storage.chunks import (
    CRC_BYTES,
    Array,
    StoredDamage,
    Wanted,
    cells,
    chunk_key,
    encoded,
    extend_crc,
    noted,
    part_in,
)
from everstep.runtime.storage.datafiles import (
    INLINE_BYTES_MAX,
    THREADS,
    DataWriter,
    Stored,
    index_files,
    read_extent,
    read_values,
)
from everstep.runtime.storage.dataobjects import (
    MANIFEST,
    ObjectValues,
    ObjectWriter,
    objects_of,
)
from everstep.runtime.storage.ocdbt import Extent, Root
from everstep.runtime.storage.store import Location, Space, StorageMissing
from everstep.runtime.storage.zarr import differences, encode_metadata, metadata_key

STORED_AS_BYTES: Mapping[str, str] = {
    "uint2": "uint8",
    "uint4": "uint8",
    "float8_e4m3": "uint8",
}
"""What zarr3 has no type for. One byte an element as numpy holds it; `everstep.json` has the true
dtype, Orbax sees bytes."""

_CONFIG = {"max_inline_value_bytes": INLINE_BYTES_MAX, "max_decoded_node_bytes": 100_000_000}
_NODE_CACHE = "cache_pool#nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """One array as it is stored."""

    name: str
    dtype: str
    """Of the leaf, in numpy's or ml_dtypes' words."""
    shape: tuple[int, ...]
    chunk: tuple[int, ...]


def stored_dtype(name: str) -> str:
    """The zarr3 type in which a dtype is kept. Raises `StateRefused` where there is none."""
    if name not in STORABLE:
        raise StateRefused("<dtype>", name, "a numeric dtype of JAX")
    return STORED_AS_BYTES.get(name, name)


class PartWriter:
    """One writer's database in a draft. Not for two threads at once.

    Durability: after `flush`, what was written before it is synced, directories not (`settle`).
    """

    def __init__(
        self, arrays: Location, folder: str, *, file_bytes: int, in_flight_bytes: int = 256 << 20
    ) -> None:
        """Make an empty database.

        Args:
            arrays: the folder of the checkpoint's arrays.
            folder: the writer's own below it.
            file_bytes: a data file is closed, and synced, when it has about so many bytes.
            in_flight_bytes: so many bytes are begun at most before some are waited for.
        """
        self._location = arrays.below(folder)
        self._writer: DataWriter | ObjectWriter | _ValueWriter
        if self._location.objects is not None:
            self._writer = ObjectWriter(self._location, in_flight_bytes=in_flight_bytes)
        elif self._location.driver == "file":
            self._writer = DataWriter(
                self._location.path, file_bytes=file_bytes, in_flight_bytes=in_flight_bytes
            )
        else:
            self._writer = _ValueWriter(
                self._location, file_bytes=file_bytes, in_flight_bytes=in_flight_bytes
            )
        self._described: set[str] = set()
        self._is_dirty = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, plan: ArrayPlan, box: Box, values: Array) -> None:
        """Begin to write whole chunks. `values` must not change until `flush` or `close`."""
        self._is_dirty = True
        if plan.name not in self._described:
            self._described.add(plan.name)
            self._writer.put_inline(metadata_key(plan.name), _metadata(plan))
        if box.is_empty:
            return
        stored = _as_stored(values, plan.dtype)
        for cell in cells(box, plan.chunk):
            part, _ = part_in(box, cell, plan.chunk)
            self._writer.put(chunk_key(plan.name, cell), _part(stored, part), plan.chunk)

    def flush(self) -> None:
        """Write and sync all that was begun. After an error, `close` is all that can be done."""
        if self._is_dirty:
            self._writer.finish(_manifest)
            self._is_dirty = False

    def close(self) -> None:
        """Stop. What was not flushed is gone; nobody looks at its memory any more."""
        self._writer.close()

    def checksums(self, wanted: Iterable[tuple[str, Sequence[tuple[int, ...]]]]) -> list[list[int]]:
        """CRC-32C of chunks that were flushed: per `(array name, cells)`, one value a cell."""
        crcs = self._writer.crcs
        return [[crcs[chunk_key(name, cell)] for cell in row] for name, row in wanted]


class _ValueWriter:
    """A database whose values the array library writes, a transaction at a time."""

    def __init__(self, location: Location, *, file_bytes: int, in_flight_bytes: int) -> None:
        self.crcs: dict[str, int] = {}
        self._location = location
        with _translated(location):
            self._database = _database(
                location, _context(location), create=True, file_bytes=file_bytes
            )
        self._in_flight_max = in_flight_bytes
        self._in_flight = 0
        self._transaction: Any = None

    def put(self, key: str, part: Array, chunk: Sequence[int]) -> None:
        value, crc = _value(part, chunk)
        self.crcs[key] = crc
        if self._in_flight and self._in_flight + len(value) > self._in_flight_max:
            self._commit()
        self._in_flight += len(value)
        self.put_inline(key, value)

    def put_inline(self, key: str, value: bytes) -> None:
        with _translated(self._location):
            if self._transaction is None:
                self._transaction = ts.Transaction(atomic=False)
            self._database.with_transaction(self._transaction).write(key, value)

    def finish(self, _: object) -> None:
        self._commit()

    def close(self) -> None:
        if self._transaction is not None:
            self._transaction.abort()

    def _commit(self) -> None:
        if self._transaction is not None:
            with _translated(self._location):
                self._transaction.commit_sync()
        self._transaction = None
        self._in_flight = 0


def merge(
    arrays: Location, folders: Sequence[str], small: Sequence[tuple[ArrayPlan, Array]]
) -> tuple[str, ...]:
    """Make one database of the writers' own, by reference, and add small arrays to it.

    Returns:
        Files that it wrote below `arrays` and did not sync; the caller does, with others.

    Durability: elsewhere than on a POSIX file system, on return it is synced.
    """
    if arrays.objects is not None:
        with HeldIndex(arrays) as held:
            held.fetch(folders)
            merge(held.location, folders, small)
            held.send_made()
        return ()
    with _translated(arrays):
        context = _context(arrays, is_synced=False)
        transaction = ts.Transaction(atomic=True)
        parent = _database(arrays, context, create=True).with_transaction(transaction)
        copies = [
            _database(arrays.below(folder), context).experimental_copy_range_to(parent)
            for folder in folders
        ]
        for copy in copies:
            copy.result()
        for plan, value in small:
            parent.write(metadata_key(plan.name), _metadata(plan))
            if value.size:
                stored, _ = _value(_as_stored(value, plan.dtype), plan.chunk)
                parent.write(chunk_key(plan.name, (0,) * value.ndim), stored)
        transaction.commit_sync()
    return index_files(arrays.path) if arrays.driver == "file" else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRead:
    """One box of one array, to be read into memory of the caller."""

    plan: ArrayPlan
    """What is stored must be exactly that."""
    box: Box
    """Inside the array, not empty."""
    out: Array
    """Of the box's shape and the plan's dtype; any strides."""
    crcs: Mapping[tuple[int, ...], int]
    """CRC-32C by grid position, at least of the chunks that the box touches."""


class ArrayReader:
    """The arrays of a committed checkpoint. Any thread.

    The bytes of every chunk that is touched are compared with the CRC-32C that was noted when it
    was written, and so is the one that is stored behind them. So a chunk that is sound but
    another's (two files swapped) does not pass.
    """

    def __init__(self, arrays: Location) -> None:
        self._location = arrays
        self._lock = threading.Lock()
        self._values: _Values | None = None
        self._described: set[str] = set()

    def read(self, reads: Sequence[ArrayRead]) -> dict[int, StoredDamage]:
        """Read boxes together.

        Returns:
            What is damaged, by position in `reads`; those targets are undefined.

        Raises:
            StorageUnavailable, StorageRefused: storage did not answer, or said no.

        Blocking: until all are read; nothing is written into a target after that.
        """
        damages: dict[int, StoredDamage] = {}
        try:
            values = self._opened()
        except StoredDamage as damage:
            return dict.fromkeys(range(len(reads)), damage)
        for number, read in enumerate(reads):
            with noted(number, damages):
                self._check_description(read.plan, values)
        wanted = [
            one
            for number, read in enumerate(reads)
            if number not in damages
            for one in _wanted(number, read)
        ]
        return {**values.read(wanted), **damages}

    def _opened(self) -> _Values:
        with self._lock:
            if self._values is None:
                self._values = _values_at(self._location)
            return self._values

    def _check_description(self, plan: ArrayPlan, values: _Values) -> None:
        """What Orbax would make of the array must be what we make of it."""
        if plan.name in self._described:
            return
        key = metadata_key(plan.name)
        different = differences(values.small(key), stored_dtype(plan.dtype), plan.shape, plan.chunk)
        if different is not None:
            expected, found = different
            raise StoredDamage(f"{expected} in {key}", found, is_checksum=False)
        self._described.add(plan.name)


class _IndexedValues:
    """Values in files that we read ourselves; the array library reads their index."""

    def __init__(self, location: Location) -> None:
        self._location = location
        with _translated(location, reading=True):
            base = ts.KvStore.open(_base(location), context=_context(location)).result()
            self._index = _load_index(lambda *node: ts.ocdbt.dump(base, *node).result())
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-read")

    def small(self, key: str) -> bytes:
        value = self._index.get(key, b"")
        if isinstance(value, bytes):
            return value
        return read_extent(self._location.path, value)

    def read(self, wanted: Sequence[Wanted]) -> dict[int, StoredDamage]:
        damages: dict[int, StoredDamage] = {}
        stored: list[Stored] = []
        for one in wanted:
            with noted(one.request, damages):
                value = self._index.get(one.key)
                if value is None:
                    raise _no_chunk(one.key)
                if isinstance(value, bytes):
                    one.accept_all(value)
                else:
                    one.check_length(value.length)
                    stored.append((value, one))
        return {**read_values(self._location.path, stored, self._threads), **damages}


class _AskedValues:
    """Values that the array library reads, one by one and many at a time."""

    def __init__(self, location: Location) -> None:
        self._location = location
        with _translated(location, reading=True):
            self._database = _database(location, _context(location))

    def small(self, key: str) -> bytes:
        with _translated(self._location, reading=True):
            result = self._database.read(key).result()
        return bytes(result.value) if result.state == "value" else b""

    def read(self, wanted: Sequence[Wanted]) -> dict[int, StoredDamage]:
        damages: dict[int, StoredDamage] = {}
        begun = [(one, self._database.read(one.key)) for one in wanted]
        for one, read in begun:
            with noted(one.request, damages):
                with _translated(self._location, reading=True):
                    result = read.result()
                if result.state != "value":
                    raise _no_chunk(one.key)
                one.accept_all(result.value)
        return damages


def _no_chunk(key: str) -> StoredDamage:
    return StoredDamage(f"a chunk {key}", "nothing", is_checksum=False)


def _wanted(number: int, read: ArrayRead) -> Iterator[Wanted]:
    target = _as_stored(read.out, read.plan.dtype)
    for cell in cells(read.box, read.plan.chunk):
        place, part = part_in(read.box, cell, read.plan.chunk)
        yield Wanted(
            request=number,
            key=chunk_key(read.plan.name, cell),
            chunk=read.plan.chunk,
            box=part,
            target=_part(target, place),
            crc=read.crcs[cell],
        )


_Values = _IndexedValues | _AskedValues | ObjectValues


def _values_at(location: Location) -> _Values:
    if location.objects is None:
        return (_IndexedValues if location.driver == "file" else _AskedValues)(location)
    with HeldIndex(location) as held, _translated(location, reading=True):
        return ObjectValues(location, _load_index(held.dump))


class HeldIndex:
    """The index of databases in a bucket, held in memory, where the array library looks at it.

    So all requests, their credentials, and what is done when one fails, are our own.
    """

    def __init__(self, arrays: Location) -> None:
        self._arrays = arrays
        self._objects = objects_of(arrays)
        self.location = Location(driver="memory", path="", space=Space())
        self._base = ts.KvStore.open(_base(self.location), context=_context(self.location)).result()
        self._fetched: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        erase(self.location)

    def dump(self, *node: str) -> Any:
        """What a node says, or the manifest. Raises `StoredDamage` where it is not there."""
        self._get(_extent(node[0]).file if node else MANIFEST)
        return ts.ocdbt.dump(self._base, *node).result()

    def fetch(self, folders: Sequence[str]) -> None:
        """Get manifest and index of the databases in folders."""
        for folder in folders:
            manifest = f"{folder}/{MANIFEST}"
            self._get(manifest)
            with _translated(self._arrays, reading=True):
                said = ts.ocdbt.dump(self._base / f"{folder}/").result()
            for version in said["versions"]:
                if version["root"].get("location"):
                    self._get(f"{folder}/{_extent(version['root']['location']).file}")

    def send_made(self) -> None:
        """Store what was made here, the manifest last."""
        made = [key.decode() for key in self._base.list().result()]
        for name in sorted(set(made) - self._fetched, key=lambda name: name == MANIFEST):
            data = bytes(self._base.read(name).result().value)
            if name == MANIFEST:
                self._objects.replace(self._arrays.path + name, data)
            elif not self._objects.create(self._arrays.path + name, data):
                raise StorageUnavailable(f"{self._arrays.path}{name}: another object is there")

    def _get(self, name: str) -> None:
        if name in self._fetched:
            return
        try:
            data = self._objects.get(self._arrays.path + name)
        except StorageMissing as error:
            raise StoredDamage(f"the object {name}", "nothing", is_checksum=False) from error
        self._fetched.add(name)
        self._base.write(name, data).result()


def _load_index(dump: Callable[..., Any]) -> dict[str, bytes | Extent]:
    """Where every value of a database lies. Each node is checked against its checksum.

    Args:
        dump: says what is in a node, or without one in the manifest.
    """
    manifest = dump()
    root = manifest["versions"][-1]["root"].get("location")
    index: dict[str, bytes | Extent] = {}
    nodes: list[tuple[bytes, str]] = [(b"", root)] if root else []
    while nodes:
        prefix, location = nodes.pop()
        for entry in dump(location)["entries"]:
            if "location" in entry:
                # What is common to all keys below is left out there.
                nodes.append((prefix + entry["subtree_common_prefix"], entry["location"]))
                continue
            key = (prefix + entry["key"]).decode()
            value = entry.get("inline_value")
            index[key] = _extent(entry["indirect_value"]) if value is None else value
    return index


def _extent(location: str) -> Extent:
    """From `value:<folder>:<file>:<offset>:<length>`, escaped as in a URL."""
    _, folder, file, offset, length = location.split(":")
    return Extent(unquote(folder + file), int(offset), int(length))


def children(space: Space, prefix: str) -> frozenset[str]:
    """Names below a folder of an in-memory place that hold arrays."""
    if space not in _spaces:
        return frozenset()
    location = Location(driver="memory", path=prefix, space=space)
    kvstore = ts.KvStore.open(_base(location), context=_context(location)).result()
    names = kvstore.list().result()
    return frozenset(name.decode().split("/", 1)[0] for name in names)


def erase(location: Location) -> None:
    """Forget the arrays below a folder of an in-memory place."""
    if location.space in _spaces:
        kvstore = ts.KvStore.open(_base(location), context=_context(location)).result()
        kvstore.delete_range(ts.KvStore.KeyRange()).result()


_spaces: weakref.WeakKeyDictionary[Space, Any] = weakref.WeakKeyDictionary()


def _context(location: Location, *, is_synced: bool = True) -> Any:
    """A context of its own for every database that is opened.

    A shared one would remember nodes by path, and take a run that was deleted and begun anew in
    the same folder for the old one.
    """
    # Locks are off: every data file has a random name and every folder one writer, and some
    # cluster file systems have none. Nodes of the databases are cached, arrays are not: they are
    # read once, and memory is the caller's business.
    spec: dict[str, Any] = {
        "cache_pool": {"total_bytes_limit": 0},
        _NODE_CACHE: {"total_bytes_limit": 64_000_000},
        "file_io_concurrency": {"limit": 16},
        "file_io_sync": is_synced,
        "file_io_locking": {"mode": "none"},
    }
    if location.space is None:
        return ts.Context(spec)
    if location.space not in _spaces:
        _spaces[location.space] = ts.Context({"memory_key_value_store": {}})
    return ts.Context(spec, parent=_spaces[location.space])


def _base(location: Location) -> dict[str, str]:
    return location.as_base()


def _database(
    location: Location, context: Any, *, create: bool = False, file_bytes: int = 0
) -> Any:
    spec: dict[str, Any] = {"driver": "ocdbt", "base": _base(location), "cache_pool": _NODE_CACHE}
    if create:
        # Of one that is there, it says itself how it was configured.
        spec["config"] = _CONFIG
    if file_bytes:
        spec["target_data_file_size"] = file_bytes
    return ts.KvStore.open(spec, context=context).result()


def _part(values: Array, box: Box) -> Array:
    """A view, also of a scalar."""
    index: tuple[Any, ...] = (..., *box.slices())
    part: Array = values[index]
    return part


def _as_stored(values: Array, dtype: str) -> Array:
    stored = numpy_dtype(stored_dtype(dtype))
    return values if values.dtype == stored else values.view(stored)


def _value(part: Array, chunk: Sequence[int]) -> tuple[bytes, int]:
    """A chunk as it is stored, and its CRC-32C."""
    data = b"".join(block.tobytes() for block in encoded(part, chunk))
    crc = extend_crc(0, np.frombuffer(data, np.uint8))
    return data + crc.to_bytes(CRC_BYTES, "little"), crc


def _metadata(plan: ArrayPlan) -> bytes:
    return encode_metadata(stored_dtype(plan.dtype), plan.shape, plan.chunk)


def _manifest(root: Root) -> bytes:
    """The manifest of a database that has one version."""
    extent = root.extent
    return bytes(
        ts.ocdbt.undump_manifest(
            {
                "config": {
                    **_CONFIG,
                    "compression": None,
                    "uuid": secrets.token_hex(16),
                    "version_tree_arity_log2": 4,
                },
                "version_tree_nodes": [],
                "versions": [
                    {
                        "commit_time": 1,
                        "generation_number": 1,
                        "root": {
                            "location": f"btreenode::{extent.file}:{extent.offset}:{extent.length}",
                            "statistics": {
                                "num_indirect_value_bytes": root.stored_bytes,
                                "num_keys": root.key_count,
                                "num_tree_bytes": root.tree_bytes,
                            },
                        },
                        "root_height": root.height,
                    }
                ],
            }
        )
    )


@contextlib.contextmanager
def _translated(location: Location, *, reading: bool = False) -> Generator[None, None, None]:
    """Translate what tensorstore raises: it has ValueError, OSError, and a text."""
    try:
        yield
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise _translation(error, location, reading=reading) from error


_FULL = ("No space left", "Disk quota exceeded", "File too large")
_DENIED = ("Permission denied", "PERMISSION_DENIED", "Read-only file system")
_CHECKSUM = ("Digest mismatch", "checksum", "CRC")


def _translation(error: BaseException, location: Location, *, reading: bool) -> Exception:
    text = str(error)
    path = location.path
    first = text.split("[source locations", 1)[0].strip()
    if any(sign in text for sign in _FULL):
        return StorageRefused(path, first, "more space, or fewer checkpoints kept")
    if any(sign in text for sign in _DENIED):
        return StorageRefused(path, first, "a folder that this user may write and read")
    if reading and isinstance(error, ValueError):
        is_checksum = any(sign in text for sign in _CHECKSUM)
        return StoredDamage("what was written", first, is_checksum=is_checksum)
    return StorageUnavailable(f"{path}: {first}", retry_after_s=1.0)
