"""The last line of a program's traceback is what people read first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.runtime.agent.supervisor.tail import LogTail, last_error_of

TRACE = """{"event": "joining"}
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    import mine
ModuleNotFoundError: No module named 'mine'
{"event": "after"}
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TRACE, "ModuleNotFoundError: No module named 'mine'"),
        (TRACE + TRACE.replace("mine", "yours"), "ModuleNotFoundError: No module named 'yours'"),
        ("Traceback (most recent call last):\n  File x\nKeyboardInterrupt\n", "KeyboardInterrupt"),
        (
            "Traceback (most recent call last):\n  File x\n    ^^^\nmine.errors.Bad: two\nlines\n",
            "mine.errors.Bad: two",
        ),
        ("nothing of the kind\n", ""),
        ("Traceback (most recent call last):\n  File", ""),
        ("", ""),
    ],
)
def test_the_error_is_the_line_after_the_last_traceback(text: str, found: str) -> None:
    assert last_error_of(text) == found


def test_only_what_was_written_since_the_mark_counts(tmp_path: Path) -> None:
    with (tmp_path / "log").open("a") as log:
        tail = LogTail(log.fileno())
        log.write(TRACE)
        log.flush()
        tail.mark()
        assert tail.last_error() == ""
        log.write(TRACE.replace("mine", "yours"))
        log.flush()
        assert "yours" in tail.last_error()


def test_a_pipe_has_no_last_words() -> None:
    read, write = os.pipe()
    try:
        tail = LogTail(write)
        tail.mark()
        os.write(write, TRACE.encode())
        assert tail.last_error() == ""
    finally:
        os.close(read)
        os.close(write)
