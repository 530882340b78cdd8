"""How a file of the state folder is replaced, and how it is read.

Two kinds: durable ones, which a crash of the machine must not undo, and soft ones, which are
written again within a second or can be found out anew.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"

_serial = itertools.count()


def write_durable(path: Path, data: bytes) -> None:
    """Replace a file as a whole.

    Durability: on return the new content survives a crash of the machine. A crash at any point
    within leaves the old content or the new one, and at most one temporary file beside it.
    """
    temporary = _temporary(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.rename(path)
    sync_folder(path.parent)


def write_soft(path: Path, data: bytes) -> None:
    """Replace a file as a whole, without waiting for the disk.

    Durability: survives the death of this process, not necessarily that of the machine. A reader
    sees the old content or the new one.
    """
    temporary = _temporary(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_all(fd, data)
    finally:
        os.close(fd)
    temporary.rename(path)


def sync_folder(path: Path) -> None:
    """Make renames, creations and removals inside a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_or_none(path: Path) -> bytes | None:
    """Return the content of a file, or None when there is no such file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def remove(path: Path) -> None:
    """Remove a file if it is there."""
    path.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Whether this is what a writer that was killed left behind."""
    return path.name.endswith(TEMPORARY_SUFFIX)


def _temporary(path: Path) -> Path:
    # Two writers never share one: the process id tells them apart, the serial number threads.
    return path.with_name(f".{path.name}.{os.getpid()}.{next(_serial)}{TEMPORARY_SUFFIX}")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
