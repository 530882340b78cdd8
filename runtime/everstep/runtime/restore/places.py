"""The part of an array that a box names, as a view in every number of dimensions."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from everstep.runtime.layout.boxes import Box


def part_of(array: NDArray[Any], box: Box, origin: Box) -> NDArray[Any]:
    """The elements of `box` in an array that holds `origin`; always a view, also of a scalar."""
    # The ellipsis makes numpy return an array of no dimensions where it would return a scalar.
    index: Any = (*box.relative_to(origin).slices(), ...)
    part: NDArray[Any] = array[index]
    return part
