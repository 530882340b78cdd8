"""Read plans on random layouts: every element once, from the cheapest source that has it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.runtime.errors import CheckpointInvalid
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.manifest import Region, Shard
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec
from everstep.runtime.restore.places import part_of
from everstep.runtime.restore.reshard import (
    Bad,
    Piece,
    Read,
    SourceHolding,
    SourceKind,
    plan_reads,
    replan,
)


def tree_of(shapes: Sequence[tuple[int, ...]]) -> TreeSpec:
    return TreeSpec(
        leaves=tuple(
            Leaf(
                path=(Key(KeyKind.SEQUENCE, str(i)),),
                kind=LeafKind.ARRAY,
                dtype="float32",
                shape=shape,
            )
            for i, shape in enumerate(shapes)
        )
    )


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tiling of a shape by cuts along each axis: what any mesh makes of an array."""
    boxes = [Box((), ())]
    for length in shape:
        inner = draw(st.sets(st.integers(1, max(length - 1, 1)), max_size=3))
        cuts = sorted({0, length} | {c for c in inner if c < length})
        pairs = list(itertools.pairwise(cuts))
        boxes = [Box((*b.start, a), (*b.stop, z)) for b in boxes for a, z in pairs]
    return boxes


@st.composite
def stories(draw: st.DrawFn) -> tuple[TreeSpec, list[SourceHolding], list[Region]]:
    shapes = draw(
        st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=3)
    )
    sources = [SourceHolding(index=0, kind=SourceKind.STORAGE, shards=None)]
    for index in range(1, draw(st.integers(1, 4))):
        shards: list[Shard] = []
        for leaf, shape in enumerate(shapes):
            boxes = draw(grids(shape))
            kept = draw(st.lists(st.booleans(), min_size=len(boxes), max_size=len(boxes)))
            held = itertools.compress(boxes, kept)
            shards += [Shard(leaf, box, 0, box.size * 4) for box in held]
        kind = draw(st.sampled_from([SourceKind.OWN, SourceKind.PEER_SLICE, SourceKind.PEER]))
        sources.append(SourceHolding(index=index, kind=kind, shards=tuple(shards)))
    wanted: list[Region] = []
    for leaf, shape in enumerate(shapes):
        boxes = draw(grids(shape))
        chosen = draw(st.lists(st.sampled_from(boxes), max_size=len(boxes)))
        # Shifted boxes overlap the others: not what a mesh makes, but what a plan must bear.
        extra = draw(grids(shape))
        chosen += draw(st.lists(st.sampled_from(extra), max_size=1))
        wanted += [Region(leaf, box) for box in chosen]
    return tree_of(shapes), draw(st.permutations(sources)), wanted


def counts(tree: TreeSpec, regions: Sequence[Region]) -> list[np.ndarray]:
    """How often each element of each leaf is in the regions."""
    found = [np.zeros(leaf.shape, int) for leaf in tree.leaves]
    for region in regions:
        part_of(found[region.leaf], region.box, whole(found[region.leaf].shape))[...] += 1
    return found


def holds(source: SourceHolding, region: Region) -> bool:
    return source.shards is None or any(
        s.leaf == region.leaf and s.box.contains(region.box) for s in source.shards
    )


def element_regions(region: Region) -> list[Region]:
    starts = np.ndindex(*region.box.shape)
    origin = region.box.start
    found: list[Region] = []
    for at in starts:
        start = tuple(a + o for a, o in zip(at, origin, strict=True))
        found.append(Region(region.leaf, Box(start, tuple(a + 1 for a in start))))
    return found


@given(stories(), st.integers(0, 3))
def test_every_wanted_element_is_read_once_and_placed_everywhere(
    story: tuple[TreeSpec, list[SourceHolding], list[Region]], turn: int
) -> None:
    tree, sources, wanted = story
    plan = plan_reads(wanted, sources, tree, turn=turn)
    read = counts(tree, [r.piece.region for r in plan.reads])
    for once, often in zip(read, counts(tree, wanted), strict=True):
        np.testing.assert_array_equal(once, often > 0)
    for target, region in enumerate(wanted):
        placed = [r.piece.region for r in plan.reads if r.piece.target == target]
        placed += [c.piece.region for c in plan.copies if c.piece.target == target]
        expected = counts(tree, [region])
        for a, b in zip(counts(tree, placed), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    for copy in plan.copies:
        origin = [r.piece.region for r in plan.reads if r.piece.target == copy.origin]
        read_there = counts(tree, origin)[copy.piece.region.leaf]
        part = part_of(read_there, copy.piece.region.box, whole(read_there.shape))
        assert part.all(), "a copy is made of what was read"


@given(stories())
def test_each_element_comes_from_a_cheapest_source_and_lies_in_one_shard(
    story: tuple[TreeSpec, list[SourceHolding], list[Region]],
) -> None:
    tree, sources, wanted = story
    by_index = {source.index: source for source in sources}
    for read in plan_reads(wanted, sources, tree).reads:
        source = by_index[read.source]
        if source.shards is None:
            assert read.shard is None
        else:
            assert read.shard is not None
            shard = source.shards[read.shard]
            assert shard.leaf == read.piece.region.leaf
            assert shard.box.contains(read.piece.region.box)
        for element in element_regions(read.piece.region):
            cheapest = min(s.kind for s in sources if holds(s, element))
            assert source.kind == cheapest


@given(stories(), st.data())
def test_after_a_failure_exactly_what_is_missing_is_planned_again(
    story: tuple[TreeSpec, list[SourceHolding], list[Region]], data: st.DataObject
) -> None:
    tree, sources, wanted = story
    reads = plan_reads(wanted, sources, tree).reads
    memory = [r for r in reads if r.shard is not None]
    failed: list[Read] = data.draw(st.lists(st.sampled_from(memory), unique=True)) if memory else []
    is_whole = data.draw(st.booleans())
    bad = {
        Bad(source=r.source) if is_whole else Bad(source=r.source, shard=r.shard) for r in failed
    }
    again = replan([r.piece for r in failed], sources, tree, bad=bad)
    for a, b in zip(
        counts(tree, [r.piece.region for r in again]),
        counts(tree, [r.piece.region for r in failed]),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    for read in again:
        assert Bad(source=read.source) not in bad
        assert Bad(source=read.source, shard=read.shard) not in bad


def holding(index: int, kind: SourceKind, *shards: Shard) -> SourceHolding:
    return SourceHolding(index=index, kind=kind, shards=shards)


def rows(leaf: int, start: int, stop: int) -> Shard:
    return Shard(leaf, Box((start,), (stop,)), 0, 4 * (stop - start))


def test_sources_are_mixed_within_one_region() -> None:
    tree = tree_of([(10,)])
    sources = [
        holding(0, SourceKind.PEER, rows(0, 0, 8)),
        holding(1, SourceKind.OWN, rows(0, 0, 3)),
        SourceHolding(index=2, kind=SourceKind.STORAGE, shards=None),
        holding(3, SourceKind.PEER_SLICE, rows(0, 2, 5)),
    ]
    plan = plan_reads([Region(0, whole((10,)))], sources, tree)
    assert {
        (r.source, r.piece.region.box.start[0], r.piece.region.box.stop[0]) for r in plan.reads
    } == {
        (1, 0, 3),
        (3, 3, 5),
        (0, 5, 8),
        (2, 8, 10),
    }


def test_a_region_that_nobody_holds_is_named() -> None:
    tree = tree_of([(3,), (10,)])
    sources = [holding(0, SourceKind.OWN, rows(1, 0, 4), rows(1, 6, 10))]
    with pytest.raises(CheckpointInvalid) as caught:
        plan_reads([Region(1, whole((10,)))], sources, tree)
    assert caught.value.leaf == "[1]"
    assert "[4] to [6]" in str(caught.value)


def test_when_all_sources_of_a_region_are_bad_it_is_named() -> None:
    tree = tree_of([(10,)])
    sources = [
        holding(0, SourceKind.OWN, rows(0, 0, 10)),
        SourceHolding(index=1, kind=SourceKind.STORAGE, shards=None),
    ]
    piece = Piece(target=0, region=Region(0, whole((10,))))
    bad = [Bad(source=0, shard=0), Bad(source=1, leaf=0)]
    with pytest.raises(CheckpointInvalid, match="none that is left"):
        replan([piece], sources, tree, bad=bad)


def test_equal_sources_share_a_large_state_and_one_serves_a_small_one() -> None:
    size = 1 << 20
    tree = tree_of([(size,)] * 8)
    shards = [rows(leaf, 0, size) for leaf in range(8)]
    sources = [holding(i, SourceKind.PEER, *shards) for i in range(2)]
    wanted = [Region(leaf, whole((size,))) for leaf in range(8)]
    large = plan_reads(wanted, sources, tree).reads
    assert sorted(r.source for r in large) == [0, 0, 0, 0, 1, 1, 1, 1]
    tiny = [Region(leaf, Box((0,), (4,))) for leaf in range(8)]
    assert {r.source for r in plan_reads(tiny, sources, tree).reads} == {0}
    assert {r.source for r in plan_reads(tiny, sources, tree, turn=1).reads} == {1}


def test_an_empty_region_needs_no_source() -> None:
    tree = tree_of([(0, 3)])
    assert plan_reads([Region(0, whole((0, 3)))], [], tree).reads == ()


def test_a_scalar_is_read_whole() -> None:
    tree = tree_of([()])
    source = holding(0, SourceKind.OWN, Shard(0, Box((), ()), 0, 4))
    (read,) = plan_reads([Region(0, Box((), ()))], [source], tree).reads
    assert math.prod(read.piece.region.box.shape) == 1
