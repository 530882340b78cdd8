"""What a spare worker does while it waits: have jax load what any first step needs.

Half of what jax spends on the first program of a process is not about that program: rules that are
looked up for the first time, the dialects of its compiler, pages of its libraries. Here a small
program is traced and lowered to take that ahead of a recovery. It is never compiled or run, and
nothing of it stays but what jax has loaded.

On the CPU only: another platform's device belongs to the worker that is training.
"""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from everstep.runtime.errors import InvariantViolated
from everstep.runtime.loop.compiled import machine_kind
from everstep.runtime.loop.distributed import has_devices, is_verified


def warm_up() -> None:
    """Load what is the same for every training. Does nothing where that would open a device.

    Blocking: for a fifth of a second of one core.
    """
    platforms: Any = jax.config.jax_platforms  # type: ignore[attr-defined] # Set by jax at run time.
    if platforms != "cpu" or not is_verified():
        return
    from jax._src import xla_bridge

    machine_kind()
    jax.eval_shape(_draw)
    # A client of its own, unknown to jax: the worker's will be another, with the other members.
    make_client: Any = xla_bridge.make_cpu_client
    client = make_client()
    mesh = Mesh(np.array(client.devices()[:1]), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(_step, in_shardings=replicated, out_shardings=replicated)
    step.trace(*_arguments()).lower()
    del client, mesh, replicated, step
    # What jax remembers of it would keep its devices, and their threads.
    jax.clear_caches()
    gc.collect()
    if has_devices():
        raise InvariantViolated("warming up has opened jax's devices")


def _draw() -> tuple[jax.Array, ...]:
    first, second = jax.random.split(jax.random.key(0))
    drawn = jax.random.normal(first, (4, 8)), jax.random.uniform(second, (3,))
    return (*drawn, jax.random.bits(jax.random.fold_in(first, 1), (3,)))


def _arguments() -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    params = {
        "first": jax.ShapeDtypeStruct((4, 8), jnp.float32),
        "second": jax.ShapeDtypeStruct((8, 1), jnp.float32),
    }
    return params, jax.ShapeDtypeStruct((6, 4), jnp.float32)


def _loss(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(jnp.tanh(rows @ params["first"]))
    return jnp.mean((hidden @ params["second"] - rows.sum(1, keepdims=True)) ** 2)


def _step(params: dict[str, jax.Array], rows: jax.Array) -> tuple[Any, Any]:
    loss, gradients = jax.value_and_grad(_loss)(params, rows)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
