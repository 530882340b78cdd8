"""Make a state on devices out of a saved step. The only importer of jax in this room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from everstep.controller.api.ids import Step
from everstep.controller.api.wire import RestoreFigures
from everstep.runtime.errors import CheckpointInvalid, StateRefused, StorageUnavailable
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.compare import match_leaves
from everstep.runtime.layout.dtypes import numpy_dtype
from everstep.runtime.layout.flat import FlatState
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.scalars import inline_values
from everstep.runtime.layout.tree import Leaf, LeafKind, TreeSpec
from everstep.runtime.restore.opened import OpenedSources, RestoreOrder
from everstep.runtime.restore.outcome import Target
from everstep.runtime.restore.refill import Sources, Tally, fill
from everstep.runtime.restore.reshard import SourceKind

Device = Any
"""`jax.Device`, which is not a type to every checker."""

ALIGN_BYTES = 64
"""jax takes a numpy array on a CPU device as it is when it starts at a multiple of this."""


class RestoredState(NamedTuple):
    state: Any
    figures: RestoreFigures
    """Times are the caller's to fill in."""
    extra: dict[str, str]
    """What travelled with the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
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


def restore_state(
    like: FlatState,
    shardings: Sequence[jax.sharding.Sharding | None] | None,
    *,
    assignment: RestoreOrder,
    own_slots: Mapping[str, memoryview],
    memory_bytes: int,
) -> RestoredState:
    """Restore the assignment's step onto the shardings of `like`.

    Args:
        like: the wanted state, concrete or abstract.
        shardings: one per leaf that jax keeps (not None, not an empty container), in order; used
            where a leaf of `like` has no sharding of its own.
        assignment: names the step and its sources.
        own_slots: holdings of this host's own memory, by id. Read, never kept.
        memory_bytes: bound of what is in flight: read buffers, and host copies of arrays that are
            on their way to an accelerator.

    Returns:
        The state, with the saved values of Python scalars; the figures; the step's `extra`.

    Raises:
        StateRefused: the saved tree differs from the wanted one, or an array cannot lie as
            wanted; all such leaves are named. No array was read then.
        CheckpointInvalid: some region can be had from no source with the right checksum.
        StorageUnavailable: some region could only be had from storage, which did not answer.
        Fenced: another host is in a newer incarnation.

    **Blocking**: until the state is on the devices. Every wait on a peer has a deadline.
    """
    step = assignment.restore_step
    if step is None:
        raise CheckpointInvalid("restore", "the step", "a step", "none: start fresh")
    tally = Tally()
    opened = OpenedSources(assignment, own_slots, tally)
    saved, extra = opened.describe(like.tree)
    matches = match_leaves(saved, like.tree)
    wanted = _plan_wanted(like, shardings, matches)
    inline = inline_values(saved, extra)
    values: list[object] = [
        inline[matches[index]] if leaf.kind is LeafKind.SCALAR else None
        for index, leaf in enumerate(like.tree.leaves)
    ]
    try:
        for group in _groups(wanted, memory_bytes):
            _restore_group(group, values, like, opened.sources(), saved, memory_bytes, tally)
    except CheckpointInvalid as error:
        tried = "; ".join(tally.rejected) or "no source holds it"
        if tally.unavailable is not None:
            # Not a word against the step: nobody may take an older one for this.
            raise StorageUnavailable(f"step {step}: {error.leaf}: {tried}") from error
        raise CheckpointInvalid(
            f"step {step}", error.leaf, error.expected, f"{error.found} ({tried})"
        ) from error
    finally:
        opened.close()
    state = like.unflatten(
        [_typed(v, leaf) for v, leaf in zip(values, like.tree.leaves, strict=True)]
    )
    return RestoredState(state, _figures(assignment, step, tally), dict(extra))


def _plan_wanted(
    like: FlatState,
    shardings: Sequence[jax.sharding.Sharding | None] | None,
    matches: Sequence[int],
) -> list[_Wanted]:
    """Where every leaf with bytes goes. Refuses all that cannot go there, together."""
    given = iter(shardings or ())
    bad: list[tuple[str, str]] = []
    wanted: list[_Wanted] = []
    placed: tuple[tuple[Device, Box], ...]
    for index, (leaf, value) in enumerate(zip(like.tree.leaves, like.values, strict=True)):
        if leaf.kind in (LeafKind.NONE, LeafKind.EMPTY):
            continue
        given_here = next(given, None)
        sharding = getattr(value, "sharding", None) or given_here
        if not leaf.is_stored_as_bytes:
            continue
        if leaf.kind is LeafKind.NUMPY:
            sharding, placed = None, ()
            boxes = [whole(leaf.shape)]
        else:
            try:
                sharding = sharding or _default_sharding()
                placed = tuple(_placed(sharding, leaf))
            except (ValueError, StateRefused) as error:
                bad.append((leaf.name, " ".join(str(error).split())))
                continue
            boxes = list(dict.fromkeys(box for _, box in placed))
        wanted.append(
            _Wanted(
                index=index,
                saved=matches[index],
                leaf=leaf,
                sharding=sharding,
                devices=placed,
                boxes=tuple(boxes),
            )
        )
    if bad:
        raise StateRefused(
            ", ".join(name for name, _ in bad),
            "; ".join(words for _, words in bad),
            "shardings under which these leaves can lie on the devices",
        )
    return wanted


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


def _default_sharding() -> jax.sharding.Sharding:
    """Of an array for which nobody said anything: the first device, if there is one process."""
    if jax.process_count() > 1:
        raise StateRefused(
            "shardings", None, "one for every array where there are several processes"
        )
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _groups(wanted: Sequence[_Wanted], memory_bytes: int) -> Iterator[list[_Wanted]]:
    """Leaves that are restored together. On CPU the read memory is the device's: all at once."""
    group: list[_Wanted] = []
    group_bytes = 0
    for one in wanted:
        size = sum(box.size for box in one.boxes) * numpy_dtype(one.leaf.dtype).itemsize
        is_in_flight = any(device.platform != "cpu" for device, _ in one.devices)
        if group and is_in_flight and group_bytes + size > memory_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(one)
        group_bytes += size if is_in_flight else 0
    if group:
        yield group


def _restore_group(
    group: Sequence[_Wanted],
    values: list[object],
    like: FlatState,
    sources: Sources,
    saved: TreeSpec,
    memory_bytes: int,
    tally: Tally,
) -> None:
    arrays = {
        (one.index, box): empty_aligned(box.shape, numpy_dtype(one.leaf.dtype))
        for one in group
        for box in one.boxes
    }
    targets = [
        Target(region=Region(one.saved, box), array=arrays[one.index, box])
        for one in group
        for box in one.boxes
    ]
    fill(targets, sources, saved, tally, memory_bytes=memory_bytes)
    del targets
    on_devices = [(one, device, box) for one in group for device, box in one.devices]
    put: list[jax.Array] = jax.device_put(
        [arrays[one.index, box] for one, _, box in on_devices],
        [device for _, device, _ in on_devices],
    )
    by_leaf: dict[int, list[jax.Array]] = {}
    for (one, _, _), array in zip(on_devices, put, strict=True):
        by_leaf.setdefault(one.index, []).append(array)
    for one in group:
        if one.sharding is None:
            host = arrays[one.index, one.boxes[0]]
            is_scalar = isinstance(like.values[one.index], np.generic)
            values[one.index] = host[()] if is_scalar else host
        else:
            values[one.index] = jax.make_array_from_single_device_arrays(
                one.leaf.shape, one.sharding, by_leaf.get(one.index, [])
            )
    # Host copies on their way to an accelerator are given up before the next group makes its own.
    jax.block_until_ready(put)


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[Any]:
    """Memory that is not filled with anything, and that a CPU device can take without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + ALIGN_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)


def _typed(value: object, leaf: Leaf) -> object:
    if leaf.kind is not LeafKind.PRNG_KEY:
        return value
    data: Any = value
    return jax.random.wrap_key_data(data, impl=leaf.impl)


def _figures(order: RestoreOrder, step: Step, tally: Tally) -> RestoreFigures:
    moved = tally.bytes_by_kind
    peers = moved[SourceKind.PEER] + moved[SourceKind.PEER_SLICE]
    stored = moved[SourceKind.STORAGE]
    memory = moved[SourceKind.OWN] + peers
    if stored and memory:
        source = "mixed"
    else:
        source = "storage" if stored or not order.holdings else "memory"
    return RestoreFigures(
        incarnation=order.incarnation,
        step=step,
        source=source,
        own_bytes=moved[SourceKind.OWN],
        peer_bytes=peers,
        storage_bytes=stored,
        rejected=tuple(tally.rejected),
    )
