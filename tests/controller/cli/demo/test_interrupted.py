"""Ctrl-C in the middle of the demo: it says what became of everything, and that is so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from waiting import wait_for

pytestmark = pytest.mark.processes


def _of_demo(folder: Path) -> list[int]:
    """Processes that were told of this folder."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if any(str(folder) in word for word in told):
            found.append(process.pid)
    return found


def test_an_interrupted_demo_says_that_everything_was_ended_and_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    words = ["demo", "--program", "tiny", "--folder", str(folder)]
    with (tmp_path / "out").open("wb") as out:
        demo = subprocess.Popen(
            [sys.executable, "-m", "everstep.controller.cli.main", *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        try:
            wait_for(lambda: len(_of_demo(folder)) > 3, what="agents of the demo", timeout_s=60)
            demo.send_signal(signal.SIGINT)
            assert demo.wait(timeout=60) == 130
        finally:
            if demo.poll() is None:
                demo.kill()
                demo.wait()
    said = (tmp_path / "out").read_text()
    last = said.rstrip().splitlines()[-1]
    assert last == f"interrupted: every process of the demo was ended; its files are in {folder}"
    assert "Traceback" not in said
    assert _of_demo(folder) == []
