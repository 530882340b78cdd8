"""Who writes what of a checkpoint, and in which chunks. Pure; every host computes the same.

Chunks are a regular grid over each leaf, laid so that no chunk crosses the border of two shards:
then each has exactly one writer, who holds all of it. Where replicas hold the same region they
share its chunks, so that all write about equally many bytes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from everstep.controller.api.ids import HostId
from everstep.runtime.errors import Infeasible, StateRefused
from everstep.runtime.layout.boxes import Box, uncovered, whole
from everstep.runtime.layout.dtypes import itemsize
from everstep.runtime.layout.manifest import Holding, Region
from everstep.runtime.layout.tree import Leaf, TreeSpec

CHUNK_BYTES_MIN = 64 << 10
CHUNK_BYTES_MAX = 16 << 20
_SHARES = 8
"""About so many chunks a host, where the state is large enough: fine enough to balance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """Invariants.

    (1) The regions of all hosts together tile every leaf that has bytes, exactly once.
    (2) A region is made of whole chunks of its leaf's grid, and lies in one shard of its host.
    """

    chunks: dict[int, tuple[int, ...]]
    """Chunk shape by leaf index."""
    regions: dict[HostId, tuple[Region, ...]]


def plan_writes(
    tree: TreeSpec,
    holdings: Sequence[Holding],
    *,
    chunk_bytes_min: int = CHUNK_BYTES_MIN,
    chunk_bytes_max: int = CHUNK_BYTES_MAX,
) -> WritePlan:
    """Share the writing of one step among the hosts that hold it.

    Args:
        tree: of the state.
        holdings: of one step; any number a host.
        chunk_bytes_min: smaller chunks only where a leaf or the borders of shards force it.
        chunk_bytes_max: larger ones never.

    Raises:
        Infeasible: names a leaf and a region that nobody holds.
        StateRefused: names a leaf of a dtype that cannot be stored.
    """
    shards: list[dict[Box, set[HostId]]] = [{} for _ in tree.leaves]
    for holding in holdings:
        for shard in holding.shards:
            shards[shard.leaf].setdefault(shard.box, set()).add(holding.host)
    hosts = sorted({holding.host for holding in holdings})
    total = sum(_size_bytes(leaf) for leaf in tree.leaves if leaf.is_stored_as_bytes)
    wanted = min(max(total // max(len(hosts) * _SHARES, 1), chunk_bytes_min), chunk_bytes_max)
    chunks: dict[int, tuple[int, ...]] = {}
    shares: list[_Share] = []
    for index, leaf in enumerate(tree.leaves):
        if not leaf.is_stored_as_bytes:
            continue
        gaps = uncovered(whole(leaf.shape), shards[index])
        if gaps:
            raise Infeasible(
                f"nobody holds {leaf.name} region {list(gaps[0].start)} to {list(gaps[0].stop)}",
                change="one more host that holds it would do",
            )
        width = _width(leaf)
        chunks[index] = choose_chunk(
            leaf.shape, width, shards[index], wanted_bytes=wanted, floor_bytes=chunk_bytes_min // 2
        )
        if 0 not in leaf.shape:
            pieces = _disjoint(leaf.shape, shards[index])
            shares.extend(
                _Share(
                    leaf=index, chunk=chunks[index], box=box, hosts=tuple(sorted(held)), width=width
                )
                for box, held in sorted(pieces.items())
            )
    return WritePlan(chunks=chunks, regions=_balance(shares, hosts))


def choose_chunk(
    shape: Sequence[int],
    width: int,
    boxes: Iterable[Box],
    *,
    wanted_bytes: int,
    floor_bytes: int,
) -> tuple[int, ...]:
    """Chunk shape of a leaf: about `wanted_bytes` at most, and as square as borders allow.

    Halving the longest side, again and again, keeps chunks square: a later read of rows and one
    of columns then both touch few bytes too many.

    Args:
        shape: of the leaf.
        width: bytes of an element.
        boxes: shards; every border of theirs inside the leaf becomes one of the grid's.
        wanted_bytes: larger chunks only where borders have no small common divisor.
        floor_bytes: no side is split below this.
    """
    boxes = list(boxes)
    sides: list[int] = []
    free: list[bool] = []
    for axis, size in enumerate(shape):
        borders = {b.start[axis] for b in boxes} | {b.stop[axis] for b in boxes}
        inner = [border for border in borders if 0 < border < size]
        sides.append(math.gcd(*inner) if inner else max(size, 1))
        free.append(not inner)
    while math.prod(sides) * width > wanted_bytes:
        for axis in sorted(range(len(sides)), key=lambda a: -sides[a]):
            smaller = _split(sides[axis], is_free=free[axis])
            if (
                smaller < sides[axis]
                and math.prod(sides) // sides[axis] * smaller * width >= floor_bytes
            ):
                sides[axis] = smaller
                break
        else:
            break
    return tuple(sides)


def _split(side: int, *, is_free: bool) -> int:
    """A smaller side: a divisor where the grid must keep its borders, or where a small one fits."""
    for factor in (2, 3, 5, 7):
        if side % factor == 0:
            return side // factor
    if is_free:
        return -(-side // 2)
    factors = range(11, math.isqrt(side) + 1, 2)
    return side // next((factor for factor in factors if side % factor == 0), side)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """A box of whole chunks, within one shard of each of these hosts: any may write any chunk."""

    leaf: int
    chunk: tuple[int, ...]
    box: Box
    hosts: tuple[HostId, ...]
    width: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.box.shape, self.chunk, strict=True))

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * self.width

    def region(self, low: Sequence[int], high: Sequence[int]) -> Region:
        """From grid positions, counted from the box's start, to the region."""
        start = (s + i * c for s, i, c in zip(self.box.start, low, self.chunk, strict=True))
        stop = (
            min(s + i * c, end)
            for s, i, c, end in zip(self.box.start, high, self.chunk, self.box.stop, strict=True)
        )
        return Region(self.leaf, Box(tuple(start), tuple(stop)))


def _disjoint(shape: Sequence[int], shards: Mapping[Box, set[HostId]]) -> dict[Box, set[HostId]]:
    """Shards that cover a leaf, cut so that no two overlap, with all holders of each piece.

    Shards overlap without being equal when layouts are mixed: a replica beside a half, a parcel
    taken from a peer. They are cut at each other's borders.
    """
    # They cover the leaf, so they are disjoint exactly when they are not too large together.
    if sum(box.size for box in shards) == math.prod(shape):
        return {box: held for box, held in shards.items() if not box.is_empty}
    cuts = [
        sorted({0, size, *(b.start[axis] for b in shards), *(b.stop[axis] for b in shards)})
        for axis, size in enumerate(shape)
    ]
    pieces: dict[Box, set[HostId]] = {}
    for pairs in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        piece = Box(tuple(low for low, _ in pairs), tuple(high for _, high in pairs))
        pieces[piece] = {h for b, held in shards.items() if b.contains(piece) for h in held}
    return pieces


def _balance(shares: Sequence[_Share], hosts: Sequence[HostId]) -> dict[HostId, tuple[Region, ...]]:
    """Give every chunk to one of its holders, the least loaded first, in runs of chunks."""
    loads = dict.fromkeys(hosts, 0)
    regions: dict[HostId, list[Region]] = {host: [] for host in hosts}
    # What only one host can write comes first; what many can write then evens it out.
    for share in sorted(shares, key=lambda s: (len(s.hosts), -s.chunk_bytes, s.leaf, s.box)):
        total = math.prod(share.counts)
        queue = [(loads[host], host) for host in share.hosts]
        heapq.heapify(queue)
        taken = dict.fromkeys(share.hosts, 0)
        if len(queue) == 1:
            taken[share.hosts[0]] = total
        else:
            for _ in range(total):
                load, host = queue[0]
                taken[host] += 1
                heapq.heapreplace(queue, (load + share.chunk_bytes, host))
        first = 0
        for host, count in taken.items():
            loads[host] += count * share.chunk_bytes
            regions[host].extend(
                share.region(low, high) for low, high in _runs(first, first + count, share.counts)
            )
            first += count
    return {
        host: tuple(sorted(found, key=lambda r: (r.leaf, r.box))) for host, found in regions.items()
    }


_Position = tuple[int, ...]


def _runs(first: int, end: int, counts: Sequence[int]) -> Iterator[tuple[_Position, _Position]]:
    """A run of grid positions in C order, as the fewest boxes (`low`, `high`) of such a split."""
    if first >= end:
        return
    if not counts:
        yield (), ()
        return
    row = math.prod(counts[1:])
    low, skipped = divmod(first, row)
    high, left = divmod(end, row)
    if low == high:
        for a, b in _runs(skipped, left, counts[1:]):
            yield (low, *a), (low + 1, *b)
        return
    if skipped:
        for a, b in _runs(skipped, row, counts[1:]):
            yield (low, *a), (low + 1, *b)
        low += 1
    if low < high:
        yield (low, *(0 for _ in counts[1:])), (high, *counts[1:])
    if left:
        for a, b in _runs(0, left, counts[1:]):
            yield (high, *a), (high + 1, *b)


def _size_bytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * _width(leaf)


def _width(leaf: Leaf) -> int:
    try:
        return itemsize(leaf.dtype)
    except KeyError as error:
        raise StateRefused(leaf.name, leaf.dtype, "a numeric dtype of JAX") from error
