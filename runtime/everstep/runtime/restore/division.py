"""Divide the reading of a stored step among the processes that restore it. Pure.

A stored chunk that several processes need is read by one of them, which hands the others their
parts. Every process computes the same division from the same facts, so nobody has to ask who
reads what. Properties that tests hold on random layouts: a chunk has one reader, who needs it;
every needed element arrives once; and no chunk could move to a less loaded reader who needs it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from everstep.runtime.layout.boxes import Box, uncovered
from everstep.runtime.layout.dtypes import itemsize
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.storage.chunks import cells

_PASSES_MAX = 32
"""Of evening out the loads; two or three are enough for the layouts that people have."""

Held = Mapping[int, Sequence[Box]]
"""By leaf: boxes that a process has on its own disk, in an order that all processes know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedChunk:
    """A stored chunk that several processes need."""

    region: Region
    """The part of the leaf that it holds."""
    reader: int
    needers: tuple[int, ...]
    """In order; the reader is one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Invariants: (1) the chunks are those that two or more processes need, each once, in the
    order of leaf and place; (2) a chunk's reader needs it.
    """

    shared: tuple[SharedChunk, ...]
    loads: Mapping[int, int]
    """Bytes that each process reads from storage, chunks that it alone needs included."""
    saved_bytes: int
    """What would be read in addition if each process read all that it needs."""


def divide_reads(
    needs: Mapping[int, Sequence[Region]],
    chunks: Mapping[int, Sequence[int]],
    tree: TreeSpec,
) -> Division:
    """Choose a reader for every stored chunk: evenly by bytes, among those who need it.

    Args:
        needs: regions by process, those of one process disjoint.
        chunks: shape of the stored chunks, by leaf.
        tree: that was saved.
    """
    loads = dict.fromkeys(sorted(needs), 0)
    shared: list[_Open] = []
    for leaf, by_cell in _needed_cells(needs, chunks):
        shape, chunk = tree.leaves[leaf].shape, tuple(chunks[leaf])
        width = itemsize(tree.leaves[leaf].dtype)
        for cell, needers in by_cell.items():
            box = cell_box(cell, chunk, shape)
            size = box.size * width
            if len(needers) == 1:
                loads[needers[0]] += size
            else:
                shared.append(_Open(leaf, box, size, needers))
    readers = _choose_readers(shared, loads)
    _even_out(shared, readers, loads)
    division = sorted(
        (
            SharedChunk(region=Region(one.leaf, one.box), reader=reader, needers=one.needers)
            for one, reader in zip(shared, readers, strict=True)
        ),
        key=lambda chunk: (chunk.region.leaf, chunk.region.box),
    )
    return Division(
        shared=tuple(division),
        loads=loads,
        saved_bytes=sum(one.size_bytes * (len(one.needers) - 1) for one in shared),
    )


def split_held(boxes: Sequence[Box], held: Sequence[Box]) -> tuple[list[Box], list[Box]]:
    """The parts of disjoint boxes that are held, and those that are not; each in order.

    All processes split alike: they compute each other's needs.
    """
    lacking = sorted(part for box in boxes for part in uncovered(box, held))
    had = sorted(part for box in boxes for part in uncovered(box, lacking))
    return had, lacking


def parts_of(chunk: SharedChunk, boxes: Sequence[Box]) -> list[tuple[int, Box]]:
    """What a process needs of a chunk: the numbers of its boxes, and their parts of it.

    Args:
        chunk: that is shared.
        boxes: all that the process needs of the chunk's leaf, disjoint.
    """
    common = (box.intersect(chunk.region.box) for box in boxes)
    return [(number, part) for number, part in enumerate(common) if part is not None]


def cell_box(cell: Sequence[int], chunk: Sequence[int], shape: Sequence[int]) -> Box:
    """The part of a leaf that the chunk at a grid position holds."""
    return Box(
        tuple(at * side for at, side in zip(cell, chunk, strict=True)),
        tuple(
            min((at + 1) * side, size) for at, side, size in zip(cell, chunk, shape, strict=True)
        ),
    )


_Cell = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Open:
    """A shared chunk without a reader."""

    leaf: int
    box: Box
    size_bytes: int
    needers: tuple[int, ...]


def _needed_cells(
    needs: Mapping[int, Sequence[Region]], chunks: Mapping[int, Sequence[int]]
) -> Iterator[tuple[int, dict[_Cell, tuple[int, ...]]]]:
    """By leaf: the grid positions that somebody needs, and who."""
    by_leaf: defaultdict[int, dict[int, list[Box]]] = defaultdict(dict)
    for process in sorted(needs):
        for region in needs[process]:
            if not region.box.is_empty:
                by_leaf[region.leaf].setdefault(process, []).append(region.box)
    for leaf, by_process in sorted(by_leaf.items()):
        # Replicas need the same boxes: their cells are looked up once, however many they are.
        alike: defaultdict[tuple[Box, ...], list[int]] = defaultdict(list)
        for process, listed in by_process.items():
            alike[tuple(sorted(listed))].append(process)
        found: defaultdict[_Cell, list[int]] = defaultdict(list)
        for boxes, processes in alike.items():
            touched = itertools.chain.from_iterable(cells(box, chunks[leaf]) for box in boxes)
            for cell in dict.fromkeys(touched):
                found[cell] += processes
        yield leaf, {cell: tuple(sorted(needers)) for cell, needers in sorted(found.items())}


def _choose_readers(shared: Sequence[_Open], loads: dict[int, int]) -> list[int]:
    """The least loaded of those who need a chunk; first where there are few, and what is large."""
    readers = [-1] * len(shared)
    order = sorted(
        range(len(shared)),
        key=lambda i: (len(shared[i].needers), shared[i].needers, -shared[i].size_bytes),
    )
    for needers, group in itertools.groupby(order, key=lambda i: shared[i].needers):
        queue = [(loads[process], process) for process in needers]
        heapq.heapify(queue)
        for at in group:
            load, process = queue[0]
            readers[at] = process
            loads[process] = load + shared[at].size_bytes
            heapq.heapreplace(queue, (loads[process], process))
    return readers


def _even_out(shared: Sequence[_Open], readers: list[int], loads: dict[int, int]) -> None:
    """Move chunks to readers who are better off with them than the present ones.

    A choice that was the best may not be so any more after later ones.
    """
    for _ in range(_PASSES_MAX):
        is_even = True
        for at, one in enumerate(shared):
            reader = readers[at]
            other = min(one.needers, key=lambda process: (loads[process], process))
            if loads[reader] > loads[other] + one.size_bytes:
                loads[reader] -= one.size_bytes
                loads[other] += one.size_bytes
                readers[at] = other
                is_even = False
        if is_even:
            return
