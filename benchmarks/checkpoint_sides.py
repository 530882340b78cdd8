"""The sides of the comparison that run in this environment: Everstep, Orbax, and bare files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Tree = dict[str, Any]
ORBAX_BEST: dict[str, bool] = {"use_compression": False, "use_ocdbt": False}
"""The quickest of Orbax's settings for saving, found by trying them."""


def make(case: dict[str, Any]) -> Any:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "1"
    if case["processes"] > 1 and case["side"] != "bare":
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{case['port']}", case["processes"], case["process"])
    return {"everstep": Everstep, "orbax": Orbax, "orbax_best": OrbaxBest, "bare": Bare}[
        case["side"]
    ](case)


class _Jax:
    """The state: arrays of one kind, each split by rows over the processes."""

    def __init__(self, case: dict[str, Any]) -> None:
        import jax
        import ml_dtypes
        import numpy as np

        self.processes: int = case["processes"]
        self._dtype = np.dtype(ml_dtypes.bfloat16 if case["dtype"] == "bf16" else np.float32)
        self._shape = leaf_shape(case["bytes"], case["leaves"], self._dtype.itemsize)
        self._seed: int = case["seed"]
        self._names = [f"layer{number:04d}" for number in range(case["leaves"])]
        self._shardings = {
            name: self._sharding(name) for name in ("rows", "columns", "blocks", "whole")
        }
        self.state: Tree = {}
        """Nothing in a process that only reads what others saved."""
        if not case["is_reader"]:
            for name, values in self._made():
                self.state[name] = jax.make_array_from_callback(
                    self._shape, self._shardings["rows"], _parts_of(values)
                )
        jax.block_until_ready(self.state)
        self.restored: Tree | None = None

    def _made(self) -> Iterator[tuple[str, Any]]:
        """Every leaf's values, whole; the same on all processes."""
        import numpy as np

        dice = np.random.default_rng(self._seed)
        for name in self._names:
            yield name, dice.standard_normal(self._shape, dtype=np.float32).astype(self._dtype)

    def like(self, layout: str) -> Tree:
        import jax

        sharding = self._shardings[layout]
        return {
            name: jax.ShapeDtypeStruct(self._shape, self._dtype, sharding=sharding)
            for name in self._names
        }

    def restore(self, folder: str, layout: str) -> None:
        import jax

        self.restored = self.load(folder, self.like(layout))
        jax.block_until_ready(self.restored)

    def load(self, folder: str, like: Tree) -> Tree:
        raise NotImplementedError

    def drop(self) -> None:
        self.restored = None

    def verify(self) -> bool:
        import jax
        import numpy as np

        restored, self.restored = self.restored, None
        assert restored is not None
        if not self.state:
            return all(
                np.array_equal(np.asarray(restored[name]).view(np.uint8), values.view(np.uint8))
                for name, values in self._made()
            )

        def same(name: str) -> bool:
            ours, theirs = self.state[name], restored[name]
            if ours.sharding != theirs.sharding:
                # Bits are compared, and no reduction may touch them: both are moved to rows.
                theirs = jax.jit(lambda x: x, out_shardings=ours.sharding)(theirs)
            return all(
                np.array_equal(np.asarray(a.data).view(np.uint8), np.asarray(b.data).view(np.uint8))
                for a, b in zip(ours.addressable_shards, theirs.addressable_shards, strict=True)
            )

        # Every one is moved on every process, or they would wait for each other.
        return min([same(name) for name in self.state])

    def _sharding(self, layout: str) -> Any:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        devices = np.asarray(jax.devices())
        if layout == "blocks" and len(devices) % 2 == 0:
            return NamedSharding(Mesh(devices.reshape(2, -1), ("x", "y")), P("x", "y"))
        spec = {"rows": P("x"), "columns": P(None, "x"), "blocks": P("x"), "whole": P()}[layout]
        return NamedSharding(Mesh(devices, ("x",)), spec)


class Everstep(_Jax):
    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__(case)
        self._checkpoints: Any = None
        self._step = 0

    def _opened(self, folder: str) -> Any:
        """One folder for all that is saved: a run goes on, and its memory is used again."""
        import everstep.runtime as es

        if self._checkpoints is None:
            self._checkpoints = es.Checkpoints(folder, retention=es.Retention(latest=1))
        return self._checkpoints

    def save(self, folder: str) -> tuple[float, float]:
        checkpoints = self._opened(folder)
        self._step += 1
        started_s = time.perf_counter()
        saved = checkpoints.save(self._step, self.state)
        kept_s = time.perf_counter() - started_s
        saved.wait()
        return time.perf_counter() - started_s, kept_s

    def load(self, folder: str, like: Tree) -> Tree:
        restored: Tree = self._opened(folder).restore(like)
        return restored


class Orbax(_Jax):
    best = False

    def _context(self) -> Any:
        from orbax.checkpoint import v1

        context = v1.Context()
        if self.best:
            for name, value in ORBAX_BEST.items():
                setattr(context.array.saving, name, value)
        return context

    def save(self, folder: str) -> tuple[float, float]:
        from orbax.checkpoint import v1

        with self._context():
            started_s = time.perf_counter()
            saving = v1.save_async(folder, self.state)
            kept_s = time.perf_counter() - started_s
            saving.result()
        return time.perf_counter() - started_s, kept_s

    def load(self, folder: str, like: Tree) -> Tree:
        from orbax.checkpoint import v1

        with self._context():
            restored: Tree = v1.load(folder, like)
        return restored


class OrbaxBest(Orbax):
    best = True


class Bare:
    """The same bytes in as many files: one `write` after another, `fsync`, `readinto`."""

    def __init__(self, case: dict[str, Any]) -> None:
        import ml_dtypes
        import numpy as np

        dtype = np.dtype(ml_dtypes.bfloat16 if case["dtype"] == "bf16" else np.float32)
        shape = leaf_shape(case["bytes"], case["leaves"], dtype.itemsize)
        dice = np.random.default_rng(case["seed"])
        share = (shape[0] // case["processes"], *shape[1:])
        self._process: int = case["process"]
        self._values = [
            np.ascontiguousarray(dice.standard_normal(share, dtype=np.float32).astype(dtype))
            .reshape(-1)
            .view(np.uint8)
            for _ in range(case["leaves"])
        ]
        self._targets = [np.ones_like(value) for value in self._values]
        self._read: list[Any] = []
        total = sum(value.nbytes for value in self._values)
        count = min(len(self._values), max(1, total // (64 << 20)))
        self._groups = [self._values[at::count] for at in range(count)]

    def save(self, folder: str) -> tuple[float, float]:
        """Write; beside it, what it takes to copy the same into memory that was touched before."""
        import numpy as np

        started_s = time.perf_counter()
        for target, value in zip(self._targets, self._values, strict=True):
            np.copyto(target, value)
        kept_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        os.makedirs(folder, exist_ok=True)

        def write(number: int) -> None:
            with open(f"{folder}/{self._process}-{number}", "wb", buffering=0) as file:
                for value in self._groups[number]:
                    left = value.data
                    while left:
                        left = left[file.write(left) :]
                os.fsync(file.fileno())

        _together(write, range(len(self._groups)))
        return time.perf_counter() - started_s, kept_s

    def restore(self, folder: str, layout: str) -> None:
        import numpy as np

        del layout  # Bytes have none.

        self._read = [[np.empty_like(value) for value in group] for group in self._groups]

        def read(number: int) -> None:
            with open(f"{folder}/{self._process}-{number}", "rb", buffering=0) as file:
                for target in self._read[number]:
                    left = target.data
                    while left:
                        left = left[file.readinto(left) or len(left) :]

        _together(read, range(len(self._groups)))

    def drop(self) -> None:
        self._read = []

    def verify(self) -> bool:
        import numpy as np

        read, self._read = self._read, []
        return all(
            np.array_equal(a, b)
            for ours, theirs in zip(self._groups, read, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )


def _parts_of(values: Any) -> Callable[[Any], Any]:
    return lambda index: values[index].copy()


def _together(do: Callable[[int], None], numbers: Sequence[int]) -> None:
    """With as many threads as there are cores."""
    queue = iter(numbers)

    def work() -> None:
        for number in queue:
            do(number)

    threads = [threading.Thread(target=work) for _ in range(os.cpu_count() or 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def leaf_shape(size_bytes: int, leaves: int, width: int) -> tuple[int, int]:
    """About square, of powers of two: what weights look like, and every layout divides it."""
    count = max(size_bytes // leaves // width, 64)
    rows = 1 << (count.bit_length() // 2)
    return rows, max(count // rows // 8 * 8, 8)
