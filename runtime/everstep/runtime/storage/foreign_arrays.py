"""Arrays that Orbax wrote: the second door to tensorstore, for reading only.

zarr or zarr3, in one OCDBT database or in a folder an array, with whatever codecs it was given.
Only a codec with a checksum lets a byte of an array be verified; most have none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from everstep.runtime.errors import StorageRefused, StorageUnavailable
from everstep.runtime.layout.boxes import Box
from everstep.runtime.storage.chunks import StoredDamage
from everstep.runtime.storage.store import Location

Array = NDArray[Any]
_NODE_CACHE = "cache_pool#nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """What an array says of itself."""

    dtype: str
    """In numpy's or ml_dtypes' words."""
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    """No less is ever read."""
    is_checked: bool
    """Every chunk has a checksum, and reading compares it."""


class ForeignArrays:
    """The arrays of one item. Any thread. Never writes."""

    def __init__(
        self, location: Location, *, is_ocdbt: bool, is_zarr3: bool, is_whole: bool
    ) -> None:
        """Say how they are kept; nothing is opened.

        Args:
            location: the item's folder.
            is_ocdbt: in one database; else each in a folder of its own.
            is_zarr3: else zarr's version 2.
            is_whole: a chunk that is missing is an error; else it is one of zeros.
        """
        self._location = location
        self._is_ocdbt, self._is_zarr3, self._is_whole = is_ocdbt, is_zarr3, is_whole
        # A context of its own: a shared one would take a folder that was replaced for the old one.
        # Arrays are not cached, they are read once; locks are off, some file systems have none.
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                _NODE_CACHE: {"total_bytes_limit": 64_000_000},
                "file_io_concurrency": {"limit": 16},
                "file_io_locking": {"mode": "none"},
            }
        )
        self._opened: dict[str, Any] = {}

    def describe(self, names: Iterable[str]) -> dict[str, StoredArray | StoredDamage]:
        """Open arrays together; what cannot be opened is said in its place.

        Raises:
            StorageUnavailable, StorageRefused: storage did not answer, or said no.
        """
        begun: dict[str, Any] = {}
        found: dict[str, StoredArray | StoredDamage] = {}
        for name in names:
            try:
                with self._translated():
                    begun[name] = ts.open(self._spec(name), context=self._context)
            except StoredDamage as damage:
                found[name] = damage
        for name, opening in begun.items():
            try:
                with self._translated():
                    self._opened[name] = opening.result()
            except StoredDamage as damage:
                found[name] = damage
            else:
                found[name] = _described(self._opened[name])
        return found

    def read(self, reads: Sequence[tuple[str, Box, Array]]) -> dict[int, StoredDamage]:
        """Read boxes of arrays that were described, each into its own array.

        Returns:
            What is damaged, by position in `reads`; those targets are undefined.

        Raises:
            StorageUnavailable, StorageRefused: storage did not answer, or said no.

        Blocking: until all are read; nothing is written into a target after that.
        """
        begun: list[tuple[int, Any]] = []
        damages: dict[int, StoredDamage] = {}
        failure: StorageUnavailable | StorageRefused | None = None
        for number, (name, box, out) in enumerate(reads):
            source = self._opened[name]
            if box.start:
                source = source[box.slices()].translate_to[(0,) * len(box.start)]
            begun.append((number, ts.array(out).write(source)))
        for number, reading in begun:
            try:
                with self._translated():
                    reading.result()
            except StoredDamage as damage:
                damages[number] = damage
            except (StorageUnavailable, StorageRefused) as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return damages

    def scalars(self, names: Sequence[str]) -> Mapping[str, Any | StoredDamage]:
        """The values of arrays of rank 0 that were described, as numpy has them."""
        outs = [np.empty((), self._opened[name].dtype.numpy_dtype) for name in names]
        box = Box((), ())
        damages = self.read([(name, box, out) for name, out in zip(names, outs, strict=True)])
        return {
            name: damages.get(number, out[()])
            for number, (name, out) in enumerate(zip(names, outs, strict=True))
        }

    def _spec(self, name: str) -> dict[str, Any]:
        base = self._location.as_base()
        if self._is_ocdbt:
            kvstore: dict[str, Any] = {
                "driver": "ocdbt",
                "base": base,
                "cache_pool": _NODE_CACHE,
                "path": f"{name}/",
            }
        else:
            kvstore = {**base, "path": f"{self._location.path}{name}/"}
        return {
            "driver": "zarr3" if self._is_zarr3 else "zarr",
            "kvstore": kvstore,
            "open": True,
            "fill_missing_data_reads": not self._is_whole,
        }

    @contextlib.contextmanager
    def _translated(self) -> Generator[None, None, None]:
        """Translate what tensorstore raises: it has a few classes, and a text."""
        try:
            yield
        except (ValueError, OSError, KeyError, RuntimeError, NotImplementedError) as error:
            raise _translation(error, self._location.path) from error


_DENIED = ("Permission denied", "PERMISSION_DENIED")
_CHECKSUM = ("Digest mismatch", "checksum", "CRC")


def _translation(error: BaseException, path: str) -> Exception:
    text = str(error)
    first = " ".join(text.split("[source locations", 1)[0].split("[tensorstore_spec", 1)[0].split())
    if any(sign in text for sign in _DENIED):
        return StorageRefused(path, first, "a folder that this user may read")
    if isinstance(error, ValueError | NotImplementedError):
        is_checksum = any(sign in text for sign in _CHECKSUM)
        return StoredDamage("what was written", first, is_checksum=is_checksum)
    return StorageUnavailable(f"{path}: {first}", retry_after_s=1.0)


def _described(array: Any) -> StoredArray:
    shape = tuple(array.shape)
    # Of rank 0 it has no layout of chunks.
    chunk = array.chunk_layout.read_chunk.shape or ()
    codec = array.codec
    return StoredArray(
        dtype=str(array.dtype.numpy_dtype.name),
        shape=shape,
        # An array may end within its chunk: what is asked for never reaches over that end.
        chunk=tuple(min(c, max(s, 1)) for c, s in zip(chunk, shape, strict=True)),
        is_checked=codec is not None and _has_checksum(codec.to_json().get("codecs", ())),
    )


def _has_checksum(codecs: Any) -> bool:
    """Whether a chain of codecs of zarr3 ends in one that notices a changed byte."""
    for codec in codecs:
        name, configuration = codec.get("name"), codec.get("configuration", {})
        if name == "crc32c" or (name == "zstd" and configuration.get("checksum")):
            return True
        if name == "sharding_indexed" and _has_checksum(configuration.get("codecs", ())):
            return True
    return False
