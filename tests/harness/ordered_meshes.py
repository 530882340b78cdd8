"""Train a small transformer on one mesh after the other; print a digest of every bit of each.

Run with as many CPU devices as the largest mesh has. Arguments: `data x fsdp` sizes, as `3x2`.
Prints one JSON line per mesh: digests of parameters, optimizer state, losses, auxiliary values and
first gradients.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from everstep.runtime.examples import language_model as model
from everstep.runtime.loop.data import IndexedDataset, place_logical
from everstep.runtime.loop.randomness import key_of
from everstep.runtime.loop.reduction import ordered_gradients

STEPS = 20
LOGICAL_SHARDS = 12

# The language model with other sizes: the same operations, compiled in a moment.
model.WIDTH, model.HIDDEN, model.CONTEXT, model.HEADS, model.LAYERS = 24, 48, 16, 2, 1


def digest(tree: Any) -> str:
    parts = (np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def loss_fn(params: Any, rows: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss = model.loss_fn(params, rows)
    # Something random and something that is no float, as real programs have.
    noise = jax.random.normal(key, (8,)).mean()
    return loss + 0.01 * noise, {"noise": noise, "bytes": rows["bytes"].sum()}


def train(data: int, fsdp: int) -> dict[str, str]:
    devices = np.array(jax.devices()[: data * fsdp]).reshape(1, data, fsdp)
    mesh = Mesh(devices, ("slice", "data", "fsdp"))
    clip = optax.clip_by_global_norm(0.5)
    prepare = jax.jit(lambda gradients: clip.update(gradients, clip.init(gradients))[0])
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 4, STEPS))

    def init() -> Any:
        params = model.init_params(jax.random.key(1))
        return params, tx.init(params)

    def place(leaf: Any) -> NamedSharding:
        for dimension, length in enumerate(leaf.shape):
            if fsdp > 1 and length % fsdp == 0:
                return NamedSharding(mesh, PartitionSpec(*[None] * dimension, "fsdp"))
        return NamedSharding(mesh, PartitionSpec())

    shardings = jax.tree.map(place, jax.eval_shape(init))
    params, state = jax.jit(init, out_shardings=shardings)()

    def apply(params: Any, state: Any, gradients: Any) -> Any:
        changes, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    update = jax.jit(apply, out_shardings=shardings, donate_argnums=(0, 1))
    gradients_of = ordered_gradients(mesh, loss_fn, LOGICAL_SHARDS)
    text = np.frombuffer(bytes(range(256)) * 40, dtype=np.uint8)
    dataset = IndexedDataset(model.Windows(text), batch_size=24, seed=0)
    series: dict[str, list[Any]] = {"losses": [], "aux": [], "gradients": []}
    for step in range(STEPS):
        batch = place_logical(dataset, step, mesh, LOGICAL_SHARDS)
        loss, aux, gradients = gradients_of(params, batch, key_of(0, step, mesh))
        series["losses"].append(np.asarray(loss))
        series["aux"].append(jax.device_get(aux))
        series["gradients"].append(digest(gradients))
        params, state = update(params, state, prepare(gradients))
    gradients_seen = hashlib.sha256("".join(series.pop("gradients")).encode()).hexdigest()[:16]
    return {
        "params": digest(params),
        "optimizer": digest(state),
        "gradients": gradients_seen,
        **{name: digest(values) for name, values in series.items()},
        "last loss": float(jnp.asarray(series["losses"][-1])).hex(),
    }


def main() -> None:
    for argument in sys.argv[1:]:
        data, fsdp = map(int, argument.split("x"))
        print(json.dumps({"mesh": argument, **train(data, fsdp)}), flush=True)


if __name__ == "__main__":
    main()
