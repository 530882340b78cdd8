"""One region of one leaf out of memory in which shards lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.layout.boxes import uncovered
from everstep.runtime.layout.dtypes import itemsize, numpy_dtype
from everstep.runtime.layout.manifest import Plot, Region, Shard
from everstep.runtime.layout.tree import TreeSpec

OFFSET_MULTIPLE = 64
"""Shards start at multiples of a cache line, which is also what jax wants of a buffer."""


def plot_of(tree: TreeSpec, regions: Sequence[Region]) -> Plot:
    """Lay regions one after the other into memory. Empty ones take no place and are left out."""
    shards: list[Shard] = []
    offset = 0
    for region in regions:
        if region.box.is_empty:
            continue
        size = region.box.size * itemsize(tree.leaves[region.leaf].dtype)
        shards.append(Shard(region.leaf, region.box, offset, size))
        offset += -(-size // OFFSET_MULTIPLE) * OFFSET_MULTIPLE
    return Plot(tree=tree, shards=tuple(shards), size_bytes=max(offset, OFFSET_MULTIPLE))


def shard_array(memory: NDArray[np.uint8], tree: TreeSpec, shard: Shard) -> NDArray[Any]:
    """A shard as an array of its own dtype and shape, without a copy."""
    raw = memory[shard.offset : shard.offset + shard.size_bytes]
    return raw.view(numpy_dtype(tree.leaves[shard.leaf].dtype)).reshape(shard.box.shape)


def region_array(
    memory: NDArray[np.uint8], tree: TreeSpec, shards: Sequence[Shard], region: Region
) -> NDArray[Any]:
    """One region, C-contiguous: a view when it lies so in one shard, else a copy.

    Args:
        memory: in which the shards lie.
        tree: whose leaves the shards are of.
        shards: those of the region's leaf.
        region: what is wanted.

    Raises:
        KeyError: the shards do not hold all of it.
    """
    inside = [shard for shard in shards if shard.box.intersect(region.box) is not None]
    if len(inside) == 1 and inside[0].box.contains(region.box):
        shard = inside[0]
        part = shard_array(memory, tree, shard)[region.box.relative_to(shard.box).slices()]
        return np.ascontiguousarray(part).reshape(region.box.shape)
    if uncovered(region.box, [shard.box for shard in inside]):
        raise KeyError(f"{tree.leaves[region.leaf].name} {region.box}")
    out = np.empty(region.box.shape, numpy_dtype(tree.leaves[region.leaf].dtype))
    for shard in inside:
        common = shard.box.intersect(region.box)
        if common is not None:
            source = shard_array(memory, tree, shard)
            target = common.relative_to(region.box).slices()
            out[target] = source[common.relative_to(shard.box).slices()]
    return out
