"""What equal bits cost: a step with ordered reduction against the same step in one program.

The language model of the examples, one process, CPU devices in the place of slices: so it measures
the arithmetic and the extra programs, and not a network. Steps of both kinds are taken in turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.figures import Arguments, Figure, alternating, compared

DEVICES = 6
MESHES = ((2, 1), (1, 2), (6, 1), (3, 2))
"""Sizes of data and fsdp."""
BATCH = 12


def run(arguments: Arguments) -> list[Figure]:
    # Settled before jax is imported.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(DEVICES))
    meshes = MESHES[:1] if arguments.quick else MESHES
    return [_figure(data, fsdp, 3 if arguments.quick else 15) for data, fsdp in meshes]


def _figure(data: int, fsdp: int, count: int) -> Figure:
    ordered, fast = alternating(
        _make_step(data, fsdp, "ordered"), _make_step(data, fsdp, "fast"), count=count
    )
    return compared(
        f"step with ordered reduction, data={data} fsdp={fsdp}",
        ordered,
        "s",
        against="one program",
        against_value=fast,
    )


def _make_step(data: int, fsdp: int, reduction: str) -> Callable[[], float]:
    """A function that takes one step and returns its seconds."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from everstep.runtime.examples import language_model as model
    from everstep.runtime.loop.data import IndexedDataset, place_batch, place_logical
    from everstep.runtime.loop.randomness import key_of
    from everstep.runtime.loop.reduction import (
        LOGICAL_SHARDS,
        fast_gradients,
        make_update,
        ordered_gradients,
    )

    devices = np.array(jax.devices()[: data * fsdp]).reshape(1, data, fsdp)
    mesh = Mesh(devices, ("slice", "data", "fsdp"))
    optimizer = model.make_optimizer(200)

    def init() -> Any:
        params = model.init_params(jax.random.key(0))
        return params, optimizer.init(params)

    shardings = model.shardings(mesh)(jax.eval_shape(init))
    params, state = jax.jit(init, out_shardings=shardings)()
    dataset = IndexedDataset(model.Windows(model.read_text()), batch_size=BATCH)
    is_ordered = reduction == "ordered"
    gradients_of = (
        ordered_gradients(mesh, model.loss_fn, LOGICAL_SHARDS)
        if is_ordered
        else fast_gradients(mesh, model.loss_fn)
    )
    update = make_update(optimizer, params, state)
    taken = 0

    def step() -> float:
        nonlocal params, state, taken
        batch = (
            place_logical(dataset, taken, mesh, LOGICAL_SHARDS)
            if is_ordered
            else place_batch(dataset, taken, mesh)
        )
        key = key_of(0, taken, mesh)
        started_s = time.perf_counter()
        _, _, gradients = gradients_of(params, batch, key)
        params, state = update(params, state, gradients)
        jax.block_until_ready(params)
        taken += 1
        return time.perf_counter() - started_s

    return step
