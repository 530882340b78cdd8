"""Reads from storage: exact, and each chunk once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from everstep.runtime.errors import CheckpointInvalid, ChecksumMismatch, StorageUnavailable
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec
from everstep.runtime.restore.outcome import Outcome, Target
from everstep.runtime.restore.places import part_of
from everstep.runtime.restore.reshard import Bad, Piece, Read, SourceKind
from everstep.runtime.restore.stored import read_stored


class ArrayStore:
    """One leaf in chunks in memory, that counts what is read and can be damaged."""

    name = "array store"

    def __init__(self, array: NDArray[Any], chunk: tuple[int, ...]) -> None:
        self.array, self.chunk = array, chunk
        self.read_cells: Counter[tuple[int, ...]] = Counter()
        self.damaged: set[tuple[int, ...]] = set()
        self.bytes_at_once = 0
        self.failure: Exception | None = None

    def chunk_of(self, leaf: int) -> tuple[int, ...]:
        assert leaf == 0
        if self.failure is not None:
            raise self.failure
        return self.chunk

    def read_many(self, reads: Sequence[tuple[Region, NDArray[Any]]]) -> None:
        if self.failure is not None:
            raise self.failure
        self.bytes_at_once = max(self.bytes_at_once, sum(out.nbytes for _, out in reads))
        for region, out in reads:
            ranges = zip(region.box.start, region.box.stop, self.chunk, strict=True)
            for cell in itertools.product(*(range(a // c, -(-b // c)) for a, b, c in ranges)):
                if cell in self.damaged:
                    raise ChecksumMismatch("step 1", "leaf", "good", f"bad {cell}")
                self.read_cells[cell] += 1
            out[...] = part_of(self.array, region.box, whole(self.array.shape))


def tree_of(shape: tuple[int, ...]) -> TreeSpec:
    key = Key(KeyKind.DICT, "leaf")
    return TreeSpec(leaves=(Leaf(path=(key,), kind=LeafKind.ARRAY, dtype="int32", shape=shape),))


def numbers(shape: tuple[int, ...]) -> NDArray[Any]:
    return np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)


def read_all(
    store: ArrayStore, boxes: Sequence[Box], memory_bytes: int = 1 << 20
) -> tuple[list[Target], Outcome]:
    targets = [Target(region=Region(0, b), array=np.zeros(b.shape, np.int32)) for b in boxes]
    reads = [
        Read(source=4, shard=None, piece=Piece(target=i, region=Region(0, box)))
        for i, box in enumerate(boxes)
    ]
    outcome = Outcome()
    read_stored(
        store, 4, reads, targets, tree_of(store.array.shape), outcome, memory_bytes=memory_bytes
    )
    return targets, outcome


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Box]]:
    """A shape, a chunk, and some of the boxes of a grid over the shape: disjoint, as reads are."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    chunk = tuple(draw(st.integers(1, n)) for n in shape)
    boxes = [Box((), ())]
    for length in shape:
        inner = draw(st.sets(st.integers(1, length), max_size=3))
        pairs = list(itertools.pairwise(sorted({0, length, *inner})))
        boxes = [Box((*b.start, a), (*b.stop, z)) for b in boxes for a, z in pairs]
    return shape, chunk, draw(st.lists(st.sampled_from(boxes), unique=True, min_size=1))


@given(layouts(), st.sampled_from([1, 100, 1 << 20]))
def test_each_piece_is_exact_and_each_chunk_is_read_once(
    layout: tuple[tuple[int, ...], tuple[int, ...], list[Box]], memory_bytes: int
) -> None:
    shape, chunk, boxes = layout
    store = ArrayStore(numbers(shape), chunk)
    targets, outcome = read_all(store, boxes, memory_bytes)
    for target in targets:
        expected = part_of(store.array, target.region.box, whole(shape))
        np.testing.assert_array_equal(target.array, expected)
    assert max(store.read_cells.values()) == 1
    assert outcome.bytes_by_kind[SourceKind.STORAGE] == sum(t.array.nbytes for t in targets)
    assert not outcome.missing
    assert not outcome.bad


def test_what_is_in_flight_is_bounded() -> None:
    store = ArrayStore(numbers((64, 64)), (8, 8))
    columns = [Box((0, i), (64, i + 4)) for i in range(0, 64, 4)]
    read_all(store, columns, memory_bytes=1024)
    assert store.bytes_at_once <= 1024
    assert max(store.read_cells.values()) == 1


def test_only_what_a_damaged_chunk_holds_is_missing() -> None:
    store = ArrayStore(numbers((16, 16)), (8, 8))
    store.damaged = {(1, 0)}
    columns = [Box((0, i), (16, i + 4)) for i in range(0, 16, 4)]
    targets, outcome = read_all(store, columns)
    assert sorted((m.target, m.region.box) for m in outcome.missing) == [
        (0, Box((8, 0), (16, 4))),
        (1, Box((8, 4), (16, 8))),
    ]
    assert outcome.bad == {Bad(source=4, leaf=0)}
    assert len(outcome.rejected) == 1
    for target in targets[2:]:
        expected = store.array[target.region.box.slices()]
        np.testing.assert_array_equal(target.array, expected)


def test_storage_that_does_not_answer_is_not_called_damaged() -> None:
    store = ArrayStore(numbers((4,)), (2,))
    store.failure = StorageUnavailable("no answer")
    for boxes in ([whole((4,))], [Box((0,), (2,)), Box((2,), (4,))]):
        _, outcome = read_all(store, boxes)
        assert outcome.unavailable is store.failure
        assert [m.region.box for m in outcome.missing] == boxes
        assert outcome.bad == {Bad(source=4)}


def test_storage_that_does_not_open_loses_everything_with_its_reason() -> None:
    store = ArrayStore(numbers((4,)), (2,))
    store.failure = CheckpointInvalid("step 1", "manifest", "one", "none")
    _, outcome = read_all(store, [Box((0,), (2,)), Box((2,), (4,))])
    assert outcome.bad == {Bad(source=4)}
    assert outcome.unavailable is None
    assert "manifest" in outcome.rejected[0]
