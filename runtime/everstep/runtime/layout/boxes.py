"""Half-open index regions of an n-dimensional array, and their arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec


class Box(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Region `start[i] <= index[i] < stop[i]`. A scalar's only region is `Box((), ())`.

    Invariants: (1) equal lengths; (2) `0 <= start[i] <= stop[i]`.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(
            not 0 <= a <= b for a, b in zip(self.start, self.stop, strict=True)
        ):
            raise ValueError(f"not a box: {self.start} to {self.stop}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        return self.size == 0

    def contains(self, other: Box) -> bool:
        return other.is_empty or (
            all(a <= b for a, b in zip(self.start, other.start, strict=True))
            and all(a >= b for a, b in zip(self.stop, other.stop, strict=True))
        )

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None when there is none (an empty one is none)."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def relative_to(self, origin: Box) -> Box:
        """The same region in coordinates that start at `origin.start`."""
        return Box(
            tuple(a - o for a, o in zip(self.start, origin.start, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin.start, strict=True)),
        )


def whole(shape: Sequence[int]) -> Box:
    """The region that is all of an array of this shape."""
    return Box(tuple(0 for _ in shape), tuple(shape))


def subtract(box: Box, other: Box) -> list[Box]:
    """What is left of `box` without `other`, as disjoint boxes (at most two per dimension)."""
    common = box.intersect(other)
    if common is None:
        return [] if box.is_empty else [box]
    left: list[Box] = []
    start, stop = list(box.start), list(box.stop)
    for axis in range(len(start)):
        if start[axis] < common.start[axis]:
            below = list(stop)
            below[axis] = common.start[axis]
            left.append(Box(tuple(start), tuple(below)))
            start[axis] = common.start[axis]
        if common.stop[axis] < stop[axis]:
            above = list(start)
            above[axis] = common.stop[axis]
            left.append(Box(tuple(above), tuple(stop)))
            stop[axis] = common.stop[axis]
    return left


def uncovered(box: Box, covers: Iterable[Box]) -> list[Box]:
    """The parts of `box` that none of `covers` covers, as disjoint boxes."""
    left = [] if box.is_empty else [box]
    for cover in covers:
        left = [piece for part in left for piece in subtract(part, cover)]
        if not left:
            break
    return left
