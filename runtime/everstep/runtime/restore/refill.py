"""Fill wanted regions from whatever sources are left, until all is there or nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from everstep.runtime.errors import StorageUnavailable
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.restore.division import Held, split_held
from everstep.runtime.restore.fetch import Fetch
from everstep.runtime.restore.outcome import Target
from everstep.runtime.restore.passing import Passing
from everstep.runtime.restore.reshard import (
    Bad,
    Copy,
    Piece,
    Read,
    SourceHolding,
    SourceKind,
    plan_reads,
    replan,
    split_overlaps,
)
from everstep.runtime.restore.sources import MemorySource, RegionSource

Begin = Callable[[Sequence[Piece], Sequence[Target], TreeSpec], Passing]
"""`Exchange.stage`, for one stage."""


@dataclass(slots=True)
class Tally:
    """What a restore moved and what it had to give up, over all its parts."""

    bytes_by_kind: dict[SourceKind, int] = field(
        default_factory=lambda: dict.fromkeys(SourceKind, 0)
    )
    rejected: list[str] = field(default_factory=list[str])
    bad: set[Bad] = field(default_factory=set[Bad])
    unavailable: StorageUnavailable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """All sources of one step, by the index that plans call them by."""

    memories: Mapping[int, MemorySource]
    storages: Mapping[int, RegionSource]
    holdings: Sequence[SourceHolding]


def fill(
    targets: Sequence[Target],
    sources: Sources,
    tree: TreeSpec,
    tally: Tally,
    *,
    memory_bytes: int,
    turn: int = 0,
    passing: Begin | None = None,
    held: Held | None = None,
) -> None:
    """Fill every target with verified bytes.

    What a source fails to give is read from the next one; the tally says so in words, and what
    was bad stays out of later calls with the same tally.

    Args:
        targets: what is filled; their arrays may be of other dtypes than was saved, and what
            goes there is cast then.
        sources: of the step.
        tree: that was saved.
        tally: of the restore.
        memory_bytes: bound of what is in flight.
        turn: see `plan_reads`.
        passing: begins this process's part in an exchange of what is read from storage. There
            is no other source then but this host's disk.
        held: what of that disk the other processes were told of, in an exchange.

    Raises:
        CheckpointInvalid: nothing is left for some region; names it and what was tried.
        Fenced: a peer is in a newer incarnation.

    **Blocking**: until all is filled; every wait on a peer has a deadline.
    """
    wanted = [target.region for target in targets]
    usable = [s for s in sources.holdings if Bad(source=s.index) not in tally.bad]
    plan = plan_reads(wanted, usable, tree, turn=turn)
    reads = plan.reads
    if tally.bad:
        pieces = [read.piece for read in reads]
        reads = replan(pieces, sources.holdings, tree, bad=tally.bad, turn=turn)
    fetch = Fetch(tree, targets, sources.memories, sources.storages, memory_bytes=memory_bytes)

    def read(reads: Sequence[Read]) -> None:
        while reads:
            outcome = fetch.execute(reads)
            for kind, moved in outcome.bytes_by_kind.items():
                tally.bytes_by_kind[kind] += moved
            tally.rejected += [words for words in outcome.rejected if words not in tally.rejected]
            tally.bad |= outcome.bad
            tally.unavailable = tally.unavailable or outcome.unavailable
            reads = replan(outcome.missing, sources.holdings, tree, bad=tally.bad, turn=turn)

    if passing is None:
        read(reads)
    else:
        (storage,) = sources.storages.values()
        had, lacking = _split(split_overlaps(wanted)[0], held or {})
        # In the order of the targets, in which the others know them.
        begun = passing(lacking, targets, tree)
        # The others wait for what this process gives, so that goes first.
        failed = begun.give(storage, memory_bytes)
        read(replan([*had, *begun.alone(), *failed], sources.holdings, tree, bad=tally.bad))
        missing, why = begun.take()
        tally.rejected += why
        tally.bytes_by_kind[SourceKind.STORAGE] += begun.read_bytes
        tally.bytes_by_kind[SourceKind.PASSED] += begun.passed_bytes
        read(replan(missing, sources.holdings, tree, bad=tally.bad))
    for copy in plan.copies:
        _copy(copy, targets)


def _split(pieces: Sequence[Piece], held: Held) -> tuple[list[Piece], list[Piece]]:
    """What this host's disk has of disjoint pieces, and what it lacks: in the order of places."""
    had, lacking = list[Piece](), list[Piece]()
    for piece in pieces:
        leaf = piece.region.leaf
        for boxes, parts in zip(
            split_held([piece.region.box], held.get(leaf, ())), (had, lacking), strict=True
        ):
            parts += [Piece(target=piece.target, region=Region(leaf, box)) for box in boxes]
    lacking.sort(key=lambda part: (part.region.leaf, part.region.box))
    return had, lacking


def _copy(copy: Copy, targets: Sequence[Target]) -> None:
    origin, target = targets[copy.origin], targets[copy.piece.target]
    target.part(copy.piece.region)[...] = origin.part(copy.piece.region)
