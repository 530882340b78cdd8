"""Builders of jobs for tests of the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep.controller.api.codec import decode_job
from everstep.controller.api.spec import MultiSliceJob


def job_document(
    name: str = "llm",
    *,
    folder: Path,
    slices: int = 2,
    hosts: int = 1,
    words: tuple[str, ...] = (),
    **spec: Any,
) -> dict[str, Any]:
    """Return a small job as plain data; `spec` replaces whole parts of its spec.

    Args:
        name: of the job.
        folder: its checkpoints are said to lie there.
        slices: desired and greatest count.
        hosts: per slice.
        words: program of the obedient agent.
        spec: parts of the spec, in camelCase.
    """
    return {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "MultiSliceJob",
        "metadata": {"name": name},
        "spec": {
            "slices": {"desired": slices, "hostsPerSlice": hosts},
            "template": {
                "spec": {
                    "containers": [
                        {
                            "name": "trainer",
                            "command": list(words) or ["steps=1000000"],
                            "workingDir": str(folder),
                        }
                    ],
                    "terminationGracePeriodSeconds": 5,
                }
            },
            "checkpoint": {
                "uri": f"file://{folder}/checkpoints",
                "emergency": {"budgetSeconds": 30, "safetyMarginSeconds": 1},
            },
            "runtime": {
                "timeouts": {
                    "reportIntervalSeconds": 1,
                    "reportSeconds": 5,
                    "progressSeconds": 20,
                    "joinSeconds": 30,
                    "startSeconds": 60,
                }
            },
            "elasticity": {
                "onLoss": "ShrinkImmediately",
                "scaleUp": {
                    "minUptimeSeconds": 0,
                    "cooldownSeconds": 0,
                    "stabilizationSeconds": 0,
                },
            },
            **spec,
        },
    }


def make_job(name: str = "llm", *, folder: Path, **options: Any) -> MultiSliceJob:
    return decode_job(job_document(name, folder=folder, **options))
