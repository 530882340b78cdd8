"""What people are told about a job: one line an event, appended."""

from __future__ import annotations

import os

import msgspec

from everstep.controller.local.files import read_or_none
from everstep.controller.local.folder import JobFolder
from everstep.controller.local.records import EventRecord


class EventLog:
    """Appends events and remembers which are there, so that each shows once."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._known: set[str] | None = None

    def emit(self, event: EventRecord) -> None:
        """Append an event unless one of its id is there.

        Durability: survives the death of this process. That of the machine may take the newest
        events, which nothing depends on.
        """
        if self._known is None:
            self._known = {found.id for found in read_events(self._folder)}
        if event.id in self._known:
            return
        line = msgspec.json.encode(event) + b"\n"
        fd = os.open(self._folder.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if _is_torn(self._folder):
                # A writer was killed within its line: that line stays one, and is skipped.
                line = b"\n" + line
            os.write(fd, line)
        finally:
            os.close(fd)
        self._known.add(event.id)


def read_events(folder: JobFolder) -> tuple[EventRecord, ...]:
    """Return the events of a job, oldest first; a line that cannot be read is skipped."""
    data = read_or_none(folder.events) or b""
    found: list[EventRecord] = []
    for line in data.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=EventRecord))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return tuple(found)


def _is_torn(folder: JobFolder) -> bool:
    with folder.events.open("rb") as source:
        size_bytes = source.seek(0, os.SEEK_END)
        if size_bytes == 0:
            return False
        source.seek(size_bytes - 1)
        return source.read(1) != b"\n"
