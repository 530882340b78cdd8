"""Which regions of which leaves one holder has, and where in its memory they lie."""

from __future__ import annotations

import msgspec

from everstep.controller.api.ids import HostId, Incarnation, Step
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.tree import TreeSpec

BLOCK_BYTES = 1 << 20
"""A shard's CRC-32C values are one per block of this many bytes, counted from the shard's start,
so that a range of a shard can be verified without reading the whole shard."""


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """One region of one leaf in a slot: C order, native little-endian, no gaps.

    int4 and uint4 take one byte an element, as numpy holds them.
    """

    leaf: int
    """Index into `TreeSpec.leaves`."""
    box: Box
    offset: int
    """Bytes from the start of the slot; a multiple of 64."""
    size_bytes: int


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A box of one leaf, wherever it lies."""

    leaf: int
    box: Box


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """How a slot is divided: what a worker announces once per incarnation, before its first copy.

    Each distinct region that the host's devices hold is there once, replicas within the host
    are not repeated.
    """

    tree: TreeSpec
    shards: tuple[Shard, ...]
    size_bytes: int


class SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Makes a slot valid. Written last, by the agent, after it computed the checksums."""

    step: Step
    incarnation: Incarnation
    host: HostId
    plot: Plot
    crcs: tuple[tuple[int, ...], ...]
    """`crcs[i]` are the CRC-32C values of the blocks of `plot.shards[i]`."""
    extra: dict[str, str] = {}
    """Small things that travel with the step: data position, inline leaf values."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What a host offers of one step at a join: regions, without checksums.

    A host that received regions of other hosts (evacuation, replicas) offers them beside its own,
    as one more holding of the same step.
    """

    id: str
    """Names the memory within that host; part of the URL from which it is read."""
    step: Step
    incarnation: Incarnation
    host: HostId
    address: str
    port: int
    fingerprint: str
    shards: tuple[Shard, ...]
    is_local: bool = False
    """Whether it is on a disk of the host: then it may be of a past that storage has overtaken."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """All that one host can offer, sent to the lead when it joins."""

    holdings: tuple[Holding, ...]
    trees: dict[str, TreeSpec]
    """By fingerprint."""
