"""The seam to an object store: whole objects by name, and nothing in place.

An object is created by one request and is there whole or not at all. Names are those of the
bucket, not of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from everstep.runtime.storage.chunks import BLOCK_BYTES, Bytes, extend_crc

_GATHERED_BYTES = 64 << 10
"""Smaller blocks are put together before they are sent."""


class Body:
    """The bytes of one object, made anew each time that they are sent."""

    def __init__(self, size: int, blocks: Callable[[], Iterator[Bytes]]) -> None:
        """Of so many bytes; a block is good until the next is asked for."""
        self._size = size
        self._blocks = blocks
        self.crc = 0
        """CRC-32C of what was sent last."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[memoryview]:
        crc = 0
        small = bytearray()
        for block in self._blocks():
            crc = extend_crc(crc, block)
            if block.size < _GATHERED_BYTES:
                small += block.data
                if len(small) < BLOCK_BYTES:
                    continue
            if small:
                yield memoryview(small)
                small = bytearray()
            if block.size >= _GATHERED_BYTES:
                yield block.data
        if small:
            yield memoryview(small)
        self.crc = crc


def crc_of(body: Body | bytes) -> int:
    """CRC-32C, also of a body whose sending was not finished."""
    if isinstance(body, bytes):
        return extend_crc(0, np.frombuffer(body, np.uint8))
    for _ in body:
        pass
    return body.crc


@dataclass(frozen=True, slots=True)
class Stat:
    """What a store says of an object."""

    size: int
    crc: int
    """CRC-32C of all of it."""


@dataclass(frozen=True, slots=True)
class Listing:
    objects: dict[str, Stat]
    folders: tuple[str, ...]
    """Common beginnings, with their `/`."""


class Stream(Protocol):
    """Bytes of an object, in order."""

    def take(self, buffer: Bytes, /) -> None:
        """Fill a buffer with the next bytes."""
        ...

    def close(self) -> None: ...


class Objects(Protocol):
    """The objects of one bucket. Any thread.

    Raises everywhere `StorageRefused` when the store says no, and `StorageUnavailable` when it
    did not answer, or not soundly, after a bounded number of tries.
    Blocking: until it answers; what it takes between tries is bounded by `answers.PATIENCE`.
    """

    @property
    def uri(self) -> str: ...

    def create(self, name: str, body: Body | bytes, /) -> bool:
        """Create an object that must not exist; True when it now has exactly these bytes.

        Durability: on return it is on storage; its size and CRC-32C, as the store computed them,
        were compared with what was sent. After a crash within, it is there whole or not at all.
        """
        ...

    def replace(self, name: str, data: bytes, /) -> None:
        """Create an object, or replace it. Durability: as `create`."""
        ...

    def get(self, name: str, /) -> bytes:
        """All of an object, its CRC-32C compared. Raises `StorageMissing`."""
        ...

    def open(self, name: str, start: int, stop: int, /) -> Stream:
        """Some bytes of an object. What is damaged on the way is the reader's to find.

        Raises, when bytes are taken: `StorageMissing` where there are none.
        """
        ...

    def stat(self, name: str, /) -> Stat | None: ...

    def list(self, prefix: str, /, *, is_deep: bool, most: int | None = None) -> Listing:
        """What begins with a prefix: one level of it, or all below; in order, at most so many."""
        ...

    def delete(self, name: str, /) -> None:
        """Delete an object; none there is no error."""
        ...

    def confirm(self, prefix: str, /) -> None:
        """Ask whether all is there that was accepted here since the last time.

        Raises:
            StorageUnavailable: an object is not there, or is another: it was accepted and lost.
        """
        ...
