"""Parts of arrays: named by boxes as views, and filled."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.layout.boxes import Box


def part_of(array: NDArray[Any], box: Box, origin: Box) -> NDArray[Any]:
    """The elements of `box` in an array that holds `origin`; always a view, also of a scalar."""
    # The ellipsis makes numpy return an array of no dimensions where it would return a scalar.
    index: Any = (*box.relative_to(origin).slices(), ...)
    part: NDArray[Any] = array[index]
    return part


def place_cast(values: NDArray[Any], place: NDArray[Any]) -> None:
    """Copy values to their place, cast where that is of another dtype: asked for, so rounded.

    What a smaller float cannot hold becomes infinite, as everywhere else.
    """
    with np.errstate(all="ignore"):
        place[...] = values
