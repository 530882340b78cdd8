"""How much memory a restore takes above what it restores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import everstep.runtime as es

MIB = 1 << 20
PROGRAM = """
import os, sys
import jax, jax.numpy as jnp
import everstep.runtime as es
run, dtype, cast = sys.argv[1], sys.argv[2], sys.argv[3] == "cast"

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field + ":"))

small = {"a": jax.ShapeDtypeStruct((8,), jnp.float32), "b": jax.ShapeDtypeStruct((8,), jnp.float32)}
shape = (6144, 8192)
like = {name: jax.ShapeDtypeStruct(shape, dtype) for name in "ab"}
with es.Checkpoints(run) as checkpoints:
    # What is imported late, and threads' stacks, are there before it is measured.
    checkpoints.restore(small, 1)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = memory("VmRSS")
    restored = jax.block_until_ready(checkpoints.restore(like, 2, cast=cast))
    print("ABOVE", memory("VmHWM") - before, sum(x.nbytes for x in restored.values()))
    assert float(restored["b"][-1, -1]) == 3
"""


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "how"), [("float32", "as saved"), ("bfloat16", "cast")])
def test_a_restore_takes_its_state_and_little_more(tmp_path: Path, dtype: str, how: str) -> None:
    import jax.numpy as jnp

    run = tmp_path / "run"
    with es.Checkpoints(run) as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(8), "b": jnp.ones(8)})
        checkpoints.save(2, {name: jnp.full((6144, 8192), 3.0) for name in "ab"}).wait()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run), dtype, how],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    above, state = map(int, done.stdout.split()[1:])
    assert above <= state + 256 * MIB
