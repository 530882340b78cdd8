"""A training of a second or two that can be told to misbehave: for tests, rehearsals and figures.

A two-layer network learns the sum of its inputs. Everything is set by environment variables:

| variable | means | default |
|---|---|---|
| `STEPS` | steps in all | 20 |
| `DATA`, `FSDP` | in-slice mesh | -1, 1 |
| `REDUCTION` | `ordered` or `fast` | ordered |
| `LOGICAL_SHARDS`, `BATCH` | parts of a batch, rows of a batch | 12, 24 |
| `WIDTH` | hidden units | 32 |
| `SPREAD` | 1: parameters are sharded across slices too | 0 |
| `STEP_S` | seconds to sleep in each step | 0 |
| `HASTE` | path of a file: no sleep in a step once it exists | |
| `PACE`, `PACE_S_MAX` | steps that need not wait, and what a step waits: `examples.pace` | |
| `FAULT` | what goes wrong, see `Fault` | none |
| `FAULT_STEP`, `FAULT_RANK` | in which step, on which rank (-1: all) | 0, 0 |
| `FAULT_ONCE` | path of a file: go wrong only while it does not exist, and create it | |
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import everstep.runtime as es
from everstep.runtime.examples.pace import Pace


class Fault(Enum):
    NONE = "none"
    RAISE_AT_IMPORT = "raise-at-import"
    EXIT_AT_IMPORT = "exit-at-import"
    THREAD_AT_IMPORT = "thread-at-import"
    DEVICE_AT_IMPORT = "device-at-import"
    RAISE = "raise"
    EXIT = "exit"
    """`sys.exit(0)`."""
    HARD_EXIT = "hard-exit"
    """`os._exit(0)`."""
    ABORT = "abort"
    FORK = "fork"
    """Leaves a child behind that sleeps."""
    THREAD = "thread"
    """Leaves a thread behind that never ends."""
    RETURN = "return"
    """`train` returns early."""
    HANG = "hang"
    GROW_STATE = "grow-state"
    """Another leaf appears in the state."""
    UNSTORABLE = "unstorable"
    """A leaf that cannot be stored, from the start."""


def setting(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


FAULT = Fault(os.environ.get("FAULT", "none"))
FEATURES = 16


def is_armed() -> bool:
    """Whether the fault is to happen now; with `FAULT_ONCE`, only the first time."""
    once = os.environ.get("FAULT_ONCE")
    if not once:
        return True
    try:
        Path(once).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def misbehave_at_import() -> None:
    match FAULT:
        case Fault.RAISE_AT_IMPORT if is_armed():
            raise RuntimeError("the tiny example was told to raise at import")
        case Fault.EXIT_AT_IMPORT if is_armed():
            sys.exit(0)
        case Fault.THREAD_AT_IMPORT:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        case Fault.DEVICE_AT_IMPORT:
            jnp.zeros(1).block_until_ready()
        case _:
            return


def misbehave(run: es.Run, step: int) -> None:
    """Do what `FAULT` says inside a step."""
    rank = setting("FAULT_RANK", 0)
    if step != setting("FAULT_STEP", 0) or rank not in (-1, run.process_index):
        return
    if FAULT is Fault.NONE or not is_armed():
        return
    match FAULT:
        case Fault.RAISE:
            raise RuntimeError(f"the tiny example was told to raise in step {step}")
        case Fault.EXIT:
            sys.exit(0)
        case Fault.HARD_EXIT:
            os._exit(0)
        case Fault.ABORT:
            os.abort()
        case Fault.FORK:
            if os.fork() == 0:
                time.sleep(3600)
        case Fault.THREAD:
            threading.Thread(target=threading.Event().wait).start()
        case Fault.HANG:
            threading.Event().wait()
        case _:
            return


def step_pause_s() -> float:
    haste = os.environ.get("HASTE")
    if haste and Path(haste).exists():
        return 0.0
    return float(os.environ.get("STEP_S", "0"))


def make_init(width: int) -> Callable[[], dict[str, Any]]:
    def init() -> dict[str, Any]:
        first, second = jax.random.split(jax.random.key(0))
        params = {
            "first": jax.random.normal(first, (FEATURES, width)) / 4,
            "second": jax.random.normal(second, (width, 1)),
        }
        moments = jax.tree.map(jnp.zeros_like, params)
        return {"params": params, "momentum": moments, "count": jnp.zeros((), jnp.int32)}

    return init


def shardings(mesh: Mesh) -> Callable[[Any], Any]:
    """Over fsdp where a dimension divides; with `SPREAD` over the slices too."""
    axes = ("slice", "fsdp") if setting("SPREAD", 0) else ("fsdp",)
    count = int(np.prod([mesh.shape[axis] for axis in axes]))

    def place(leaf: Any) -> NamedSharding:
        for dimension, length in enumerate(leaf.shape):
            if count > 1 and length % count == 0:
                return NamedSharding(mesh, PartitionSpec(*[None] * dimension, axes))
        return NamedSharding(mesh, PartitionSpec())

    return lambda abstract: jax.tree.map(place, abstract)


def loss_fn(params: Any, rows: dict[str, jax.Array]) -> jax.Array:
    hidden = jnp.tanh(rows["x"] @ params["first"])
    # Divided by the root of the width, so that one learning rate does for a network of any size.
    predicted = hidden @ params["second"] / params["second"].shape[0] ** 0.5
    return jnp.mean((predicted - rows["y"]) ** 2)


def make_update(state_shardings: Any) -> Callable[[Any, Any], Any]:
    def update(state: dict[str, Any], gradients: Any) -> dict[str, Any]:
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.05 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum, "count": state["count"] + 1}

    return jax.jit(update, out_shardings=state_shardings, donate_argnums=0)


def dataset(batch_size: int) -> es.IndexedDataset:
    draw = np.random.Generator(np.random.Philox(1))
    x = draw.standard_normal((960, FEATURES), dtype=np.float32)
    return es.IndexedDataset({"x": x, "y": x.sum(1, keepdims=True)}, batch_size=batch_size, seed=3)


def train(run: es.Run) -> None:
    mesh = run.mesh(data=setting("DATA", -1), fsdp=setting("FSDP", 1))
    state = run.restore(make_init(setting("WIDTH", 32)), shardings(mesh))
    gradients_of = run.value_and_grad(
        loss_fn,
        logical_shards=setting("LOGICAL_SHARDS", 12),
        reduction=os.environ.get("REDUCTION", "ordered"),
    )
    update = make_update(jax.tree.map(lambda a: a.sharding, state))
    rows = dataset(setting("BATCH", 24))
    step_count = setting("STEPS", 20)
    pace = Pace(step_count)
    for step in run.steps(step_count):
        misbehave(run, step)
        if FAULT is Fault.RETURN and step == setting("FAULT_STEP", 0):
            return
        batch = run.batch(rows, step)
        loss, _, gradients = gradients_of(state["params"], batch, run.key(step))
        state = update(state, gradients)
        if (pause_s := step_pause_s()) > 0:
            time.sleep(pause_s)
        pace.keep(step)
        if FAULT is Fault.GROW_STATE and step >= setting("FAULT_STEP", 0):
            state = {**state, "extra": jnp.zeros(3)}
        told = {**state, "callback": print} if FAULT is Fault.UNSTORABLE else state
        run.step_done(step, told, {"loss": loss})


misbehave_at_import()

if __name__ == "__main__":
    es.main(train)
