"""A byte-level transformer that learns the text of Python's own standard library.

Real input that is on every machine, a model of 1.1 million parameters, AdamW with a warm-up and a
cosine schedule. Runs under an agent, and alone by
`python -m everstep.runtime.examples.language_model`. Settings are flags, or environment variables
of the same names in capitals:

| flag | means | default |
|---|---|---|
| `--steps` | steps in all; the schedule is stretched over them | 200 |
| `--data`, `--fsdp` | in-slice mesh | -1, 1 |
| `--batch` | rows of 64 bytes in a batch | 12 |
| `--logical-shards` | fixed parts of a batch | 12 |
| `--reduction` | `ordered` or `fast` | ordered |
| `--step-s` | seconds that a step takes at least, on a machine that is too fast to be watched | 0 |

`PACE`, in the environment alone, keeps the training from outrunning a rehearsal: `examples.pace`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

import everstep.runtime as es
from everstep.runtime.examples.pace import Pace

VOCABULARY = 256
CONTEXT = 64
WIDTH = 192
HEADS = 4
LAYERS = 2
HIDDEN = 5 * WIDTH
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idlelib", "site-packages", "test"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    steps: int
    data: int
    fsdp: int
    batch: int
    logical_shards: int
    reduction: str
    step_s: float


def read_settings(arguments: list[str] | None = None) -> Settings:
    """Flags, else environment variables, else defaults."""
    defaults: dict[str, int | str | float] = {
        "steps": 200,
        "data": -1,
        "fsdp": 1,
        "batch": 12,
        "logical_shards": 12,
        "reduction": "ordered",
        "step_s": 0.0,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in defaults.items():
        kind = type(default)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=kind(os.environ.get(name.upper(), default)),
        )
    found = parser.parse_args(arguments)
    return Settings(**vars(found))


@functools.cache
def read_text() -> NDArray[np.uint8]:
    """All modules of the standard library, one after the other, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (
        path
        for path in root.rglob("*.py")
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    )
    return np.frombuffer(b"\n".join(p.read_bytes() for p in sorted(paths)), dtype=np.uint8)


class Windows:
    """The text as samples: each is 64 bytes and the byte that follows each of them."""

    def __init__(self, text: NDArray[np.uint8]) -> None:
        self._text = text

    def __len__(self) -> int:
        return (len(self._text) - 1) // CONTEXT

    def examples(self, indices: NDArray[np.int64]) -> dict[str, NDArray[np.int32]]:
        """Bytes and their successors, `[len(indices), CONTEXT]`."""
        places = indices[:, None] * CONTEXT + np.arange(CONTEXT + 1)
        found = self._text[places].astype(np.int32)
        return {"bytes": found[:, :-1], "next": found[:, 1:]}


def init_params(key: jax.Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 3 + 4 * LAYERS))

    def normal(*shape: int, scale: float) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape, jnp.float32)

    def layer() -> dict[str, jax.Array]:
        return {
            "norm_in": jnp.ones(WIDTH),
            "qkv": normal(WIDTH, 3 * WIDTH, scale=WIDTH**-0.5),
            "out": normal(WIDTH, WIDTH, scale=(2 * LAYERS * WIDTH) ** -0.5),
            "norm_mid": jnp.ones(WIDTH),
            "up": normal(WIDTH, HIDDEN, scale=WIDTH**-0.5),
            "down": normal(HIDDEN, WIDTH, scale=(2 * LAYERS * HIDDEN) ** -0.5),
        }

    return {
        "embedding": normal(VOCABULARY, WIDTH, scale=0.02),
        "position": normal(CONTEXT, WIDTH, scale=0.02),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": jnp.ones(WIDTH),
        "head": normal(WIDTH, VOCABULARY, scale=WIDTH**-0.5),
    }


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attend(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    rows, length, _ = x.shape
    qkv = (x @ layer["qkv"]).reshape(rows, length, 3, HEADS, WIDTH // HEADS)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (WIDTH // HEADS) ** -0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return mixed.reshape(rows, length, WIDTH) @ layer["out"]


def loss_fn(params: dict[str, Any], rows: dict[str, jax.Array]) -> jax.Array:
    """Mean negative log likelihood of the next byte, in nats."""
    x = params["embedding"][rows["bytes"]] + params["position"]
    for layer in params["layers"]:
        x = x + attend(normalize(x, layer["norm_in"]), layer)
        hidden = jax.nn.gelu(normalize(x, layer["norm_mid"]) @ layer["up"])
        x = x + hidden @ layer["down"]
    logits = normalize(x, params["norm"]) @ params["head"]
    likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), rows["next"][..., None], axis=-1)
    return -jnp.mean(likelihood)


def make_optimizer(steps: int) -> Any:
    import optax

    warmup = max(1, min(20, steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup, max(steps, warmup + 1), 1e-4)
    return optax.adamw(schedule, b2=0.95, weight_decay=0.01)


def shardings(mesh: Mesh) -> Callable[[Any], Any]:
    """Split the first dimension that the fsdp axis divides; the rest is on every device."""
    count = mesh.shape["fsdp"]

    def place(leaf: Any) -> NamedSharding:
        for dimension, length in enumerate(leaf.shape):
            if count > 1 and length >= WIDTH and length % count == 0:
                return NamedSharding(mesh, PartitionSpec(*[None] * dimension, "fsdp"))
        return NamedSharding(mesh, PartitionSpec())

    return lambda abstract: jax.tree.map(place, abstract)


def train(run: es.Run) -> None:
    settings = read_settings()
    optimizer = make_optimizer(settings.steps)

    def init() -> dict[str, Any]:
        params = init_params(jax.random.key(0))
        return {"params": params, "optimizer": optimizer.init(params)}

    mesh = run.mesh(data=settings.data, fsdp=settings.fsdp)
    state = run.restore(init, shardings(mesh))
    step_fn = es.ordered_step(
        run,
        loss_fn,
        optimizer,
        logical_shards=settings.logical_shards,
        reduction=settings.reduction,
    )
    dataset = es.IndexedDataset(Windows(read_text()), batch_size=settings.batch, seed=0)
    pace = Pace(settings.steps)
    for step in run.steps(settings.steps):
        started_s = time.monotonic()
        params, optimizer_state, metrics = step_fn(
            state["params"], state["optimizer"], run.batch(dataset, step), run.key(step)
        )
        state = {"params": params, "optimizer": optimizer_state}
        if settings.step_s:
            time.sleep(max(0.0, started_s + settings.step_s - time.monotonic()))
        pace.keep(step)
        run.step_done(step, state, metrics)


def main() -> None:
    """Read what every worker needs, once, before any of them is forked; then train."""
    # Here, so that a forked worker finds it imported.
    importlib.import_module("optax")
    read_settings()
    read_text()
    es.main(train)


if __name__ == "__main__":
    main()
