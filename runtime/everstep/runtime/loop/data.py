"""Data by step: which samples a step sees, and how they come onto the devices.

The position in the data is a function of the step. Nothing is saved, so nothing can be lost,
replayed or skipped; and it does not know how many slices there are, so a step sees the same
samples on any of them. What is asked of a dataset is random access.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from everstep.runtime.errors import ConfigurationError, check

DATA_AXES = ("slice", "replica", "data", "fsdp", "expert")
"""Mesh axes over which rows of a batch are divided; over any other axis they are replicated."""

Indices = NDArray[np.int64]


@runtime_checkable
class Dataset(Protocol):
    """Batches by step, with random access: only the rows asked for are read.

    Example:
        class Squares:
            batch_size = 32
            def indices(self, step: int) -> np.ndarray:
                return np.arange(step * 32, step * 32 + 32)
            def examples(self, indices: np.ndarray) -> dict[str, np.ndarray]:
                return {"x": indices, "y": indices**2}
    """

    @property
    def batch_size(self) -> int:
        """Rows of one global batch, whatever the slice count."""
        ...

    def indices(self, step: int) -> Indices:
        """Global sample numbers of a step, `[batch_size]`: a pure function of the step."""
        ...

    def examples(self, indices: Indices) -> Any:
        """The samples of these numbers: a tree of arrays, `[len(indices), …]`."""
        ...


@runtime_checkable
class Examples(Protocol):
    """A source of samples with a length, that gives several at once."""

    def __len__(self) -> int:
        """How many samples there are."""
        ...

    def examples(self, indices: Indices) -> Any:
        """The samples of these numbers: a tree of arrays, `[len(indices), …]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffledIndices:
    """The order of samples: each pass over the data is a permutation drawn from the seed.

    A batch may straddle two passes; every sample comes exactly once a pass. `seed=None` keeps the
    natural order.

    Example:
        order = es.ShuffledIndices(count=len(images), batch_size=96, seed=7)
        rows = order.at(step)
    """

    count: int
    batch_size: int
    seed: int | None = 0

    def __post_init__(self) -> None:
        for name, value in (("count", self.count), ("batch_size", self.batch_size)):
            if value < 1:
                raise ConfigurationError(name, value, "a positive number")

    def at(self, step: int) -> Indices:
        """Sample numbers of a step, `[batch_size]`."""
        if step < 0:
            raise ConfigurationError("step", step, "0 or more")
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64)
        if self.seed is None:
            return positions % self.count
        number, place = np.divmod(positions, self.count)
        found = np.empty_like(positions)
        for one in np.unique(number):
            where = number == one
            found[where] = _permutation(self.seed, int(one), self.count)[place[where]]
        return found


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, pass_number: int, count: int) -> Indices:
    """The order of one pass: the ranks of a stream of random numbers.

    numpy promises the raw stream of a bit generator for ever, and not what `Generator` makes of
    it; a training must find its samples again after an upgrade.
    """
    digest = hashlib.sha256(f"everstep order {seed} {pass_number}".encode()).digest()
    stream = np.random.Philox(key=np.frombuffer(digest[:16], "<u8")).random_raw(count)
    return np.argsort(stream, kind="stable")


class IndexedDataset:
    """Batches out of anything with random access.

    Example:
        images = np.load("images.npy", mmap_mode="r")
        dataset = es.IndexedDataset({"image": images, "label": labels}, batch_size=96, seed=7)
    """

    def __init__(self, source: Any, *, batch_size: int, seed: int | None = 0) -> None:
        """Wrap a source.

        Args:
            source: an object with `examples(indices)` and a length, a tree of arrays of equal
                length, or a sequence of samples (trees of arrays of equal shapes).
            batch_size: rows of the global batch.
            seed: of the order; None for the natural one.
        """
        self._read, count = _reader_of(source)
        self.order = ShuffledIndices(count=count, batch_size=batch_size, seed=seed)

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""
        return self.order.batch_size

    def indices(self, step: int) -> Indices:
        """Sample numbers of a step, `[batch_size]`."""
        return self.order.at(step)

    def examples(self, indices: Indices) -> Any:
        """The samples of these numbers."""
        return self._read(indices)


def _reader_of(source: Any) -> tuple[Any, int]:
    if isinstance(source, Examples):
        return source.examples, len(source)
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        sequence: Sequence[Any] = source

        def read_each(indices: Indices) -> Any:
            return jax.tree.map(lambda *rows: np.stack(rows), *(sequence[i] for i in indices))

        return read_each, len(sequence)
    lengths = {len(leaf) for leaf in jax.tree.leaves(source)}
    if len(lengths) != 1:
        raise ConfigurationError("source", f"arrays of {sorted(lengths)} rows", "one length")
    return (lambda indices: jax.tree.map(lambda a: np.asarray(a[indices]), source)), lengths.pop()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A global batch laid out for ordered reduction.

    `rows` is a tree of arrays `[slots, rows of a logical shard, …]`, the slots divided over all
    devices. Slot `i` holds logical shard `i`; slots past the last one repeat shard 0, so that
    every device has equally many, and are never counted.
    """

    rows: Any


def place_batch(dataset: Dataset, step: int, mesh: Mesh) -> Any:
    """The batch of a step as global arrays, `[batch, …]` divided over the mesh's data axes."""
    axes = tuple(name for name in mesh.axis_names if name in DATA_AXES)
    count = int(np.prod([mesh.shape[name] for name in axes], dtype=np.int64))
    size = dataset.batch_size
    if size % count:
        raise ConfigurationError(
            "batch_size",
            f"{size} rows for {count} devices along {', '.join(axes)}",
            f"a multiple of {count} (nearest: {_nearest(size, count)}), or ordered reduction, "
            "which divides the batch into logical shards instead",
        )
    order = dataset.indices(step)
    check(len(order) == size, f"step {step}: {len(order)} indices for a batch of {size}")
    return _place(dataset, order, NamedSharding(mesh, PartitionSpec(axes)), order.shape)


def place_logical(dataset: Dataset, step: int, mesh: Mesh, logical_shards: int) -> Batch:
    """The batch of a step as slots of logical shards, divided over all devices of the mesh."""
    size = dataset.batch_size
    if size % logical_shards:
        raise ConfigurationError(
            "batch_size",
            f"{size} rows for {logical_shards} logical shards",
            f"a multiple of {logical_shards} (nearest: {_nearest(size, logical_shards)})",
        )
    order = dataset.indices(step)
    check(len(order) == size, f"step {step}: {len(order)} indices for a batch of {size}")
    slots = slot_count(logical_shards, mesh.size)
    shards = order.reshape(logical_shards, size // logical_shards)
    padded = np.concatenate([shards, np.repeat(shards[:1], slots - logical_shards, axis=0)])
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return Batch(rows=_place(dataset, padded, sharding, padded.shape))


def slot_count(logical_shards: int, device_count: int) -> int:
    """Slots that give every device equally many and hold all logical shards."""
    return -(-logical_shards // device_count) * device_count


def _nearest(size: int, count: int) -> str:
    below = size // count * count
    return f"{below} or {below + count}" if below else str(count)


def _place(dataset: Dataset, order: Indices, sharding: NamedSharding, lead: tuple[int, ...]) -> Any:
    """Read the rows that this process's devices need, once each, and place them."""
    parts = sharding.addressable_devices_indices_map(lead)
    spans = {_span(index, lead[0]) for index in parts.values()}
    read: dict[tuple[int, int], list[Any]] = {}
    treedef: Any = None
    for start, stop in sorted(spans):
        numbers = order[start:stop]
        leaves, treedef = jax.tree.flatten(dataset.examples(numbers.reshape(-1)))
        read[start, stop] = [np.asarray(a).reshape(*numbers.shape, *a.shape[1:]) for a in leaves]
    first = next(iter(read.values()))

    def place(leaf: int) -> jax.Array:
        shape = (lead[0], *first[leaf].shape[1:])
        return jax.make_array_from_callback(
            shape, sharding, lambda index: read[_span(index, lead[0])][leaf]
        )

    return jax.tree.unflatten(treedef, [place(leaf) for leaf in range(len(first))])


def _span(index: tuple[slice, ...] | None, length: int) -> tuple[int, int]:
    start, stop, _ = (index[0] if index else slice(None)).indices(length)
    return start, stop
