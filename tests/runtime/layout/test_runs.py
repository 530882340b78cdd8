"""Runs of elements as boxes."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.runs import is_run, run_boxes, span_of

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(st.data(), shapes)
def test_boxes_of_a_run_hold_its_elements_in_order(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = np.arange(size).reshape(shape)
    found = [int(x) for box in run_boxes(shape, start, stop) for x in numbers[box.slices()].flat]
    assert found == list(range(start, stop))
    assert len(run_boxes(shape, start, stop)) <= max(2 * len(shape) - 1, 1)


@given(st.data(), shapes)
def test_a_box_is_a_run_exactly_when_its_elements_follow_each_other(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    box = Box(start, stop)
    numbers = np.arange(math.prod(shape)).reshape(shape)[box.slices()]
    inside = np.asarray(numbers).reshape(-1)
    first, last = span_of(box, shape)
    assert (first, last) == (inside[0], inside[-1] + 1)
    assert is_run(box, shape) == bool((np.diff(inside) == 1).all())
