"""The training programs that a story can be played with, and the job that runs them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A training program and what its host needs."""

    module: str
    devices_per_host: int
    environment: dict[str, str] = field(default_factory=dict[str, str])
    snapshot_every_steps: int
    checkpoint_every_steps: int


LANGUAGE_MODEL = Program(
    module="everstep.runtime.examples.language_model",
    devices_per_host=2,
    # A step that is watched takes a while, as a real one does: capacity that returns is granted
    # before the training is over, on any machine.
    environment={"DATA": "-1", "FSDP": "1", "REDUCTION": "ordered", "STEP_S": "0.25"},
    snapshot_every_steps=5,
    checkpoint_every_steps=20,
)
TINY = Program(
    module="everstep.runtime.examples.tiny",
    devices_per_host=2,
    environment={"DATA": "-1", "FSDP": "1", "REDUCTION": "ordered", "STEP_S": "0.1"},
    snapshot_every_steps=3,
    checkpoint_every_steps=10,
)
PROGRAMS = {"language-model": LANGUAGE_MODEL, "tiny": TINY}


def job_manifest(
    program: Program,
    *,
    name: str,
    slice_count: int,
    checkpoints: Path,
    environment: dict[str, str],
    python: str,
) -> dict[str, object]:
    """The `MultiSliceJob` of one run, as it would be written in YAML.

    Args:
        slice_count: desired and greatest count; the smallest is 1.
        checkpoints: folder of the run's checkpoints.
        environment: on top of the program's own.
        python: interpreter that runs the program.
    """
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(program.devices_per_host)}
    # Stories that are played one after the other share what they compiled, where they say so.
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", checkpoints.parent.parent / "compiled")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(compiled)}
    variables = devices | cache | program.environment | environment
    return {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "MultiSliceJob",
        "metadata": {"name": name},
        "spec": {
            "slices": {"desired": slice_count, "min": 1, "max": slice_count, "hostsPerSlice": 1},
            "template": {
                "spec": {
                    "containers": [
                        {
                            "name": "trainer",
                            "command": [python, "-m", program.module],
                            "workingDir": os.getcwd(),
                            "env": [{"name": k, "value": v} for k, v in variables.items()],
                        }
                    ]
                }
            },
            "runtime": {
                "timeouts": {
                    "reportIntervalSeconds": 0.5,
                    "reportSeconds": 4,
                    "progressSeconds": 60,
                    "joinSeconds": 90,
                }
            },
            "checkpoint": {
                "uri": checkpoints.as_uri(),
                "everySteps": program.checkpoint_every_steps,
                "retention": {"latest": 2},
                "emergency": {"budgetSeconds": 5, "safetyMarginSeconds": 1},
                "snapshot": {"everySteps": program.snapshot_every_steps},
            },
            "elasticity": {
                "onLoss": "WaitThenShrink",
                "waitForReplacementSeconds": 1,
                "scaleUp": {
                    "minUptimeSeconds": 1,
                    "cooldownSeconds": 1,
                    "stabilizationSeconds": 0,
                },
            },
            "restart": {"maxDisruptionsPerHour": 100},
        },
    }
