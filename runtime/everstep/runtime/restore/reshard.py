"""Decide which source each wanted region is read from. Pure.

Sources differ in cost and in what they hold; they are mixed freely, region by region. The
properties that tests hold on random layouts: every wanted element is read exactly once, from a
cheapest source that has it; after a failure, exactly what is missing is planned again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from everstep.runtime.errors import CheckpointInvalid
from everstep.runtime.layout.boxes import Box, subtract
from everstep.runtime.layout.dtypes import itemsize
from everstep.runtime.layout.manifest import Region, Shard
from everstep.runtime.layout.tree import TreeSpec

LOAD_GRAIN_BYTES = 4 << 20
"""Equal sources share the work in grains of this size: a small state comes from one of them."""


class SourceKind(IntEnum):
    """In the order of cost."""

    OWN = 0
    PEER_SLICE = 1
    """Another host of the own slice."""
    PEER = 2
    """A host of another slice."""
    LOCAL = 3
    """The own host's disk."""
    PEER_LOCAL = 4
    """The disk of another host, through its agent."""
    STORAGE = 5
    PASSED = 6
    """What another process read from storage and handed on: no source of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceHolding:
    index: int
    kind: SourceKind
    shards: tuple[Shard, ...] | None
    """What it holds; None is everything (storage)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of one wanted region. `target` is the index of that region."""

    target: int
    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    source: int
    shard: int | None
    """Index into the source's shards; None for a source that holds everything."""
    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Wanted regions overlap: this part of `target` is read into `origin` and copied from it."""

    origin: int
    piece: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """What must not be read again: a source, one leaf of it, or one shard of it."""

    source: int
    leaf: int | None = None
    shard: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """Invariants: (1) no element of a leaf is in two reads; (2) reads and copies together cover
    every wanted region; (3) a read lies in one shard of its source.
    """

    reads: tuple[Read, ...]
    copies: tuple[Copy, ...] = ()


def plan_reads(
    wanted: Sequence[Region], sources: Sequence[SourceHolding], tree: TreeSpec, *, turn: int = 0
) -> ReadPlan:
    """Plan the reads that fill all wanted regions.

    Args:
        wanted: regions of `tree`; they may overlap.
        sources: in any order.
        tree: that was saved.
        turn: shifts the choice among equal sources, so that hosts do not all ask the same one.

    Raises:
        CheckpointInvalid: no source holds a part of a wanted region; names leaf and region.
    """
    pieces, copies = split_overlaps(wanted)
    return ReadPlan(reads=replan(pieces, sources, tree, turn=turn), copies=tuple(copies))


def split_overlaps(wanted: Sequence[Region]) -> tuple[list[Piece], list[Copy]]:
    """The disjoint pieces of regions that may overlap, and what is copied between the regions."""
    pieces: list[Piece] = []
    copies: list[Copy] = []
    by_leaf: defaultdict[int, list[Piece]] = defaultdict(list)
    for target, region in enumerate(wanted):
        left = [] if region.box.is_empty else [region.box]
        for earlier in by_leaf[region.leaf]:
            kept: list[Box] = []
            for box in left:
                common = box.intersect(earlier.region.box)
                if common is not None:
                    piece = Piece(target=target, region=Region(region.leaf, common))
                    copies.append(Copy(origin=earlier.target, piece=piece))
                kept += subtract(box, earlier.region.box)
            left = kept
            if not left:
                break
        own = [Piece(target=target, region=Region(region.leaf, box)) for box in left]
        by_leaf[region.leaf] += own
        pieces += own
    return pieces, copies


def replan(
    missing: Sequence[Piece],
    sources: Sequence[SourceHolding],
    tree: TreeSpec,
    *,
    bad: Collection[Bad] = (),
    turn: int = 0,
) -> tuple[Read, ...]:
    """Plan reads for pieces that are disjoint, around everything that is bad.

    Returns:
        Reads in the order of source, shard and place, so that a source is read front to back.

    Raises:
        CheckpointInvalid: no source is left for a part; names leaf and region.
    """
    choice = _Choice(sources, tree, bad, turn)
    reads = [read for piece in missing for read in choice.cover(piece)]
    return tuple(
        sorted(
            reads, key=lambda r: (r.source, r.piece.region.leaf, r.shard or 0, r.piece.region.box)
        )
    )


class _Choice:
    """The sources by leaf, and how much was planned from each so far."""

    def __init__(
        self,
        sources: Sequence[SourceHolding],
        tree: TreeSpec,
        bad: Collection[Bad],
        turn: int,
    ) -> None:
        self._tree, self._bad, self._turn = tree, frozenset(bad), turn
        self._sources = [s for s in sources if Bad(source=s.index) not in self._bad]
        self._load = dict.fromkeys((source.index for source in sources), 0)
        self._shards: dict[int, defaultdict[int, list[tuple[int, Shard]]]] = {}
        for source in self._sources:
            by_leaf: defaultdict[int, list[tuple[int, Shard]]] = defaultdict(list)
            for position, shard in enumerate(source.shards or ()):
                if Bad(source=source.index, shard=position) not in self._bad:
                    by_leaf[shard.leaf].append((position, shard))
            self._shards[source.index] = by_leaf

    def cover(self, piece: Piece) -> list[Read]:
        leaf = piece.region.leaf
        left, reads = [piece.region.box], list[Read]()
        for source in sorted(self._sources, key=self._cost):
            if Bad(source=source.index, leaf=leaf) in self._bad:
                continue
            for position, box in self._boxes(source, leaf, piece.region.box):
                kept: list[Box] = []
                for part in left:
                    common = part.intersect(box)
                    if common is None:
                        kept.append(part)
                        continue
                    reads.append(self._read(source, position, piece.target, Region(leaf, common)))
                    kept += subtract(part, box)
                left = kept
                if not left:
                    return reads
        start, stop = list(left[0].start), list(left[0].stop)
        raise CheckpointInvalid(
            "the step to restore",
            self._tree.leaves[leaf].name,
            f"a source of region {start} to {stop}",
            "none that is left",
        )

    def _cost(self, source: SourceHolding) -> tuple[int, int, int]:
        turned = (source.index + self._turn) % max(len(self._load), 1)
        return (source.kind, self._load[source.index] // LOAD_GRAIN_BYTES, turned)

    def _boxes(
        self, source: SourceHolding, leaf: int, whole_box: Box
    ) -> list[tuple[int | None, Box]]:
        if source.shards is None:
            return [(None, whole_box)]
        return [(position, shard.box) for position, shard in self._shards[source.index][leaf]]

    def _read(
        self, source: SourceHolding, position: int | None, target: int, region: Region
    ) -> Read:
        size = region.box.size * itemsize(self._tree.leaves[region.leaf].dtype)
        self._load[source.index] += size
        return Read(source=source.index, shard=position, piece=Piece(target=target, region=region))
