"""Ways in which a file that was whole is not any more, each undone at the end of its block."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Generator, Iterator
from pathlib import Path


@contextlib.contextmanager
def holding(file: Path, data: bytes | None) -> Generator[None]:
    """A file with another content, or missing."""
    good = file.read_bytes()
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    try:
        yield
    finally:
        file.write_bytes(good)


@contextlib.contextmanager
def exchanged(first: Path, second: Path) -> Generator[None]:
    spare = first.parent / "spare"
    _exchange(first, second, spare)
    try:
        yield
    finally:
        _exchange(first, second, spare)


def _exchange(first: Path, second: Path, spare: Path) -> None:
    for source, target in ((first, spare), (second, first), (spare, second)):
        os.rename(source, target)


def flipped(data: bytes, dice: random.Random) -> bytes:
    """One bit is another."""
    bad = bytearray(data)
    bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
    return bytes(bad)


def files_below(folder: Path) -> list[Path]:
    return sorted(found for found in folder.rglob("*") if found.is_file())


def shortened(data: bytes) -> Iterator[bytes | None]:
    """Missing, empty, a half, and all but the last byte."""
    yield from (None, b"", data[: len(data) // 2], data[:-1])
