"""Make the checkpoints of this folder with the Orbax that is installed.

    python tests/compat/golden/make_goldens.py

They are made once and kept: what users have on their disks does not change with Orbax either. A new
version gets a folder of its own beside the old ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
from orbax.checkpoint import v1

FOLDER = Path(__file__).parent


class Moments(NamedTuple):
    mu: Any
    nu: Any


class Nothing(NamedTuple):
    pass


def example(*, has_text: bool) -> dict[str, Any]:
    """A state with every kind of leaf that Orbax holds."""
    state: dict[str, Any] = {
        "params": [
            {"kernel": jnp.arange(24, dtype=jnp.float32).reshape(4, 6) / 7, "a/b": jnp.ones(2)},
            {"kernel": jnp.asarray([[1.5, -0.0], [jnp.nan, jnp.inf]], jnp.bfloat16)},
        ],
        "opt": (Moments(jnp.arange(3, dtype=jnp.int8), None), Nothing()),
        "small": {"int4": jnp.asarray([-8, 7], jnp.int4), "fp8": jnp.ones(3, jnp.float8_e4m3fn)},
        "mask": jnp.asarray([True, False]),
        "complex": jnp.asarray([1 + 2j], jnp.complex64),
        "host": np.arange(3, dtype=np.float64),
        "step": 7,
        "rate": 0.1,
        "on": True,
        "none": None,
        "empty": [{}, [], ()],
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
    }
    return {**state, "name": "run é"} if has_text else state


def _pytree(**options: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        with v0.Checkpointer(v0.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(folder, example(has_text=True))

    return make


def _standard(folder: Path) -> None:
    with v0.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, example(has_text=False))


def _orbax_run(folder: Path) -> None:
    options = v0.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=6)
    with v0.CheckpointManager(folder, options=options) as orbax_run:
        items = v0.args.Composite(
            params=v0.args.StandardSave(example(has_text=False)),
            notes=v0.args.JsonSave({"lines": [1, "two"]}),
        )
        orbax_run.save(12, args=items, custom_metadata={"seed": 5})
        orbax_run.wait_until_finished()


def _v1(folder: Path) -> None:
    v1.save(str(folder), example(has_text=True))


MAKERS: dict[str, Callable[[Path], None]] = {
    "zarr2-ocdbt-zstd": _pytree(),
    "zarr2-folders-plain": _pytree(use_ocdbt=False, use_compression=False),
    "zarr3-ocdbt-plain": _pytree(use_zarr3=True, use_compression=False),
    "zarr3-folders-zstd": _pytree(use_ocdbt=False, use_zarr3=True),
    "standard": _standard,
    "orbax_run": _orbax_run,
    "v1": _v1,
}


def main() -> None:
    folder = FOLDER / f"orbax-{v0.__version__}"
    shutil.rmtree(folder, ignore_errors=True)
    for name, make in MAKERS.items():
        make(folder / name)
    for marker in folder.rglob("commit_success.txt"):
        # It has the path of the machine that wrote it; nobody reads what it says.
        marker.write_text("Checkpoint commit was successful.")


if __name__ == "__main__":
    main()
