"""Arrays on storage: the only door to tensorstore.

zarr3 arrays in OCDBT databases, one database a writer, merged by reference into one; a `crc32c`
codec after the bytes, no compression. Which arrays, chunks and boxes is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorstore as ts
from numpy.typing import NDArray

from everstep.runtime.errors import StateRefused, StorageRefused, StorageUnavailable
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.dtypes import STORABLE, itemsize, numpy_dtype
from everstep.runtime.storage.store import Location, Space

Array = NDArray[Any]

STORED_AS_BYTES: Mapping[str, str] = {
    "uint2": "uint8",
    "uint4": "uint8",
    "float8_e4m3": "uint8",
}
"""What zarr3 has no type for. One byte an element as numpy holds it; `everstep.json` has the true
dtype, Orbax sees bytes."""

_INLINE_BYTES_MAX = 1024
_NODE_BYTES_MAX = 100_000_000
_CRC_BYTES = 4
_NODE_CACHE = "cache_pool#nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """One array as it is stored."""

    name: str
    dtype: str
    """Of the leaf, in numpy's or ml_dtypes' words."""
    shape: tuple[int, ...]
    chunk: tuple[int, ...]


class StoredDamage(Exception):
    """What was read is not what was written: internal to this room, the reader says where."""

    def __init__(self, expected: str, found: str, *, is_checksum: bool) -> None:
        self.expected, self.found, self.is_checksum = expected, found, is_checksum
        super().__init__(f"expected {expected}, found {found}")


def stored_dtype(name: str) -> str:
    """The zarr3 type in which a dtype is kept. Raises `StateRefused` where there is none."""
    if name not in STORABLE:
        raise StateRefused("<dtype>", name, "a numeric dtype of JAX")
    return STORED_AS_BYTES.get(name, name)


def cells(box: Box, chunk: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Grid positions of the chunks that a box touches, in C order."""
    return itertools.product(
        *(
            range(a // c, -(-b // c) if b > a else a // c)
            for a, b, c in zip(box.start, box.stop, chunk, strict=True)
        )
    )


def chunk_key(name: str, cell: Sequence[int]) -> str:
    return "/".join((name, "c", *map(str, cell)))


class PartWriter:
    """One writer's database in a draft. Not for two threads at once.

    Durability: after `flush`, what was written before it is synced, directories not (`settle`).
    """

    def __init__(self, arrays: Location, folder: str, *, file_bytes: int) -> None:
        """Open or create.

        Args:
            arrays: the folder of the checkpoint's arrays.
            folder: the writer's own below it.
            file_bytes: a data file is closed, and synced, when it has about so many bytes.
        """
        self._location = arrays.below(folder)
        self._context = _context(self._location)
        self._file_bytes = file_bytes
        self._transaction: Any = None
        self._open: dict[str, Any] = {}
        self._pending: list[Any] = []

    def write(self, plan: ArrayPlan, box: Box, values: Array) -> None:
        """Begin to write whole chunks. `values` must not change until `flush`."""
        with _translated(self._location):
            if self._transaction is None:
                self._transaction = ts.Transaction(atomic=False)
            target = self._open.get(plan.name)
            if target is None:
                target = self._open[plan.name] = ts.open(
                    _array_spec(self._location, plan, file_bytes=self._file_bytes),
                    open=True,
                    create=True,
                    context=self._context,
                    transaction=self._transaction,
                ).result()
            if not box.is_empty:
                self._pending.append(
                    target[box.slices()].write(
                        _as_stored(values, plan.dtype), can_reference_source_data_indefinitely=True
                    )
                )

    def flush(self) -> None:
        """Write and sync all that was begun."""
        if self._transaction is None:
            return
        with _translated(self._location):
            for pending in self._pending:
                pending.copy.result()
            self._transaction.commit_sync()
        self._transaction = None
        self._open.clear()
        self._pending.clear()

    def checksums(self, wanted: Iterable[tuple[str, Sequence[tuple[int, ...]]]]) -> list[list[int]]:
        """The stored CRC-32C of chunks: per `(array name, cells)`, one value a cell."""
        with _translated(self._location):
            database = _database(self._location, self._context)
            reads = [
                [_read_checksum(database, chunk_key(name, cell)) for cell in wanted_cells]
                for name, wanted_cells in wanted
            ]
            return [[_checksum(read) for read in row] for row in reads]


def merge(
    arrays: Location, folders: Sequence[str], small: Sequence[tuple[ArrayPlan, Array]]
) -> None:
    """Make one database of the writers' own, by reference, and add small arrays to it.

    Durability: on return it is synced, directories not. After a crash within, it is there whole
    or not at all.
    """
    with _translated(arrays):
        context = _context(arrays)
        transaction = ts.Transaction(atomic=True)
        parent = _database(arrays, context, create=True).with_transaction(transaction)
        copies = [
            _database(arrays.below(folder), context).experimental_copy_range_to(parent)
            for folder in folders
        ]
        for copy in copies:
            copy.result()
        for plan, value in small:
            target = ts.open(
                _array_spec(arrays, plan, file_bytes=0),
                create=True,
                open=True,
                context=context,
                transaction=transaction,
            ).result()
            target.write(_as_stored(value, plan.dtype)).result()
        transaction.commit_sync()


class ArrayReader:
    """The arrays of a committed checkpoint. Any thread.

    Every chunk is checked twice: its bytes against the CRC-32C stored with them, by the codec, and
    that CRC against the one that was noted when it was written. So a chunk that is sound but
    another's (two files swapped) does not pass.
    """

    def __init__(self, arrays: Location) -> None:
        self._location = arrays
        self._context = _context(arrays)
        self._database: Any = None
        self._open: dict[str, Any] = {}
        self._checked: set[str] = set()

    def begin(
        self, plan: ArrayPlan, box: Box, out: Array, crcs: Mapping[tuple[int, ...], int]
    ) -> PendingRead:
        """Begin to read a box into `out`, which must not be touched until `finish`.

        Args:
            plan: of the array; what is stored must be exactly that.
            box: inside the array, not empty.
            out: of the box's shape and the plan's dtype; any strides.
            crcs: CRC-32C by grid position, at least of the chunks that the box touches.
        """
        with _translated(self._location, reading=True):
            if self._database is None:
                self._database = _database(self._location, self._context)
            checks: list[tuple[str, int, Any]] = []
            for cell in cells(box, plan.chunk):
                key = chunk_key(plan.name, cell)
                if key not in self._checked:
                    checks.append((key, crcs[cell], _read_checksum(self._database, key)))
            source = self._source(plan)
            view = source[box.slices()]
            if box.start:
                view = view[ts.d[:].translate_to[(0,) * len(box.start)]]
            target = ts.array(_as_stored(out, plan.dtype))
            return PendingRead(self, checks, target.write(view))

    def finish(self, pending: PendingRead) -> None:
        """Wait for a read. Raises `StoredDamage`."""
        with _translated(self._location, reading=True):
            for key, expected, read in pending.checks:
                found = _checksum(read)
                if found != expected:
                    raise StoredDamage(
                        f"crc32c {expected:08x} of {key}", f"crc32c {found:08x}", is_checksum=True
                    )
            pending.copy.result()
        self._checked.update(key for key, _, _ in pending.checks)

    def _source(self, plan: ArrayPlan) -> Any:
        source = self._open.get(plan.name)
        if source is None:
            source = self._open[plan.name] = ts.open(
                _array_spec(self._location, plan, file_bytes=0),
                open=True,
                context=self._context,
            ).result()
        return source


class PendingRead:
    """A read that was begun."""

    def __init__(self, owner: ArrayReader, checks: list[tuple[str, int, Any]], copy: Any) -> None:
        self._owner = owner
        self.checks = checks
        self.copy = copy

    def finish(self) -> None:
        self._owner.finish(self)


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


def _context(location: Location) -> Any:
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
        "file_io_sync": True,
        "file_io_locking": {"mode": "none"},
    }
    if location.space is None:
        return ts.Context(spec)
    if location.space not in _spaces:
        _spaces[location.space] = ts.Context({"memory_key_value_store": {}})
    return ts.Context(spec, parent=_spaces[location.space])


def _base(location: Location) -> dict[str, Any]:
    return {"driver": location.driver, "path": location.path}


def _database_spec(location: Location, *, file_bytes: int) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "driver": "ocdbt",
        "base": _base(location),
        "cache_pool": _NODE_CACHE,
        "config": {
            "max_inline_value_bytes": _INLINE_BYTES_MAX,
            "max_decoded_node_bytes": _NODE_BYTES_MAX,
        },
    }
    if file_bytes:
        spec["target_data_file_size"] = file_bytes
    return spec


def _database(location: Location, context: Any, *, create: bool = False) -> Any:
    spec = _database_spec(location, file_bytes=0)
    if not create:
        # What is there says how it was configured.
        del spec["config"]
    return ts.KvStore.open(spec, context=context).result()


def _array_spec(location: Location, plan: ArrayPlan, *, file_bytes: int) -> dict[str, Any]:
    dtype = stored_dtype(plan.dtype)
    is_wide = itemsize(dtype) > 1
    endian = {"configuration": {"endian": "little"}} if is_wide else {}
    database = _database_spec(location, file_bytes=file_bytes)
    database["path"] = f"{plan.name}/"
    return {
        "driver": "zarr3",
        "kvstore": database,
        "metadata": {
            "data_type": dtype,
            "shape": list(plan.shape),
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(plan.chunk)},
            },
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"name": "bytes", **endian}, {"name": "crc32c"}],
        },
        # Absence must be told from zeros.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        "recheck_cached_metadata": "open",
        "recheck_cached_data": "open",
    }


def _as_stored(values: Array, dtype: str) -> Array:
    stored = numpy_dtype(stored_dtype(dtype))
    return values if values.dtype == stored else values.view(stored)


def _read_checksum(database: Any, key: str) -> Any:
    return database.read(key, byte_range=slice(-_CRC_BYTES, None))


def _checksum(read: Any) -> int:
    result = read.result()
    if result.state != "value":
        raise StoredDamage("a chunk", f"nothing (state {result.state})", is_checksum=False)
    return int.from_bytes(result.value, "little")


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
