"""What a restore wants of each leaf on this process, and on all of them. Knows jax's shardings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from everstep.runtime.errors import StateRefused
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.compare import Match
from everstep.runtime.layout.dtypes import itemsize, numpy_dtype
from everstep.runtime.layout.flat import FlatState
from everstep.runtime.layout.tree import Leaf, LeafKind

Device = Any
"""`jax.Device`, which is not a type to every checker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One leaf that has bytes: where it goes, and which boxes of it this process needs."""

    index: int
    """In the wanted tree."""
    saved: int
    """In the saved tree."""
    leaf: Leaf
    sharding: jax.sharding.Sharding | None
    """None: a host array."""
    devices: tuple[tuple[Device, Box], ...]
    boxes: tuple[Box, ...]
    """Distinct, in order."""
    everybody: dict[int, tuple[Box, ...]]
    """The boxes that each process needs, where the array is of several processes."""

    @property
    def is_in_flight(self) -> bool:
        """Whether host memory is only the way to a device. On CPU it is the device's own."""
        devices: Iterable[Device] = () if self.sharding is None else self.sharding.device_set
        return any(device.platform != "cpu" for device in devices)

    @property
    def size_bytes(self) -> int:
        """Of host memory that a process needs for it at most; equal on all processes."""
        boxes = self.everybody.values() or [(whole(self.leaf.shape),)]
        return max(sum(b.size for b in own) for own in boxes) * itemsize(self.leaf.dtype)


def shardings_of(
    like: FlatState, shardings: Sequence[jax.sharding.Sharding | None] | None
) -> list[jax.sharding.Sharding | None]:
    """One per leaf of `like`: its own, or the one that was given for it."""
    given = iter(shardings or ())
    return [
        None
        if leaf.kind in (LeafKind.NONE, LeafKind.EMPTY)
        else _one_of(next(given, None), getattr(value, "sharding", None))
        for leaf, value in zip(like.tree.leaves, like.values, strict=True)
    ]


def _one_of(
    given: jax.sharding.Sharding | None, own: jax.sharding.Sharding | None
) -> jax.sharding.Sharding | None:
    return own or given


def plan_wanted(
    like: FlatState,
    shardings: Sequence[jax.sharding.Sharding | None] | None,
    matches: Sequence[Match],
    *,
    is_shared: bool,
) -> list[Wanted]:
    """Where every leaf with bytes goes. Refuses all that cannot go there, together."""
    bad: list[tuple[str, str]] = []
    wanted: list[Wanted] = []
    known: dict[tuple[object, tuple[int, ...]], dict[int, tuple[Box, ...]]] = {}
    for index, (leaf, sharding) in enumerate(
        zip(like.tree.leaves, shardings_of(like, shardings), strict=True)
    ):
        saved = matches[index].saved
        if saved is None or not leaf.is_stored_as_bytes:
            continue
        placed: tuple[tuple[Device, Box], ...] = ()
        boxes: Iterable[Box] = [whole(leaf.shape)]
        if leaf.kind is LeafKind.NUMPY:
            sharding = None
        else:
            try:
                sharding = sharding or default_sharding()
                placed = tuple(_placed(sharding, leaf))
            except (ValueError, StateRefused) as error:
                bad.append((leaf.name, " ".join(str(error).split())))
                continue
            boxes = (box for _, box in placed)
        everybody: dict[int, tuple[Box, ...]] = {}
        if is_shared:
            # Leaves of one shape and sharding are many, and so are the devices of a mesh.
            key = (sharding, leaf.shape)
            if key not in known:
                known[key] = _needs_of_all(sharding, leaf.shape)
            everybody = known[key]
        wanted.append(
            Wanted(
                index=index,
                saved=saved,
                leaf=leaf,
                sharding=sharding,
                devices=placed,
                boxes=tuple(sorted(set(boxes))),
                everybody=everybody,
            )
        )
    if bad:
        raise StateRefused(
            ", ".join(name for name, _ in bad),
            "; ".join(words for _, words in bad),
            "shardings under which these leaves can lie on the devices",
        )
    return wanted


def _needs_of_all(
    sharding: jax.sharding.Sharding | None, shape: tuple[int, ...]
) -> dict[int, tuple[Box, ...]]:
    """What each process needs of an array; nothing known of one that is a process's own."""
    if sharding is None:
        # A host array, which every process has.
        return dict.fromkeys(range(jax.process_count()), (whole(shape),))
    boxes: dict[int, set[Box]] = {}
    indices: Any = sharding.devices_indices_map(shape)
    for device, index in indices.items():
        boxes.setdefault(device.process_index, set()).add(_box(index, shape))
    if len(boxes) < 2:
        return {}
    return {process: tuple(sorted(found)) for process, found in sorted(boxes.items())}


def _placed(sharding: jax.sharding.Sharding, leaf: Leaf) -> Iterator[tuple[Device, Box]]:
    if jax.dtypes.canonicalize_dtype(leaf.dtype) != numpy_dtype(leaf.dtype):
        raise StateRefused(leaf.name, leaf.dtype, "jax_enable_x64, without which jax narrows it")
    indices = sharding.addressable_devices_indices_map(leaf.shape)
    for device, index in indices.items():
        yield device, _box(index, leaf.shape)


def _box(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    if index is None:
        return whole(shape)
    ranges = [part.indices(length) for part, length in zip(index, shape, strict=True)]
    return Box(tuple(r[0] for r in ranges), tuple(max(r[0], r[1]) for r in ranges))


def default_sharding() -> jax.sharding.Sharding:
    """Of an array for which nobody said anything: the first device, if there is one process."""
    if jax.process_count() > 1:
        raise StateRefused(
            "shardings", None, "one for every array where there are several processes"
        )
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def groups_of(wanted: Sequence[Wanted], memory_bytes: int) -> Iterator[list[Wanted]]:
    """Leaves that are restored together, the same on all processes."""
    group: list[Wanted] = []
    group_bytes = 0
    for one in wanted:
        size = one.size_bytes if one.is_in_flight else 0
        if group and size and group_bytes + size > memory_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(one)
        group_bytes += size
    if group:
        yield group
