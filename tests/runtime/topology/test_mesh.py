from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.runtime.errors import ConfigurationError, Infeasible
from everstep.runtime.topology.mesh import SLICE_AXIS, arrange


@pytest.mark.parametrize(
    ("axes", "slices", "devices", "shape"),
    [
        ({"data": -1}, 3, 6, (3, 2)),
        ({"data": -1, "fsdp": 4}, 2, 16, (2, 2, 4)),
        ({"data": 2, "fsdp": 2}, 1, 4, (1, 2, 2)),
        ({}, 2, 8, (2, 4)),
        ({"data": 1, "model": -1}, 4, 4, (4, 1, 1)),
    ],
)
def test_axes_fill_the_devices_of_a_slice(
    axes: dict[str, int], slices: int, devices: int, shape: tuple[int, ...]
) -> None:
    plan = arrange(axes, slice_count=slices, device_count=devices)
    assert plan.shape == shape
    assert plan.names == (SLICE_AXIS, *(axes or {"data": -1}))


@pytest.mark.parametrize(
    ("axes", "named", "remedy"),
    [
        ({"data": 3}, "data=3", "4 devices of a slice"),
        ({"data": -1, "fsdp": 3}, "data=-1", "divides the 4 devices"),
        ({"data": -1, "fsdp": -1}, "fsdp", "at most one"),
        ({"data": 0}, "data", "positive"),
        ({"data": -2}, "data", "positive"),
        ({"slice": 2, "data": 2}, "slice", "another name"),
    ],
)
def test_sizes_that_do_not_fit_name_the_axis_and_what_would_do(
    axes: dict[str, int], named: str, remedy: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        arrange(axes, slice_count=2, device_count=8)
    assert named in str(caught.value)
    assert remedy in caught.value.expected


@pytest.mark.parametrize(("slices", "devices"), [(2, 3), (0, 4), (3, 0)])
def test_slices_of_unequal_size_are_infeasible(slices: int, devices: int) -> None:
    with pytest.raises(Infeasible, match="same number"):
        arrange({"data": -1}, slice_count=slices, device_count=devices)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_an_inferred_axis_takes_what_is_left(slices: int, data: int, fsdp: int) -> None:
    plan = arrange(
        {"data": -1, "fsdp": fsdp}, slice_count=slices, device_count=slices * data * fsdp
    )
    assert plan.shape == (slices, data, fsdp)
    assert math.prod(plan.shape) == slices * data * fsdp
