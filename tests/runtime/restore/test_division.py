"""The division of reads: each chunk once, every element once, and evenly."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import array, tree_of
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.dtypes import itemsize
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.restore.division import Division, divide_reads, parts_of, split_held
from everstep.runtime.restore.places import part_of
from everstep.runtime.storage.chunks import cells

Needs = dict[int, list[Region]]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TreeSpec, dict[int, tuple[int, ...]], Needs]:
    """Leaves, their chunks, and what some processes need of them: any grid, any of its boxes."""
    processes = draw(st.integers(1, 5))
    leaves = [
        array(
            "leaf",
            index,
            dtype=draw(st.sampled_from(("int8", "float32"))),
            shape=draw(st.lists(st.integers(0, 8), max_size=3)),
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    chunks = {
        index: tuple(draw(st.integers(1, max(n, 1))) for n in leaf.shape)
        for index, leaf in enumerate(leaves)
    }
    needs: Needs = {process: [] for process in range(processes)}
    for index, leaf in enumerate(leaves):
        boxes = [Box((), ())]
        for length in leaf.shape:
            inner = draw(st.sets(st.integers(0, length), max_size=3))
            pairs = list(itertools.pairwise(sorted({0, length, *inner}))) or [(0, 0)]
            boxes = [Box((*b.start, a), (*b.stop, z)) for b in boxes for a, z in pairs]
        for process in range(processes):
            for box in draw(st.lists(st.sampled_from(boxes), unique=True)):
                needs[process].append(Region(index, box))
    return tree_of(*leaves), chunks, needs


def touched(regions: Sequence[Region], chunks: dict[int, tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {
        (region.leaf, *cell)
        for region in regions
        if not region.box.is_empty
        for cell in cells(region.box, chunks[region.leaf])
    }


def cell_of(region: Region, chunks: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    starts = zip(region.box.start, chunks[region.leaf], strict=True)
    return (region.leaf, *(start // side for start, side in starts))


def size_bytes(region: Region, tree: TreeSpec) -> int:
    return region.box.size * itemsize(tree.leaves[region.leaf].dtype)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_each_needed_chunk_is_read_once_by_a_process_that_needs_it(
    layout: tuple[TreeSpec, dict[int, tuple[int, ...]], Needs],
) -> None:
    tree, chunks, needs = layout
    division = divide_reads(needs, chunks, tree)
    shared = [cell_of(one.region, chunks) for one in division.shared]
    assert len(shared) == len(set(shared))
    for process, regions in needs.items():
        alone = touched(regions, chunks) - set(shared)
        others = [r for p, r in needs.items() if p != process]
        assert all(not (alone & touched(r, chunks)) for r in others)
    for one, cell in zip(division.shared, shared, strict=True):
        needers = tuple(p for p, regions in needs.items() if cell in touched(regions, chunks))
        assert one.needers == needers
        assert len(needers) > 1
        assert one.reader in needers


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_every_needed_element_arrives_exactly_once(
    layout: tuple[TreeSpec, dict[int, tuple[int, ...]], Needs],
) -> None:
    tree, chunks, needs = layout
    division = divide_reads(needs, chunks, tree)
    for process, regions in needs.items():
        counts = [np.zeros(region.box.shape, int) for region in regions]
        mine = [one for one in division.shared if process in one.needers]
        for one in mine:
            of_leaf = [n for n, region in enumerate(regions) if region.leaf == one.region.leaf]
            for number, part in parts_of(one, [regions[n].box for n in of_leaf]):
                at = of_leaf[number]
                part_of(counts[at], part, regions[at].box)[...] += 1
        shared = {cell_of(one.region, chunks) for one in mine}
        for number, region in enumerate(regions):
            if region.box.is_empty:
                continue
            for cell in cells(region.box, chunks[region.leaf]):
                if (region.leaf, *cell) not in shared:
                    sides = zip(cell, chunks[region.leaf], strict=True)
                    low = tuple(at * side for at, side in sides)
                    high = tuple(
                        min(a + side, n)
                        for a, side, n in zip(
                            low, chunks[region.leaf], tree.leaves[region.leaf].shape, strict=True
                        )
                    )
                    common = Box(low, high).intersect(region.box)
                    assert common is not None
                    part_of(counts[number], common, region.box)[...] += 1
        assert all((count == 1).all() for count in counts)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_no_chunk_would_be_read_better_by_another_who_needs_it(
    layout: tuple[TreeSpec, dict[int, tuple[int, ...]], Needs],
) -> None:
    tree, chunks, needs = layout
    division = divide_reads(needs, chunks, tree)
    loads = dict.fromkeys(needs, 0)
    for process, regions in needs.items():
        shared = {cell_of(one.region, chunks) for one in division.shared}
        for leaf, *cell in touched(regions, chunks) - shared:
            box = _cell_box(leaf, cell, chunks, tree)
            loads[process] += size_bytes(Region(leaf, box), tree)
    for one in division.shared:
        loads[one.reader] += size_bytes(one.region, tree)
    assert loads == division.loads
    for one in division.shared:
        size = size_bytes(one.region, tree)
        assert all(loads[one.reader] <= loads[other] + size for other in one.needers)
    everything = sum(size_bytes(_box_of(c, chunks, tree), tree) for c in _cells_once(needs, chunks))
    assert sum(loads.values()) == everything


def _cell_box(
    leaf: int, cell: Sequence[int], chunks: dict[int, tuple[int, ...]], tree: TreeSpec
) -> Box:
    sides = list(zip(cell, chunks[leaf], tree.leaves[leaf].shape, strict=True))
    return Box(tuple(a * c for a, c, _ in sides), tuple(min(a * c + c, n) for a, c, n in sides))


def _box_of(cell: tuple[int, ...], chunks: dict[int, tuple[int, ...]], tree: TreeSpec) -> Region:
    return Region(cell[0], _cell_box(cell[0], cell[1:], chunks, tree))


def _cells_once(needs: Needs, chunks: dict[int, tuple[int, ...]]) -> set[tuple[int, ...]]:
    return set().union(*(touched(regions, chunks) for regions in needs.values()))


@given(layouts())
def test_every_process_computes_the_same(
    layout: tuple[TreeSpec, dict[int, tuple[int, ...]], Needs],
) -> None:
    tree, chunks, needs = layout
    backwards = {process: needs[process] for process in sorted(needs, reverse=True)}
    assert divide_reads(needs, chunks, tree) == divide_reads(backwards, chunks, tree)


def test_replicas_read_equal_shares() -> None:
    tree = tree_of(array("w", shape=(64, 64)), array("b", shape=(64,)))
    chunks = {0: (8, 64), 1: (64,)}
    regions = [Region(0, whole((64, 64))), Region(1, whole((64,)))]
    division: Division = divide_reads(dict.fromkeys(range(4), regions), chunks, tree)
    assert max(division.loads.values()) - min(division.loads.values()) <= 64 * 4
    assert division.saved_bytes == 3 * (64 * 64 + 64) * 4


def test_who_reads_much_alone_reads_less_of_what_all_need() -> None:
    tree = tree_of(array("mine", shape=(64, 8)), array("ours", shape=(128, 8)))
    chunks = {0: (8, 8), 1: (8, 8)}
    ours = Region(1, whole((128, 8)))
    division = divide_reads({0: [Region(0, whole((64, 8))), ours], 1: [ours]}, chunks, tree)
    assert division.loads == {0: 96 * 8 * 4, 1: 96 * 8 * 4}


@settings(max_examples=200, deadline=None)
@given(layouts(), st.randoms(use_true_random=False))
def test_what_a_disk_holds_and_what_it_lacks_make_up_the_whole_and_overlap_nowhere(
    layout: tuple[TreeSpec, dict[int, tuple[int, ...]], Needs], dice: random.Random
) -> None:
    tree, _, needs = layout
    for index, leaf in enumerate(tree.leaves):
        boxes = [r.box for regions in needs.values() for r in regions if r.leaf == index]
        held = dice.sample(boxes, dice.randint(0, len(boxes)))
        on_disk = np.zeros(leaf.shape, int)
        for box in held:
            part_of(on_disk, box, whole(leaf.shape))[...] = 1
        wanted = next(([r.box for r in n if r.leaf == index] for n in needs.values()), [])
        had, lacking = split_held(wanted, held)
        for parts, expected in ((had, 1), (lacking, 0)):
            for part in parts:
                found = part_of(on_disk, part, whole(leaf.shape))
                assert (found == expected).all()
                assert any(box.contains(part) for box in wanted)
        counts = np.zeros(leaf.shape, int)
        for part in (*had, *lacking):
            part_of(counts, part, whole(leaf.shape))[...] += 1
        for box in wanted:
            part_of(counts, box, whole(leaf.shape))[...] -= 1
        assert not counts.any()
