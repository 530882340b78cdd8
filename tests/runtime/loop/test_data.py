from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from everstep.runtime.errors import ConfigurationError
from everstep.runtime.loop.data import (
    Dataset,
    IndexedDataset,
    ShuffledIndices,
    place_batch,
    place_logical,
    slot_count,
)

orders = st.builds(
    ShuffledIndices,
    count=st.integers(1, 200),
    batch_size=st.integers(1, 40),
    seed=st.one_of(st.none(), st.integers(0, 3)),
)


@given(orders)
@settings(deadline=None)
def test_every_sample_comes_exactly_once_a_pass(order: ShuffledIndices) -> None:
    steps = -(-2 * order.count // order.batch_size)
    seen = np.concatenate([order.at(step) for step in range(steps)])
    for one in (seen[: order.count], seen[order.count : 2 * order.count]):
        assert sorted(one) == list(range(order.count))


@given(orders, st.integers(0, 1000))
@settings(deadline=None)
def test_the_samples_of_a_step_are_a_function_of_the_step(
    order: ShuffledIndices, step: int
) -> None:
    again = ShuffledIndices(count=order.count, batch_size=order.batch_size, seed=order.seed)
    again.at(step + 17)  # Asked in another order, as after a restore.
    np.testing.assert_array_equal(again.at(step), order.at(step))
    assert len(order.at(step)) == order.batch_size


def test_the_order_is_the_same_in_every_version_of_everstep() -> None:
    # A resumed training would otherwise see other samples after an upgrade.
    order = ShuffledIndices(count=10, batch_size=10, seed=7)
    assert order.at(0).tolist() == [6, 4, 8, 2, 5, 0, 3, 1, 7, 9]
    assert order.at(1).tolist() == [7, 0, 1, 4, 6, 3, 5, 2, 9, 8]


def test_passes_and_seeds_differ() -> None:
    rows = {
        tuple(ShuffledIndices(count=50, batch_size=50, seed=seed).at(step))
        for seed in range(3)
        for step in range(3)
    }
    assert len(rows) == 9


@pytest.mark.parametrize("field", ["count", "batch_size"])
def test_nothing_to_draw_from_is_refused(field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        ShuffledIndices(**{"count": 4, "batch_size": 2, field: 0})


class Numbers:
    """Samples that say which they are."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 100

    def examples(self, indices: Any) -> dict[str, Any]:
        self.read += indices.tolist()
        return {"id": indices, "square": (indices**2)[:, None]}


SOURCES = {
    "random access": Numbers(),
    "arrays": {"id": np.arange(100), "square": (np.arange(100) ** 2)[:, None]},
    "sequence": [{"id": np.int64(i), "square": np.array([i**2])} for i in range(100)],
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_kind_of_source_gives_the_same_batches(source: Any) -> None:
    dataset = IndexedDataset(source, batch_size=8, seed=3)
    assert isinstance(dataset, Dataset)
    rows = dataset.examples(dataset.indices(5))
    np.testing.assert_array_equal(
        rows["id"], ShuffledIndices(count=100, batch_size=8, seed=3).at(5)
    )
    np.testing.assert_array_equal(rows["square"][:, 0], rows["id"] ** 2)


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"\[3, 4\]"):
        IndexedDataset({"a": np.zeros(3), "b": np.zeros(4)}, batch_size=2)


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("slice", "data"))


def test_a_placed_batch_is_the_batch_of_the_step() -> None:
    dataset = IndexedDataset(SOURCES["arrays"], batch_size=12)
    plain = place_batch(dataset, 4, one_device())
    logical = place_logical(dataset, 4, one_device(), 6)
    np.testing.assert_array_equal(plain["id"], dataset.indices(4))
    np.testing.assert_array_equal(logical.rows["id"], dataset.indices(4).reshape(6, 2))
    assert logical.rows["square"].shape == (6, 2, 1)


def test_a_batch_that_cannot_be_divided_is_refused_with_the_counts() -> None:
    dataset = IndexedDataset(SOURCES["arrays"], batch_size=10)
    with pytest.raises(ConfigurationError, match=r"10 rows for 4 logical shards.*8 or 12"):
        place_logical(dataset, 0, one_device(), 4)


@given(st.integers(1, 100), st.integers(1, 40))
def test_slots_hold_every_logical_shard_and_give_each_device_equally_many(
    shards: int, devices: int
) -> None:
    slots = slot_count(shards, devices)
    assert slots % devices == 0
    assert shards <= slots < shards + devices
