"""The mesh of an incarnation: sizes of its axes from the devices that were granted. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from everstep.runtime.errors import ConfigurationError, Infeasible

SLICE_AXIS = "slice"
"""The outermost axis of every mesh; only it crosses from slice to slice."""

INFERRED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """Names and sizes, outermost first.

    Devices in slice-major order (rank of the slice, host in the slice, device of the host), laid
    out in C order in this shape, put each slice at one index of the first axis.

    Invariants: (1) as many names as sizes; (2) the first is the slice axis.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]


def arrange(axes: Mapping[str, int], *, slice_count: int, device_count: int) -> MeshPlan:
    """Size the axes of a mesh over all granted devices.

    Args:
        axes: sizes within one slice, outermost first; at most one is -1 and is inferred. None at
            all: one axis `data` over the slice's devices.
        slice_count: granted slices.
        device_count: devices of all slices together.

    Raises:
        ConfigurationError: names the axis, what was found and what would do.
        Infeasible: the slices do not have equally many devices.
    """
    if slice_count < 1 or device_count < 1 or device_count % slice_count:
        raise Infeasible(
            f"{device_count} devices in {slice_count} slices",
            change="every slice needs the same number of devices, at least one",
        )
    per_slice = device_count // slice_count
    sizes = dict(axes) or {"data": INFERRED}
    inferred = [name for name, size in sizes.items() if size == INFERRED]
    for name, size in sizes.items():
        field = f"run.mesh({name}=…)"
        if name == SLICE_AXIS:
            raise ConfigurationError(
                field, size, f"another name: the axis {SLICE_AXIS!r} is there, {slice_count} long"
            )
        if size != INFERRED and size < 1:
            raise ConfigurationError(field, size, "a positive size, or -1 to infer it")
    if len(inferred) > 1:
        raise ConfigurationError(
            "run.mesh", dict.fromkeys(inferred, INFERRED), "at most one axis of size -1"
        )
    fixed = math.prod(size for size in sizes.values() if size != INFERRED)
    if inferred:
        if per_slice % fixed:
            raise ConfigurationError(
                f"run.mesh({inferred[0]}=-1)",
                _product(sizes),
                f"other sizes whose product divides the {per_slice} devices of a slice",
            )
        sizes[inferred[0]] = per_slice // fixed
    elif fixed != per_slice:
        raise ConfigurationError(
            "run.mesh",
            _product(sizes),
            f"sizes whose product is the {per_slice} devices of a slice, or one of them -1",
        )
    return MeshPlan(names=(SLICE_AXIS, *sizes), shape=(slice_count, *sizes.values()))


def _product(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{name}={size}" for name, size in sizes.items())
