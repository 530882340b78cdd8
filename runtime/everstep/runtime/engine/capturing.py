"""Copies of states in host memory that is used again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.engine.shares import CapturedTree
from everstep.runtime.engine.state import flatten, reflatten
from everstep.runtime.errors import StateRefused, StorageUnavailable
from everstep.runtime.layout.boxes import whole
from everstep.runtime.layout.dtypes import itemsize
from everstep.runtime.layout.flat import FlatState
from everstep.runtime.layout.manifest import Plot
from everstep.runtime.layout.tree import Leaf
from everstep.runtime.snapshot.capture import CapturePlan, PlotOutdated
from everstep.runtime.snapshot.regions import shard_array

COPIES_MAX = 2
"""So many copies of a state at most: one being written, one just taken. The second is made only
when a save comes before the one before it is written."""

Planned = tuple[FlatState, CapturePlan]


@dataclass(slots=True)
class _Memory:
    """Of one part's copies, and how it was divided for the one before."""

    data: NDArray[np.uint8]
    plot: Plot | None = None
    targets: Sequence[NDArray[Any]] = ()

    def divided(self, plot: Plot) -> Sequence[NDArray[Any]]:
        """One array for each shard."""
        if self.plot is not plot:
            self.plot = plot
            self.targets = [shard_array(self.data, plot.tree, shard) for shard in plot.shards]
        return self.targets


class Capturer:
    """The plans and the memory of the captures of one `Checkpoints`."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._before: dict[str, FlatState] = {}
        self._plans: dict[str, CapturePlan] = {}
        self._layouts: dict[str, int] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._changed = threading.Condition()
        self._free: list[dict[str, _Memory]] = []
        self._in_use = 0

    def flatten(self, trees: Mapping[str, Any]) -> dict[str, Planned]:
        """Name every leaf and plan its copy; nothing is copied yet.

        Raises:
            StateRefused: names every leaf that cannot be stored.
        """
        return {name: self._planned(name, tree) for name, tree in trees.items()}

    def _planned(self, name: str, tree: Any) -> Planned:
        before, plan = self._before.get(name), self._plans.get(name)
        if before is not None and plan is not None:
            try:
                flat = reflatten(tree, before)
                plan.check_layout(flat)
            except (StateRefused, PlotOutdated):
                pass  # Another tree, or another layout: planned anew, and refused there if it must.
            else:
                return flat, plan
        flat = flatten(tree)
        plan = CapturePlan(flat)
        self._before[name], self._plans[name] = flat.without_values(), plan
        self._layouts[name] = self._layouts.get(name, -1) + 1
        return flat, plan

    def bytes_of(self, flats: Mapping[str, Planned]) -> int:
        """Bytes of the arrays, of all processes together."""
        for name in flats:
            layout = self._layouts[name]
            if self._sizes.get(name, (-1, 0))[0] != layout:
                leaves = flats[name][0].tree.leaves
                self._sizes[name] = layout, sum(stored_bytes(leaf) for leaf in leaves)
        return sum(self._sizes[name][1] for name in flats)

    def capture(
        self, flats: Mapping[str, Planned]
    ) -> tuple[dict[str, CapturedTree], Callable[[], None]]:
        """Copy planned trees; the copies, and what gives their memory back.

        Blocking: for the copy, and until a copy's memory is free.
        """
        sizes = {name: plan.plot.size_bytes for name, (_, plan) in flats.items()}
        memories = self._take(sizes)
        try:
            for name, (flat, plan) in flats.items():
                plan.capture(flat, memories[name].divided(plan.plot))
        except BaseException:
            self._give(memories)
            raise
        captured = {
            name: CapturedTree(
                tree=flat.tree,
                plot=plan.plot,
                memory=memories[name].data,
                layout=self._layouts[name],
            )
            for name, (flat, plan) in flats.items()
        }
        return captured, lambda: self._give(memories)

    def _take(self, sizes: Mapping[str, int]) -> dict[str, _Memory]:
        with self._changed:
            if not self._free and self._in_use >= COPIES_MAX:
                if not self._changed.wait_for(lambda: bool(self._free), self._deadline_s):
                    raise StorageUnavailable(
                        f"storage took more than {self._deadline_s:g} s for {COPIES_MAX} steps"
                    )
            found = self._free.pop() if self._free else {}
            self._in_use += 1
        # Parts may have cadences of their own: memory of those that are not due now stays. What is
        # of no use any more is given up before anything new is asked for.
        kept = {
            name: memory
            for name, memory in found.items()
            if sizes.get(name, memory.data.size) == memory.data.size
        }
        found.clear()
        for name, size in sizes.items():
            if name not in kept:
                kept[name] = _Memory(np.empty(size, np.uint8))
        return kept

    def _give(self, memories: dict[str, _Memory]) -> None:
        with self._changed:
            self._free.append(memories)
            self._in_use -= 1
            self._changed.notify()


def stored_bytes(leaf: Leaf) -> int:
    """Bytes of a leaf's array; 0 for one that has none."""
    return whole(leaf.shape).size * itemsize(leaf.dtype) if leaf.is_stored_as_bytes else 0
