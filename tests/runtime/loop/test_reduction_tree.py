from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.runtime.loop.data import slot_count
from everstep.runtime.loop.reduction import split_tree, tree_of


@pytest.mark.parametrize(
    ("shards", "levels"),
    [(1, ()), (2, (2,)), (7, (7,)), (8, (2, 2, 2)), (12, (2, 3, 2)), (30, (2, 5, 3))],
)
def test_the_order_of_the_sum_is_fixed_by_the_number_of_shards(
    shards: int, levels: tuple[int, ...]
) -> None:
    # A change here changes the bits of every training in the world.
    assert tree_of(shards) == levels


@given(st.integers(1, 500))
def test_the_levels_multiply_to_the_shards(shards: int) -> None:
    assert math.prod(tree_of(shards)) == shards


def add(levels: tuple[int, ...], rows: list[np.float32]) -> list[np.float32]:
    for size in levels:
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        rows = [sum(group[1:], start=group[0]) for group in groups]
    return rows


@given(st.integers(1, 48), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_devices_that_add_alone_first_give_the_bits_of_one_that_adds_all(
    shards: int, devices: int, seed: int
) -> None:
    draw = np.random.Generator(np.random.Philox(seed))
    values = list(draw.standard_normal(shards, dtype=np.float32))
    rounds = slot_count(shards, devices) // devices
    here, beyond = split_tree(shards, rounds)
    slots = values + [np.float32("nan")] * (devices * rounds - shards)
    sums = [
        total
        for device in range(devices)
        for total in add(here, slots[device * rounds : (device + 1) * rounds])
    ]
    counted = shards // math.prod(here)
    assert add(beyond, sums[:counted]) == add(tree_of(shards), values)


@pytest.mark.parametrize(
    ("devices", "exchanged"), [(1, 1), (2, 1), (3, 2), (4, 3), (6, 1), (12, 1)]
)
def test_few_sums_are_exchanged(devices: int, exchanged: int) -> None:
    rounds = 12 // devices
    here, _ = split_tree(12, rounds)
    assert rounds // math.prod(here) == exchanged
