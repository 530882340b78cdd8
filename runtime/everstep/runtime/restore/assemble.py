"""Make a state on devices out of a saved step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from everstep.controller.api.ids import Step
from everstep.controller.api.wire import RestoreFigures
from everstep.runtime.errors import CheckpointInvalid, StateRefused, StorageUnavailable
from everstep.runtime.layout.compare import Match, describe
from everstep.runtime.layout.dtypes import numpy_dtype
from everstep.runtime.layout.flat import FlatState
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.scalars import Scalar, inline_values
from everstep.runtime.layout.tree import Leaf, LeafKind
from everstep.runtime.restore.agreeing import Wants, begin_exchange
from everstep.runtime.restore.division import Held
from everstep.runtime.restore.exchange import Exchange
from everstep.runtime.restore.opened import (
    OpenedSources,
    RestoreOrder,
    StoredReader,
    held_of,
)
from everstep.runtime.restore.options import EVERYTHING, RestoreOptions, needs_value
from everstep.runtime.restore.outcome import Target
from everstep.runtime.restore.refill import Tally, fill
from everstep.runtime.restore.reshard import SourceKind
from everstep.runtime.restore.sources import LocalDisk
from everstep.runtime.restore.wanted import (
    Wanted,
    default_sharding,
    groups_of,
    plan_wanted,
    shardings_of,
)

ALIGN_BYTES = 64
"""jax takes a numpy array on a CPU device as it is when it starts at a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What hosts' own disks hold of the content of a stored step."""

    disks: Sequence[LocalDisk] = ()
    """Those in this process's reach."""
    held: Mapping[int, Held] = field(default_factory=dict[int, Held])
    """Of an exchange, by process: what it was told that each has. This one's is `held_of`."""


NOTHING_LOCAL = Local()


class RestoredState(NamedTuple):
    state: Any
    figures: RestoreFigures
    """Times are the caller's to fill in."""
    extra: dict[str, str]
    """What travelled with the step."""


def restore_state(
    like: FlatState,
    shardings: Sequence[jax.sharding.Sharding | None] | None,
    *,
    assignment: RestoreOrder,
    own_slots: Mapping[str, memoryview],
    memory_bytes: int,
    options: RestoreOptions = EVERYTHING,
    exchange: Exchange | None = None,
    local: Local = NOTHING_LOCAL,
    stored: Callable[[], StoredReader] | None = None,
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
        options: what may differ between what was saved and what is wanted.
        exchange: with the other processes that restore the same; fresh. It is used when all is
            read from storage, and `close` is its owner's.
        local: what disks of hosts hold of the stored step.
        stored: opens the stored step, where the caller has looked at it already. Only for a
            restore from storage alone.

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
    opened = OpenedSources(assignment, own_slots, tally, local.disks, stored)
    saved, extra = opened.describe(like.tree)
    matches = options.match(saved, like.tree)
    wanted = plan_wanted(like, shardings, matches, is_shared=exchange is not None)
    values = _values_beside(like, shardings, matches, inline_values(saved, extra), options)
    groups = list(groups_of(wanted, memory_bytes))
    try:
        sources = opened.sources()
        if exchange is not None and not assignment.holdings and sources.storages:
            (storage,) = sources.storages.values()
            stages = [[Wants(one.saved, one.everybody) for one in group] for group in groups]
            is_exchanged = begin_exchange(exchange, stages, storage, saved, str(step), local.held)
        else:
            is_exchanged = False
        own_held = held_of(local.disks)
        for number, group in enumerate(groups):
            passing = partial(exchange.stage, number) if exchange and is_exchanged else None
            fill_group = partial(
                fill,
                sources=sources,
                tree=saved,
                tally=tally,
                memory_bytes=memory_bytes,
                passing=passing,
                held=own_held,
            )
            _restore_group(group, values, like, fill_group)
        if exchange is not None:
            exchange.finish()
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


def _values_beside(
    like: FlatState,
    shardings: Sequence[jax.sharding.Sharding | None] | None,
    matches: Sequence[Match],
    inline: Mapping[int, Scalar],
    options: RestoreOptions,
) -> list[object]:
    """All values that are not read as bytes: saved inline, kept as they are in `like`, or made."""
    values: list[object] = []
    bad: list[tuple[str, str, str]] = []
    places = shardings_of(like, shardings)
    for leaf, match, kept, place in zip(
        like.tree.leaves, matches, like.values, places, strict=True
    ):
        value: object = None
        if match.saved is not None:
            value = inline[match.saved] if leaf.kind is LeafKind.SCALAR else None
        elif not match.is_missing:
            value = kept
        elif needs_value(leaf) and options.missing is not None:
            try:
                value = _made(leaf, options.missing(leaf), place)
            except StateRefused as error:
                bad.append((error.field, str(error.found), error.expected))
        values.append(value)
    if bad:
        raise StateRefused(
            *(("; " if at else ", ").join(words) for at, words in enumerate(zip(*bad, strict=True)))
        )
    return values


def _made(leaf: Leaf, value: Any, sharding: jax.sharding.Sharding | None) -> object:
    """What an initialiser made, as it is kept; refused when it is something else than wanted."""
    if leaf.kind is LeafKind.SCALAR:
        if type(value).__name__ != leaf.dtype:
            raise StateRefused(leaf.name, f"a {type(value).__name__}", describe(leaf))
        return value
    if leaf.kind is LeafKind.PRNG_KEY:
        is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        if not is_key or str(jax.random.key_impl(value)) != leaf.impl:
            raise StateRefused(leaf.name, f"a {type(value).__name__}", describe(leaf))
        value = jax.random.key_data(value)
    dtype = getattr(value, "dtype", None)
    shape = getattr(value, "shape", None)
    if dtype is None or shape != leaf.shape or dtype.name != leaf.dtype:
        raise StateRefused(
            leaf.name, f"made {dtype or type(value).__name__}{list(shape or ())}", describe(leaf)
        )
    if leaf.kind is LeafKind.NUMPY:
        return np.array(value)
    sharding = sharding or default_sharding()
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    host = np.asarray(value)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: host[index])


def _restore_group(
    group: Sequence[Wanted],
    values: list[object],
    like: FlatState,
    fill_group: Callable[[Sequence[Target]], None],
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
    fill_group(targets)
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
    stored, passed = moved[SourceKind.STORAGE], moved[SourceKind.PASSED]
    memory = moved[SourceKind.OWN] + peers
    local = moved[SourceKind.LOCAL] + moved[SourceKind.PEER_LOCAL]
    if sum(map(bool, (stored + passed, memory, local))) > 1:
        source = "mixed"
    elif local:
        source = "local"
    else:
        source = "storage" if stored + passed or not order.holdings else "memory"
    return RestoreFigures(
        incarnation=order.incarnation,
        step=step,
        source=source,
        own_bytes=moved[SourceKind.OWN],
        peer_bytes=peers + passed,
        local_bytes=local,
        storage_bytes=stored,
        rejected=tuple(tally.rejected),
    )
