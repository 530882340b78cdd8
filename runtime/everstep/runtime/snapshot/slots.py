"""The worker's mapping of the slots that the agent granted."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.errors import check
from everstep.runtime.layout.manifest import Plot
from everstep.runtime.snapshot.regions import shard_array


class SlotWriter:
    """All slots mapped into this process, with one array per shard ready to be copied into.

    The descriptors stay the caller's: they can be closed once this is made.
    """

    def __init__(self, fds: Sequence[int], size_bytes: int, plot: Plot) -> None:
        """Map the slots.

        Args:
            fds: one per slot, in slot order.
            size_bytes: of each slot; at least `plot.size_bytes`.
            plot: how a slot is divided.

        **Blocking**: fills the page tables now, about 0.1 s per GiB, so that no step pays page
        faults later. The pages themselves exist already.
        """
        check(size_bytes >= plot.size_bytes, f"slots of {size_bytes} for {plot.size_bytes} bytes")
        self.plot = plot
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._maps = [
            mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE) for fd in fds
        ]
        self._targets = [self._divide(mapped) for mapped in self._maps]

    @property
    def count(self) -> int:
        return len(self._maps)

    def targets(self, slot: int) -> tuple[NDArray[Any], ...]:
        """Arrays over a slot's memory, one per `plot.shards`, in that order."""
        return self._targets[slot]

    def write(self, slot: int, arrays: Sequence[NDArray[Any]]) -> None:
        """Copy one array per `plot.shards` into a slot. Returns when all bytes are copied."""
        for target, source in zip(self._targets[slot], arrays, strict=True):
            np.copyto(target, source, casting="no")

    def _divide(self, mapped: mmap.mmap) -> tuple[NDArray[Any], ...]:
        memory: NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)
        return tuple(shard_array(memory, self.plot.tree, shard) for shard in self.plot.shards)
