"""Every bit is equal on every mesh of at least two devices (G5)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[2] / "harness"
# Divisors of the 12 logical shards, and a count that leaves slots over (5).
MESHES = "2x1 1x2 2x2 3x2 5x1 12x1"
TIMEOUT_S = 900.0
"""Half a minute of both cores, when nobody else needs them."""


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, str]]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "12",
        "PYTHONPATH": str(HARNESS),
    }
    # Nearly all of it is compiling, for which one process does not use two cores well.
    halves = [MESHES.split()[::2], MESHES.split()[1::2]]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "ordered_meshes", *half],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for half in halves
    ]
    lines: list[dict[str, str]] = []
    try:
        for one in running:
            said, errors = one.communicate(timeout=TIMEOUT_S)
            assert one.returncode == 0, errors
            lines += [json.loads(line) for line in said.splitlines()]
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
                one.communicate()
    return {line.pop("mesh"): line for line in lines}


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("mesh", MESHES.split()[1:])
def test_a_mesh_gives_the_bits_of_two_devices(
    mesh: str, results: dict[str, dict[str, str]]
) -> None:
    assert results[mesh] == results["2x1"]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_the_training_that_is_compared_learns(results: dict[str, dict[str, str]]) -> None:
    # Equal digests of parameters that never moved would prove nothing.
    first_loss = 5.545  # log(256)
    assert float.fromhex(results["2x1"]["last loss"]) < first_loss - 0.5
