"""What a set of holdings covers of a state, and what it leaves open. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from everstep.runtime.layout.boxes import Box, uncovered, whole
from everstep.runtime.layout.manifest import Holding, Region
from everstep.runtime.layout.tree import TreeSpec


def boxes_by_leaf(holdings: Iterable[Holding]) -> dict[int, tuple[Box, ...]]:
    """Distinct boxes of every leaf, largest first, so that what covers most is tried first."""
    found: defaultdict[int, set[Box]] = defaultdict(set)
    for holding in holdings:
        for shard in holding.shards:
            found[shard.leaf].add(shard.box)
    return {
        leaf: tuple(sorted(boxes, key=lambda box: (-box.size, box)))
        for leaf, boxes in found.items()
    }


def find_gaps(tree: TreeSpec, holdings: Sequence[Holding]) -> tuple[Region, ...]:
    """Regions of `tree` that no holding has; empty exactly when the state can be restored."""
    held = boxes_by_leaf(holdings)
    return tuple(
        Region(index, gap)
        for index, leaf in enumerate(tree.leaves)
        if leaf.is_stored_as_bytes
        for gap in uncovered(whole(leaf.shape), held.get(index, ()))
    )


def name_region(tree: TreeSpec, region: Region) -> str:
    """For people: which elements of which leaf."""
    box = region.box
    ranges = ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
    return f"{tree.leaves[region.leaf].name}[{ranges}]"
