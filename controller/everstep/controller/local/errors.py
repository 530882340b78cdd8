"""What can be wrong with a state folder, by who must act next."""

from __future__ import annotations

from pathlib import Path


class LocalError(Exception):
    """Base of the errors of this room. The text is one line for people."""


class NotFound(LocalError):
    """There is no such thing in the state folder."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        super().__init__(f'{kind} "{name}" not found')


class Conflict(LocalError):
    """The job is in a state in which this cannot be done to it."""

    def __init__(self, name: str, message: str) -> None:
        self.name = name
        super().__init__(message)


class RecordCorrupt(LocalError):
    """A file of the state folder does not read as what it should be. It is left as it is."""

    def __init__(self, path: Path, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"{path}: {why}")


class FolderBusy(LocalError):
    """Another process holds what only one may hold."""

    def __init__(self, path: Path, pid: int | None) -> None:
        self.path, self.pid = path, pid
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(f"{path} is held by {holder}")


class FieldRefused(LocalError):
    """A field that is right for a cluster cannot be honoured on this machine."""

    def __init__(self, field: str, found: object, expected: str) -> None:
        self.field, self.found, self.expected = field, found, expected
        super().__init__(f"{field}: found {found!r}, expected {expected}")
