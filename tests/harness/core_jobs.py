"""Specs for tests of the core, small enough that a story takes seconds of virtual time."""

from __future__ import annotations

from typing import Any

from everstep.controller.api.codec import decode_job
from everstep.controller.api.spec import JobSpec


def make_spec(
    *,
    desired: int = 3,
    hosts: int = 1,
    on_loss: str = "ShrinkImmediately",
    wait_s: float = 5.0,
    slices: dict[str, Any] | None = None,
    scale_up: dict[str, Any] | None = None,
    restart: dict[str, Any] | None = None,
    timeouts: dict[str, Any] | None = None,
    **spec: Any,
) -> JobSpec:
    """Return an accepted spec. Times are short: reports 2 s, hang 20 s, join 25 s, grow at once."""
    document = {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "MultiSliceJob",
        "metadata": {"name": "job"},
        "spec": {
            "slices": {"desired": desired, "hostsPerSlice": hosts, **(slices or {})},
            "template": {"spec": {"containers": [{"name": "t", "command": ["train"]}]}},
            "checkpoint": {
                "uri": "/tmp/job",
                "everySteps": 20,
                "emergency": {"budgetSeconds": 6, "safetyMarginSeconds": 2},
            },
            "runtime": {
                "timeouts": {
                    "reportIntervalSeconds": 0.5,
                    "reportSeconds": 2,
                    "progressSeconds": 20,
                    "joinSeconds": 25,
                    "startSeconds": 60,
                    **(timeouts or {}),
                }
            },
            "elasticity": {
                "onLoss": on_loss,
                "waitForReplacementSeconds": wait_s,
                "scaleUp": {
                    "minUptimeSeconds": 1,
                    "cooldownSeconds": 1,
                    "stabilizationSeconds": 0.5,
                    **(scale_up or {}),
                },
            },
            "restart": {
                "backoff": {"initialSeconds": 2, "maxSeconds": 16, "resetAfterSeconds": 60},
                **(restart or {}),
            },
            **spec,
        },
    }
    return decode_job(document).spec
