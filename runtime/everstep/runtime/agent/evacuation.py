"""What must move before some slices vanish, and to whom. Pure.

Only regions that nobody else holds move; what a survivor has already need not. The same plan makes
replicas: then the slice to be covered is a partner that is not doomed at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from everstep.controller.api.ids import HostId, SliceId
from everstep.runtime.agent.coverage import boxes_by_leaf, find_gaps
from everstep.runtime.agent.wire import TakePart
from everstep.runtime.layout.boxes import Box, uncovered
from everstep.runtime.layout.manifest import Holding, Region
from everstep.runtime.layout.tree import TreeSpec

PIECE_BYTES_MIN = 1 << 20
"""Smaller pieces are not cut for balance: a request costs more than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evacuation:
    """Who copies what. (1) No element is copied twice; (2) nothing a survivor holds is copied."""

    takes: dict[HostId, tuple[TakePart, ...]]
    size_bytes: int
    lost: tuple[Region, ...]
    """Held by nobody at all: the step cannot be made whole by copying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    source: Holding
    region: Region
    size_bytes: int


def plan_evacuation(
    tree: TreeSpec,
    holdings: Sequence[Holding],
    *,
    doomed: Collection[SliceId],
    takers: Sequence[HostId],
) -> Evacuation:
    """Plan the copies that leave every region of the state outside `doomed`.

    Args:
        tree: of the step.
        holdings: all of one step, one incarnation and one fingerprint, on any host.
        doomed: slices whose memory will vanish.
        takers: hosts that may receive, none of them doomed.
    """
    lost = find_gaps(tree, holdings)
    pieces = _unique_pieces(holdings, doomed)
    total = sum(piece.size_bytes for piece in pieces)
    if not takers:
        return Evacuation(takes={}, size_bytes=0, lost=lost)
    share = max(PIECE_BYTES_MIN, -(-total // len(takers)))
    cut = [part for piece in pieces for part in _cut(piece, share)]
    return Evacuation(takes=_deal(cut, takers), size_bytes=total, lost=lost)


def _unique_pieces(holdings: Sequence[Holding], doomed: Collection[SliceId]) -> list[_Piece]:
    safe = boxes_by_leaf(h for h in holdings if h.host.slice not in doomed)
    covered: defaultdict[int, list[Box]] = defaultdict(list)
    for leaf, boxes in safe.items():
        covered[leaf].extend(boxes)
    pieces: list[_Piece] = []
    for holding in sorted(holdings, key=lambda h: (h.host, h.id)):
        if holding.host.slice not in doomed:
            continue
        for shard in holding.shards:
            if shard.box.is_empty:
                continue
            element_bytes = shard.size_bytes // shard.box.size
            for box in uncovered(shard.box, covered[shard.leaf]):
                region = Region(shard.leaf, box)
                pieces.append(
                    _Piece(source=holding, region=region, size_bytes=box.size * element_bytes)
                )
                covered[shard.leaf].append(box)
    return pieces


def _cut(piece: _Piece, share_bytes: int) -> list[_Piece]:
    """Cut a piece along its longest leading axis into parts of about `share_bytes`."""
    box = piece.region.box
    count = -(-piece.size_bytes // share_bytes)
    axis = next((i for i, length in enumerate(box.shape) if length > 1), None)
    if count < 2 or axis is None:
        return [piece]
    length = box.shape[axis]
    count = min(count, length)
    cuts = [box.start[axis] + length * i // count for i in range(count + 1)]
    parts: list[_Piece] = []
    for start, stop in pairwise(cuts):
        part = Box(
            (*box.start[:axis], start, *box.start[axis + 1 :]),
            (*box.stop[:axis], stop, *box.stop[axis + 1 :]),
        )
        size = piece.size_bytes // box.size * part.size
        region = Region(piece.region.leaf, part)
        parts.append(_Piece(source=piece.source, region=region, size_bytes=size))
    return parts


def _deal(pieces: Sequence[_Piece], takers: Sequence[HostId]) -> dict[HostId, tuple[TakePart, ...]]:
    """Largest first, each to whoever has least."""
    load = dict.fromkeys(sorted(takers), 0)
    dealt: defaultdict[HostId, defaultdict[str, list[_Piece]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for piece in sorted(pieces, key=lambda p: (-p.size_bytes, p.region.leaf, p.region.box)):
        taker = min(load, key=lambda host: (load[host], host))
        load[taker] += piece.size_bytes
        dealt[taker][f"{piece.source.host}/{piece.source.id}"].append(piece)
    return {
        taker: tuple(
            TakePart(source=parts[0].source, regions=tuple(p.region for p in parts))
            for parts in by_source.values()
        )
        for taker, by_source in dealt.items()
    }
