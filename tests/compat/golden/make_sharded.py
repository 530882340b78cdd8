"""Make the checkpoints of `sharded/` with the Orbax that is installed, each by several processes.

    python tests/compat/golden/make_sharded.py

Every process has one device of a common mesh and writes its own shards: with OCDBT into a database
of its own, which the first process merges with the others'. Kept as those of `make_goldens` are.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as v0
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray
from orbax.checkpoint import v1

FOLDER = Path(__file__).parent / "sharded"
STEP = 7


class Moments(NamedTuple):
    mu: Any
    nu: Any


def example() -> dict[str, Any]:
    """Values, whole. Bits that differ everywhere, and some that arithmetic would change."""
    count = np.arange(96, dtype=np.uint32)
    # Shards of it are too large to lie in an index: they stay in files of those who wrote them.
    large = (np.arange(1280, dtype=np.uint32) * 2654435761).view(np.float32).reshape(32, 40)
    half = (count * 40503).astype(np.uint16).view(ml_dtypes.bfloat16).reshape(12, 8)
    return {
        "params": [
            {"rows": large, "columns": half, "a/b": count[:24].astype(np.int32).reshape(4, 6)},
            {"all": (count[:9] * 37).astype(np.int8), "mask": (count[:8] % 3 == 0)},
        ],
        "opt": Moments(
            mu=(count * 69069).view(np.float32).reshape(12, 8),
            nu=np.float32(0.25) * np.ones((4, 4), np.float32),
        ),
        "step": STEP,
    }


def _specs() -> dict[str, Any]:
    """How each array lies on a mesh of `x` by `y`."""
    both = ("x", "y")
    return {
        "params": [
            {
                "rows": PartitionSpec(both),
                "columns": PartitionSpec(None, both),
                "a/b": PartitionSpec("x", "y"),
            },
            {"all": PartitionSpec(), "mask": PartitionSpec(both)},
        ],
        "opt": Moments(mu=PartitionSpec("y"), nu=PartitionSpec(None, "y")),
        "step": None,
    }


def mesh() -> Mesh:
    """All devices: one behind the other, or where there are four in a square."""
    devices = np.asarray(jax.devices())
    return Mesh(devices.reshape(2, 2) if len(devices) == 4 else devices.reshape(1, -1), ("x", "y"))


def shardings() -> dict[str, Any]:
    """How the state lies on this program's devices."""
    here = mesh()
    made: dict[str, Any] = jax.tree.map(
        lambda spec: NamedSharding(here, spec),
        _specs(),
        is_leaf=lambda one: isinstance(one, PartitionSpec),
    )
    return made


def _placed() -> dict[str, Any]:
    def placed(value: Any, sharding: NamedSharding) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        array: NDArray[Any] = value
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    made: dict[str, Any] = jax.tree.map(placed, example(), {**shardings(), "step": 0})
    return made


def _pytree(**options: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        with v0.Checkpointer(v0.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(folder, _placed())

    return make


def _orbax_run(folder: Path) -> None:
    with v0.CheckpointManager(folder) as orbax_run:
        orbax_run.save(STEP, args=v0.args.StandardSave(_placed()))
        orbax_run.wait_until_finished()


def _v1(folder: Path) -> None:
    v1.save(str(folder), _placed())


MAKERS: Mapping[str, Callable[[Path], None]] = {
    "zarr2-ocdbt-zstd": _pytree(),
    "zarr2-folders-plain": _pytree(use_ocdbt=False, use_compression=False),
    "zarr3-ocdbt-plain": _pytree(use_zarr3=True, use_compression=False),
    "zarr3-folders-zstd": _pytree(use_ocdbt=False, use_zarr3=True),
    "orbax_run": _orbax_run,
    "v1": _v1,
}

KINDS = {2: tuple(MAKERS), 4: ("zarr2-ocdbt-zstd", "v1")}
"""Which are made by how many processes."""


def _one_process(folder: Path, place: str, count: int, process: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(place, count, process)
    for name in KINDS[count]:
        MAKERS[name](folder / f"{count}-{name}")


def make_all(folder: Path, count: int) -> None:
    """Let so many processes make one of each kind in a folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), place, str(count), str(process)],
            env=environment,
        )
        for process in range(count)
    ]
    try:
        codes = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit(f"{count} processes ended with {codes}")
    for marker in folder.rglob("commit_success.txt"):
        # It has the path of the machine that wrote it; nobody reads what it says.
        marker.write_text("Checkpoint commit was successful.")


def main() -> None:
    if len(sys.argv) > 1:
        folder, place, count, process = sys.argv[1:]
        _one_process(Path(folder), place, int(count), int(process))
        return
    kept = FOLDER / f"orbax-{v0.__version__}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for processes in KINDS:
        make_all(kept, processes)


if __name__ == "__main__":
    main()
