"""Copy a state's shards from the devices into a slot: the only work that blocks a step.

The copy is real on every backend. On CPU a jax array and its numpy view share memory, and a
donated buffer is written to by the next step, so the bytes are copied before `capture` returns
and no view of them outlives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from everstep.runtime.errors import EverstepError, StateRefused
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.flat import FlatState
from everstep.runtime.layout.manifest import Plot, Region
from everstep.runtime.snapshot.regions import plot_of, shard_array


class PlotOutdated(EverstepError):
    """The state lies otherwise on the devices than the plot says: plan and announce a new one."""

    def __init__(self, leaf: str) -> None:
        self.leaf = leaf
        super().__init__(f"{leaf} is sharded otherwise than when the slots were divided")


class CapturePlan:
    """Which shard of which device goes where in a slot. Made once per layout of the state."""

    def __init__(self, flat: FlatState) -> None:
        self._shardings: list[jax.sharding.Sharding | None] = []
        self._picks: list[tuple[int, int | None]] = []
        self._transfers: list[tuple[int, int]] = []
        regions: list[Region] = []
        for index, (leaf, value) in enumerate(zip(flat.tree.leaves, flat.values, strict=True)):
            self._shardings.append(value.sharding if isinstance(value, jax.Array) else None)
            if not leaf.is_stored_as_bytes:
                continue
            if not isinstance(value, jax.Array):
                if not isinstance(value, np.ndarray | np.generic):
                    raise StateRefused(leaf.name, repr(value), "an array with values")
                if value.size:
                    self._picks.append((index, None))
                    regions.append(Region(index, whole(leaf.shape)))
                continue
            for position, box in _distinct(value):
                self._picks.append((index, position))
                regions.append(Region(index, box))
                if value.addressable_shards[position].device.platform != "cpu":
                    self._transfers.append((index, position))
        self.plot: Plot = plot_of(flat.tree, regions)

    def check_layout(self, flat: FlatState) -> None:
        """Raise `PlotOutdated` unless every array lies where it lay when this was planned."""
        for index, (value, planned) in enumerate(zip(flat.values, self._shardings, strict=True)):
            if isinstance(value, jax.Array):
                found = value.sharding
                # Identity first: comparing two equal shardings of many devices takes longer.
                if found is not planned and found != planned:
                    raise PlotOutdated(flat.tree.leaves[index].name)

    def capture(self, flat: FlatState, targets: Sequence[NDArray[Any]]) -> None:
        """Copy every distinct shard of this host.

        Args:
            flat: of the same tree and layout as planned.
            targets: one array per `plot.shards`, as `SlotWriter.targets` gives them.

        Raises:
            PlotOutdated: an array is sharded otherwise than planned.
            StateRefused: an array was donated or deleted before it could be copied.

        **Blocking**: waits for the arrays to be computed, then for one copy of this host's
        distinct bytes. All transfers from devices start before the first is waited for. When it
        returns, the state may be donated, overwritten or deleted.
        """
        self.check_layout(flat)
        values: tuple[Any, ...] = flat.values
        try:
            for index, place in self._transfers:
                values[index].addressable_data(place).copy_to_host_async()
            for (index, position), target in zip(self._picks, targets, strict=True):
                source: Any = values[index]
                if position is not None:
                    source = np.asarray(source.addressable_data(position))
                np.copyto(target, source, casting="no")
        except RuntimeError as error:
            for leaf, value in zip(flat.tree.leaves, flat.values, strict=True):
                if isinstance(value, jax.Array) and value.is_deleted():
                    raise StateRefused(
                        leaf.name, "a deleted array (it was donated)", "an array with values"
                    ) from error
            raise


def plan_plot(flat: FlatState) -> Plot:
    """How a slot is divided for this host's part of a state. See `CapturePlan`."""
    return CapturePlan(flat).plot


def capture(flat: FlatState, plot: Plot, buffer: memoryview | bytearray) -> None:
    """Copy a state into memory divided by `plot`; for one copy only, else keep a `CapturePlan`.

    Raises:
        PlotOutdated: the state's distinct shards are not those of the plot.

    **Blocking**: as `CapturePlan.capture`.
    """
    plan = CapturePlan(flat)
    if plan.plot.shards != plot.shards:
        raise PlotOutdated("the state")
    memory: NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)
    plan.capture(flat, [shard_array(memory, plot.tree, shard) for shard in plot.shards])


def box_of(index: tuple[Any, ...], shape: tuple[int, ...]) -> Box:
    """The box of a shard's index, as jax gives it: a tuple of slices that may be open."""
    ranges = [part.indices(length) for part, length in zip(index, shape, strict=True)]
    return Box(tuple(r[0] for r in ranges), tuple(max(r[0], r[1]) for r in ranges))


def _distinct(array: jax.Array) -> list[tuple[int, Box]]:
    """Position and box of every distinct, not empty shard on this host's devices."""
    seen: dict[Box, int] = {}
    for position, shard in enumerate(array.addressable_shards):
        box = box_of(shard.index, array.shape)
        if not box.is_empty:
            seen.setdefault(box, position)
    return [(position, box) for box, position in seen.items()]
