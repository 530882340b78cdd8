"""Do the parts of a draft tile every leaf exactly once? Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from everstep.runtime.errors import CheckpointInvalid
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import TreeSpec


class NotCovered(CheckpointInvalid):
    """A draft cannot be committed: a region is missing, written twice, or not of the state.

    `leaf` names the leaf and the region, `found` the writers.
    """

    def __init__(
        self, checkpoint: str, leaf: str, box: Box, writers: Sequence[int], expected: str
    ) -> None:
        self.box, self.writers = box, tuple(writers)
        where = f"{leaf} region {list(box.start)} to {list(box.stop)}"
        found = f"written by {', '.join(map(str, writers))}" if writers else "not written"
        super().__init__(checkpoint, where, expected, found)


def check_coverage(
    draft: str,
    tree: TreeSpec,
    chunks: Mapping[int, Sequence[int]],
    parts: Sequence[tuple[int, Sequence[Region]]],
) -> None:
    """Raise `NotCovered` unless every element of every leaf was written exactly once.

    Args:
        draft: for the message.
        tree: of the state.
        chunks: chunk shape by leaf; regions are made of whole chunks.
        parts: regions by writer.
    """
    by_leaf: dict[int, list[tuple[int, Box]]] = {}
    for writer, regions in parts:
        for region in regions:
            by_leaf.setdefault(region.leaf, []).append((writer, region.box))
    for index, leaf in enumerate(tree.leaves):
        written = by_leaf.pop(index, [])
        everything = whole(leaf.shape)
        if not leaf.is_stored_as_bytes:
            for writer, box in written:
                raise NotCovered(draft, leaf.name, box, [writer], "a leaf with bytes")
            continue
        for writer, box in written:
            if len(box.start) != len(leaf.shape) or not everything.contains(box):
                raise NotCovered(draft, leaf.name, box, [writer], f"a region of {leaf.shape}")
        if everything.is_empty:
            continue
        if not written:
            raise NotCovered(draft, leaf.name, everything, [], "exactly one writer")
        _check_leaf(draft, leaf.name, leaf.shape, chunks[index], written)
    for index, written in by_leaf.items():
        raise NotCovered(draft, f"leaf {index}", written[0][1], [written[0][0]], "a known leaf")


def _check_leaf(
    draft: str,
    name: str,
    shape: Sequence[int],
    chunk: Sequence[int],
    written: Sequence[tuple[int, Box]],
) -> None:
    """Count chunk by chunk: linear in the number of chunks, whatever the regions are."""
    owners: dict[tuple[int, ...], int] = {}
    for writer, box in written:
        for cell in _cells(box, chunk):
            if cell in owners:
                region = _cell_box(cell, chunk, shape)
                raise NotCovered(draft, name, region, [owners[cell], writer], "exactly one writer")
            owners[cell] = writer
    count = math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    if len(owners) != count:
        missing = next(cell for cell in _cells(whole(shape), chunk) if cell not in owners)
        raise NotCovered(draft, name, _cell_box(missing, chunk, shape), [], "exactly one writer")


def _cells(box: Box, chunk: Sequence[int]) -> itertools.product[tuple[int, ...]]:
    """Grid positions of the chunks of a box that is not empty."""
    return itertools.product(
        *(range(a // c, -(-b // c)) for a, b, c in zip(box.start, box.stop, chunk, strict=True))
    )


def _cell_box(cell: Sequence[int], chunk: Sequence[int], shape: Sequence[int]) -> Box:
    return Box(
        tuple(i * c for i, c in zip(cell, chunk, strict=True)),
        tuple(min((i + 1) * c, n) for i, c, n in zip(cell, chunk, shape, strict=True)),
    )
