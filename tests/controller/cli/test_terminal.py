"""The live view on a terminal: drawn, and readable without colour."""

from __future__ import annotations

import os
import pty
import re
import subprocess

import pytest

from everstep_command import Everstep

pytestmark = pytest.mark.processes

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _run_on_terminal(everstep: Everstep, *words: str, **environment: str) -> tuple[int, str]:
    """Run a command with a terminal as its output; return its exit code and all it wrote."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        everstep.command(*words),
        env={**everstep.environment, "TERM": "xterm", **environment},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=everstep.root,
    ) as drawn:
        os.close(theirs)
        written = bytearray()
        while True:
            try:
                block = os.read(ours, 1 << 16)
            except OSError:
                # The other end was closed: that is how a terminal says that all is read.
                break
            if not block:
                break
            written += block
        os.close(ours)
        code = drawn.wait(timeout=60)
    return code, written.decode(errors="replace")


def test_a_job_is_drawn_until_it_is_finished(everstep: Everstep) -> None:
    path = everstep.job_file(slices=2, words=("steps=60",))
    code, written = _run_on_terminal(everstep, "run", "-f", path)
    text = _CONTROL.sub("", written)
    assert code == 0
    assert "llm   Running   incarnation 1" in text
    for word in ("slice", "state", "snapshot", "loss", "FirstStart"):
        assert word in text
    assert text.rstrip().splitlines()[-1].startswith("llm Succeeded: ")


def test_everything_is_said_in_words_when_there_is_no_colour(everstep: Everstep) -> None:
    everstep.ok("apply", "-f", everstep.job_file(slices=2, words=("steps=100",)), "--wait")
    everstep.ok("kill", "1")
    code, written = _run_on_terminal(everstep, "top", NO_COLOR="1")
    assert code == 0
    assert "\x1b[31m" not in written
    text = _CONTROL.sub("", written)
    assert "Gone" in text
    assert "incarnation 2" in text
