"""From a region's values to the bytes of its chunks, and back. Pure; memory only.

A chunk is stored as the little-endian bytes of its elements in C order, then their CRC-32C, which
is what zarr's `bytes` and `crc32c` codecs make of it. One that reaches over the end of its array
is stored whole, filled up with zeros. Bytes go through in blocks that stay in a processor's cache
between the two who look at them, the checksum and the system call.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from everstep.runtime.layout.boxes import Box, whole

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

CRC_BYTES = 4
BLOCK_BYTES = 1 << 20


class StoredDamage(Exception):
    """What was read is not what was written: internal to this room, the reader says where."""

    def __init__(self, expected: str, found: str, *, is_checksum: bool) -> None:
        self.expected, self.found, self.is_checksum = expected, found, is_checksum
        super().__init__(f"expected {expected}, found {found}")


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


def part_in(box: Box, cell: Sequence[int], chunk: Sequence[int]) -> tuple[Box, Box]:
    """What a box has of a chunk that it touches: counted from the box's start, from the chunk's."""
    first = tuple(i * c for i, c in zip(cell, chunk, strict=True))
    start = tuple(map(max, box.start, first))
    stop = tuple(min(b, f + c) for b, f, c in zip(box.stop, first, chunk, strict=True))
    return _moved(start, stop, box.start), _moved(start, stop, first)


def _moved(start: Sequence[int], stop: Sequence[int], origin: Sequence[int]) -> Box:
    return Box(
        tuple(a - o for a, o in zip(start, origin, strict=True)),
        tuple(b - o for b, o in zip(stop, origin, strict=True)),
    )


def encoded(part: Array, chunk: Sequence[int]) -> Iterator[Bytes]:
    """The bytes of a chunk, block by block; a block is good until the next is asked for.

    Args:
        part: the chunk's values; smaller than the chunk at the end of its array.
        chunk: its shape.
    """
    if part.shape != tuple(chunk):
        full = np.zeros(tuple(chunk), part.dtype)
        full[whole(part.shape).slices()] = part
        part = full
    if part.flags.c_contiguous:
        flat = part.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, BLOCK_BYTES):
            yield flat[start : start + BLOCK_BYTES]
        return
    scratch: Array | None = None
    for rows in _runs(part):
        if scratch is None:
            scratch = np.empty(rows.shape, part.dtype)
        block = scratch[: len(rows)]
        block[...] = rows
        yield block.reshape(-1).view(np.uint8)


def decode(
    take: Callable[[Bytes], object], chunk: Sequence[int], wanted: Box, target: Array
) -> tuple[int, int]:
    """Bring the wanted part of a chunk to its place, and look at every byte of the chunk.

    Args:
        take: fills a buffer with the next bytes of what is stored, all of it or an error.
        chunk: its shape.
        wanted: not empty, counted from the chunk's start.
        target: of `wanted`'s shape, any strides; of the stored dtype.

    Returns:
        The CRC-32C of the chunk's bytes, and the one that is stored behind them. The caller
        compares; only then `target` may be used.
    """
    crc = 0
    if target.shape == tuple(chunk) and target.flags.c_contiguous:
        flat = target.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, BLOCK_BYTES):
            block = flat[start : start + BLOCK_BYTES]
            take(block)
            crc = extend_crc(crc, block)
    else:
        axis = _first_long(chunk)
        inner = tuple(chunk[axis:])
        count = _row_count(math.prod(inner[1:]) * target.itemsize)
        scratch = np.empty((min(count, inner[0]), *inner[1:]), target.dtype)
        place = target[(0,) * axis]
        low, high = wanted.start[axis], wanted.stop[axis]
        rest = wanted.slices()[axis + 1 :]
        for first in range(0, inner[0], count):
            rows = scratch[: min(count, inner[0] - first)]
            block = rows.reshape(-1).view(np.uint8)
            take(block)
            crc = extend_crc(crc, block)
            a, b = max(low, first), min(high, first + len(rows))
            if a < b:
                place[a - low : b - low] = rows[(slice(a - first, b - first), *rest)]
    stored = np.empty(CRC_BYTES, np.uint8)
    take(stored)
    return crc, int.from_bytes(stored.tobytes(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A part of a stored chunk, and where it goes."""

    request: int
    """Number of the request that it is of."""
    key: str
    chunk: tuple[int, ...]
    box: Box
    """Counted from the chunk's start."""
    target: Array
    """Of the box's shape and the stored dtype, any strides."""
    crc: int
    """Noted when the chunk was written."""

    def accept(self, take: Callable[[Bytes], object]) -> None:
        """Bring it to its place. Raises `StoredDamage`."""
        computed, stored = decode(take, self.chunk, self.box, self.target)
        for found in (computed, stored):
            if found != self.crc:
                raise StoredDamage(
                    f"crc32c {self.crc:08x} of {self.key}", f"crc32c {found:08x}", is_checksum=True
                )

    def accept_all(self, value: bytes) -> None:
        """The same with all that is stored, at once."""
        self.check_length(len(value))
        self.accept(taking(np.frombuffer(value, np.uint8)))

    def check_length(self, found: int) -> None:
        expected = math.prod(self.chunk) * self.target.itemsize + CRC_BYTES
        if found != expected:
            raise StoredDamage(
                f"{expected} bytes of {self.key}", f"{found} bytes", is_checksum=False
            )


@contextlib.contextmanager
def noted(request: int, damages: dict[int, StoredDamage]) -> Generator[None]:
    """Note the first damage of a request, and go on."""
    try:
        yield
    except StoredDamage as damage:
        damages.setdefault(request, damage)


def taking(data: Bytes) -> Callable[[Bytes], None]:
    """The next bytes from memory."""
    position = 0

    def take(buffer: Bytes) -> None:
        nonlocal position
        buffer[:] = data[position : position + buffer.size]
        position += buffer.size

    return take


def extend_crc(crc: int, data: Bytes) -> int:
    return int(google_crc32c.extend(crc, data))


def _runs(part: Array) -> Iterator[Array]:
    """Runs of rows, in order, of about a block each."""
    rows = part[(0,) * _first_long(part.shape)]
    count = _row_count(rows.nbytes // len(rows))
    for first in range(0, len(rows), count):
        yield rows[first : first + count]


def _first_long(shape: Sequence[int]) -> int:
    """The first axis with more than one; axes before it make nothing but one row."""
    return next((axis for axis, size in enumerate(shape) if size > 1), 0)


def _row_count(row_bytes: int) -> int:
    return max(BLOCK_BYTES // max(row_bytes, 1), 1)
