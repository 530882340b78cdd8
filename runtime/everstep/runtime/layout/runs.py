"""Runs of bytes in a shard, and the boxes that lie in them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from everstep.runtime.layout.boxes import Box


def run_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements `start` to `stop` of a C-order array, as boxes in the order of the elements.

    At most two boxes per dimension, less one.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    first, before = divmod(start, inner)
    last, after = divmod(stop, inner)
    if first == last:
        return [_within(first, box) for box in run_boxes(shape[1:], before, after)]
    boxes: list[Box] = []
    if before:
        boxes += [_within(first, box) for box in run_boxes(shape[1:], before, inner)]
        first += 1
    if first < last:
        rest = tuple(shape[1:])
        boxes.append(Box((first, *(0 for _ in rest)), (last, *rest)))
    if after:
        boxes += [_within(last, box) for box in run_boxes(shape[1:], 0, after)]
    return boxes


def span_of(box: Box, shape: Sequence[int]) -> tuple[int, int]:
    """First element of a box in a C-order array of this shape, and one past its last."""
    first = last = 0
    for start, stop, length in zip(box.start, box.stop, shape, strict=True):
        first = first * length + start
        last = last * length + stop - 1
    return (first, first) if box.is_empty else (first, last + 1)


def is_run(box: Box, shape: Sequence[int]) -> bool:
    """Whether the elements of a box lie one after the other in a C-order array of this shape."""
    first, last = span_of(box, shape)
    return last - first == box.size


def _within(index: int, box: Box) -> Box:
    return Box((index, *box.start), (index + 1, *box.stop))
