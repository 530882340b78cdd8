"""The last words of a program, read from the log that it shares with its agent."""

from __future__ import annotations

import os
import re
import stat

LOG_FD = 2
_READ_BYTES = 64 << 10
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")
WORDS_MAX = 300


class LogTail:
    """What was written to this process's standard error since `mark`.

    Only where that is a file: a pipe cannot be read back, and whoever reads it has the words.
    """

    def __init__(self, fd: int = LOG_FD) -> None:
        self._fd = fd
        self._start = 0

    def mark(self) -> None:
        """Forget what was written so far."""
        self._start = self._size() or 0

    def last_error(self) -> str:
        """The last line of the last traceback since `mark`; empty when there is none."""
        size = self._size()
        if size is None:
            return ""
        start = max(self._start, size - _READ_BYTES)
        # Opened anew: the log is open for appending only.
        try:
            with open(f"/proc/self/fd/{self._fd}", "rb") as log:
                log.seek(start)
                text = log.read(size - start).decode(errors="replace")
        except OSError:
            return ""
        return last_error_of(text)

    def _size(self) -> int | None:
        try:
            status = os.fstat(self._fd)
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None


def last_error_of(text: str) -> str:
    """The line of an exception after the last traceback in a log; empty when there is none."""
    _, found, after = text.rpartition(_TRACEBACK)
    if not found:
        return ""
    for line in after.splitlines()[1:]:
        # Lines of code are indented; the exception's own is the first that is not.
        if line and not line[0].isspace() and _ERROR.match(line):
            return line[:WORDS_MAX]
    return ""
