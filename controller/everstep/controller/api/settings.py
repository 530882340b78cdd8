"""The part of a spec that agents need, resolved: defaults chosen, quantities in bytes."""

from __future__ import annotations

from everstep.controller.api.errors import Problem, SpecError
from everstep.controller.api.quantity import parse_bytes
from everstep.controller.api.spec import JobSpec
from everstep.controller.api.wire import Settings

CHECKPOINT_EVERY_S_DEFAULT = 600.0
"""Where neither `everySteps` nor `everySeconds` is given. A job without any durable step would
start over after the loss of everything."""


def resolve_settings(spec: JobSpec) -> Settings:
    """Resolve an accepted spec.

    Raises:
        SpecError: `snapshot.memory` is not a quantity; `validate` would have said so before.
    """
    checkpoint, timeouts = spec.checkpoint, spec.runtime.timeouts
    snapshot, memory = checkpoint.snapshot, checkpoint.snapshot.memory
    every_s = checkpoint.every_seconds
    if checkpoint.every_steps is None and every_s is None:
        every_s = CHECKPOINT_EVERY_S_DEFAULT
    bytes_max = None if memory is None else parse_bytes(memory)
    if memory is not None and bytes_max is None:
        path = "spec.checkpoint.snapshot.memory"
        problem = Problem(path=path, found=repr(memory), expected="a quantity, for example 16Gi")
        raise SpecError((problem,))
    every, local = snapshot.every_steps, checkpoint.local
    return Settings(
        checkpoint_uri=checkpoint.uri,
        checkpoint_every_steps=checkpoint.every_steps,
        checkpoint_every_s=every_s,
        retention_latest=checkpoint.retention.latest,
        retention_every_steps=checkpoint.retention.every_steps,
        snapshot_every_steps=every if isinstance(every, int) else None,
        snapshot_slots=snapshot.slots,
        snapshot_bytes_max=bytes_max,
        snapshot_replicas=snapshot.replicas,
        local_path=None if local is None else local.path,
        local_every_steps=None if local is None else local.every_steps,
        local_latest=2 if local is None else local.latest,
        report_interval_s=timeouts.report_interval_seconds,
        report_timeout_s=timeouts.report_seconds,
        progress_timeout_s=timeouts.progress_seconds,
        join_timeout_s=timeouts.join_seconds,
        start_grace_s=timeouts.start_seconds,
    )
