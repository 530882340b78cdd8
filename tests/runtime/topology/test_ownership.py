"""Shares of the writing: exact cover, one writer a chunk, even, and square chunks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import array, by_rows, holding, host, path, tree_of
from everstep.controller.api.ids import HostId
from everstep.runtime.errors import Infeasible, StateRefused
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.dtypes import itemsize
from everstep.runtime.layout.manifest import Holding, Region
from everstep.runtime.layout.tree import Leaf, LeafKind, TreeSpec
from everstep.runtime.topology.ownership import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    WritePlan,
    choose_chunk,
    plan_writes,
)

HOSTS = [host(0), host(1), host(2), host(3)]


def check_plan(tree: TreeSpec, holdings: tuple[Holding, ...], plan: WritePlan) -> None:
    """The invariants of `WritePlan`, by painting every element."""
    counts = {i: np.zeros(leaf.shape, int) for i, leaf in enumerate(tree.leaves)}
    for owner, regions in plan.regions.items():
        for region in regions:
            counts[region.leaf][region.box.slices()] += 1
            chunk, shape = plan.chunks[region.leaf], tree.leaves[region.leaf].shape
            for a, b, c, n in zip(region.box.start, region.box.stop, chunk, shape, strict=True):
                assert a % c == 0
                assert b % c == 0 or b == n
            shards = [s for h in holdings if h.host == owner for s in h.shards]
            assert any(s.leaf == region.leaf and s.box.contains(region.box) for s in shards)
    for index, leaf in enumerate(tree.leaves):
        if leaf.is_stored_as_bytes:
            assert (counts[index] == 1).all(), leaf
            assert all(c >= 1 for c in plan.chunks[index])
        else:
            assert index not in plan.chunks


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """Shards as JAX makes them: every axis in equal parts, the last one shorter."""
    ends = [
        [min(i * -(-n // p), n) for i in range(p + 1)] for n, p in zip(shape, parts, strict=True)
    ]
    return [
        Box(tuple(a for a, _ in pair), tuple(b for _, b in pair))
        for pair in itertools.product(*(itertools.pairwise(e) for e in ends))
    ]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_layout_is_tiled_exactly_once_by_those_who_hold_it(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 3))
    leaves: list[Leaf] = []
    boxes: dict[HostId, list[tuple[int, Box]]] = {owner: [] for owner in HOSTS}
    for index in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.integers(0, 13)) for _ in range(rank))
        dtype = data.draw(st.sampled_from(("float32", "int4", "complex128", "bfloat16")))
        leaves.append(array("p", index, dtype=dtype, shape=shape))
        layouts = data.draw(st.integers(1, 2))
        for _ in range(layouts):
            parts = tuple(data.draw(st.integers(1, 4)) for _ in shape)
            for box in grid(shape, parts):
                for owner in data.draw(st.sets(st.sampled_from(HOSTS), min_size=1)):
                    boxes[owner].append((index, box))
    tree = tree_of(*leaves)
    holdings = tuple(holding(owner, found, tree) for owner, found in boxes.items())
    plan = plan_writes(
        tree, holdings, chunk_bytes_min=data.draw(st.sampled_from((1, 64, CHUNK_BYTES_MIN)))
    )
    check_plan(tree, holdings, plan)


def test_every_host_computes_the_same() -> None:
    tree = tree_of(array("a", shape=(64, 64)), array("b", shape=(100,)))
    holdings = by_rows(tree, HOSTS)
    assert plan_writes(tree, holdings) == plan_writes(tree, tuple(reversed(holdings)))


def load_bytes(tree: TreeSpec, regions: tuple[Region, ...]) -> int:
    return sum(r.box.size * itemsize(tree.leaves[r.leaf].dtype) for r in regions)


def test_replicas_write_about_equally_much() -> None:
    tree = tree_of(
        array("large", shape=(2048, 1024)),
        array("middle", shape=(1024, 512)),
        *(array("small", i, shape=(1024,)) for i in range(64)),
    )
    everywhere = [(i, whole(leaf.shape)) for i, leaf in enumerate(tree.leaves)]
    holdings = tuple(holding(owner, everywhere, tree) for owner in HOSTS[:3])
    plan = plan_writes(tree, holdings)
    check_plan(tree, holdings, plan)
    loads = [load_bytes(tree, regions) for regions in plan.regions.values()]
    assert max(loads) <= 1.1 * sum(loads) / 3


def test_who_alone_holds_something_writes_less_of_what_all_hold() -> None:
    tree = tree_of(array("mine", shape=(1024, 256)), array("ours", shape=(4096, 256)))
    first, second = HOSTS[:2]
    holdings = (
        holding(first, [(0, whole((1024, 256))), (1, whole((4096, 256)))], tree),
        holding(second, [(1, whole((4096, 256)))], tree),
    )
    plan = plan_writes(tree, holdings)
    loads = [load_bytes(tree, plan.regions[owner]) for owner in (first, second)]
    assert max(loads) <= 1.15 * sum(loads) / 2


def test_chunks_are_bounded_and_square() -> None:
    tree = tree_of(array("w", shape=(16384, 16384)), array("tall", shape=(1 << 22, 8)))
    everywhere = [(i, whole(leaf.shape)) for i, leaf in enumerate(tree.leaves)]
    plan = plan_writes(tree, (holding(HOSTS[0], everywhere, tree),))
    for index in range(2):
        size = math.prod(plan.chunks[index]) * 4
        assert CHUNK_BYTES_MIN <= size <= CHUNK_BYTES_MAX
    rows, columns = plan.chunks[0]
    assert rows == columns
    # A reader of an eighth of the columns touches no byte too many.
    assert 16384 % (columns * 8) == 0


def test_small_leaves_are_one_chunk() -> None:
    tree = tree_of(array("b", shape=(1000,)), array("s", shape=()))
    everywhere = [(i, whole(leaf.shape)) for i, leaf in enumerate(tree.leaves)]
    plan = plan_writes(tree, (holding(HOSTS[0], everywhere, tree),))
    assert plan.chunks == {0: (1000,), 1: ()}


def test_borders_without_a_common_divisor_do_not_make_tiny_chunks() -> None:
    # 1 000 003 rows over 4: shards of 250 001, a prime. Splitting them would be a row a chunk.
    shape = (1_000_003,)
    boxes = grid(shape, (4,))
    chunk = choose_chunk(shape, 4, boxes, wanted_bytes=1 << 16, floor_bytes=1 << 15)
    assert math.prod(chunk) * 4 >= 1 << 15
    assert all(box.start[0] % chunk[0] == 0 for box in boxes)


def test_what_nobody_holds_is_named_by_leaf_and_region() -> None:
    tree = tree_of(array("params", "kernel", shape=(8, 4)), array("b", shape=(8,)))
    holdings = (
        holding(HOSTS[0], [(0, Box((0, 0), (4, 4))), (1, whole((8,)))], tree),
        holding(HOSTS[1], [(0, Box((6, 0), (8, 4)))], tree),
    )
    with pytest.raises(Infeasible) as caught:
        plan_writes(tree, holdings)
    assert "['params']['kernel'] region [4, 0] to [6, 4]" in str(caught.value)
    with pytest.raises(Infeasible, match="nobody holds"):
        plan_writes(tree, ())


def test_leaves_without_bytes_are_not_written() -> None:
    tree = tree_of(
        Leaf(path=path("n"), kind=LeafKind.NONE),
        Leaf(path=path("i"), kind=LeafKind.SCALAR, dtype="int", value="1"),
        array("zero", shape=(3, 0)),
    )
    plan = plan_writes(tree, ())
    assert plan.chunks == {2: (3, 1)}
    assert plan.regions == {}


def test_an_unknown_dtype_is_refused_by_leaf() -> None:
    tree = tree_of(array("odd", dtype="datetime64", shape=(2,)))
    with pytest.raises(StateRefused, match="odd"):
        plan_writes(tree, (holding(HOSTS[0], [(0, whole((2,)))], tree),))


def excess(shape: tuple[int, ...], chunk: tuple[int, ...], parts: tuple[int, ...]) -> float:
    """Bytes of the chunks that readers of these parts touch, each for itself, over the leaf's."""
    touched = 0
    for box in grid(shape, parts):
        sides = zip(box.start, box.stop, chunk, shape, strict=True)
        touched += math.prod(
            min(-(-stop // c) * c, n) - start // c * c for start, stop, c, n in sides
        )
    return touched / math.prod(shape)


def test_readers_of_rows_columns_and_blocks_touch_few_bytes_too_many() -> None:
    # Weights of a real size, saved by 1 to 8 processes in any way, read by as many in any way.
    splits = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (2, 2), (4, 2), (2, 4)]
    found: list[float] = []
    for shape in ((8192, 8192), (4096, 16384), (16384, 4096)):
        tree = tree_of(*(array("w", i, shape=shape) for i in range(4)))
        for saved in splits:
            owners = [host(rank) for rank in range(math.prod(saved))]
            holdings = tuple(
                holding(owner, [(i, box) for i in range(4)], tree)
                for owner, box in zip(owners, grid(shape, saved), strict=True)
            )
            chunk = plan_writes(tree, holdings).chunks[0]
            found += [excess(shape, chunk, read) for read in splits]
    # Readers that exchange touch none too many; these are readers that know of no other.
    assert float(np.mean(found)) <= 1.5
    assert max(found) <= 4
