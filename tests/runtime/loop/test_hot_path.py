"""What an ordinary step pays: no system call. What it takes is measured by a benchmark."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 2000

PROGRAM = f"""
import os
import jax.numpy as jnp
from everstep.runtime.testing.memory_keeper import MemoryKeeper
run = MemoryKeeper().start()
state = run.restore(lambda: {{"w": jnp.zeros(8)}})
steps = run.steps({STEPS} + 100)
loss = 0.5
for _ in range(50):
    run.step_done(next(steps), state, {{"loss": loss}})
os.getpgid(os.getpid())
for _ in range({STEPS}):
    run.step_done(next(steps), state, {{"loss": loss}})
os.getpgid(os.getpid())
os._exit(0)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_step_without_a_snapshot_makes_no_system_call(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    done = subprocess.run(
        ["strace", "-f", "-o", str(trace), sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    lines = trace.read_text().splitlines()
    main_thread = lines[0].split()[0]
    own = [line for line in lines if line.startswith(main_thread)]
    marks = [i for i, line in enumerate(own) if re.search(r"\bgetpgid\(", line)]
    assert len(marks) == 2
    between = own[marks[0] + 1 : marks[1]]
    calls = [line for line in between if "getpid" not in line]
    # Another thread of the backend may want the interpreter's lock once or twice in that time.
    assert len(calls) <= STEPS // 100, f"{STEPS} steps made {len(calls)} calls: {calls[:5]}"
