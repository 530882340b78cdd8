"""Read pieces from storage, each stored chunk once however many pieces it serves.

A chunk is what storage reads and verifies, so two devices whose boxes meet in one chunk would
cost it twice. Such chunks are read into a buffer and handed round; all others are read straight
into the wanted arrays.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.errors import CheckpointInvalid, Retryable, StorageUnavailable
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.dtypes import itemsize, numpy_dtype
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.restore.outcome import Outcome, Target
from everstep.runtime.restore.places import part_of
from everstep.runtime.restore.reshard import Bad, Piece, Read, SourceKind
from everstep.runtime.restore.sources import RegionSource


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One region to be read, and the pieces that it serves; all of them lie in it."""

    region: Region
    pieces: tuple[Piece, ...]

    @property
    def is_direct(self) -> bool:
        return len(self.pieces) == 1 and self.pieces[0].region == self.region


def read_stored(
    source: RegionSource,
    index: int,
    reads: Sequence[Read],
    targets: Sequence[Target],
    tree: TreeSpec,
    outcome: Outcome,
    *,
    memory_bytes: int,
) -> None:
    """Carry out the reads of one storage source; what fails is in the outcome.

    **Blocking**: until all are done. At most `memory_bytes` are in flight, or one chunk.
    """
    batch: list[_Request] = []
    batch_bytes = 0
    try:
        requests = list(_requests(source, [read.piece for read in reads]))
    except (CheckpointInvalid, Retryable) as error:
        # It does not even open.
        _give_up(source, index, error, [read.piece for read in reads], outcome)
        return
    for request in requests:
        leaf = tree.leaves[request.region.leaf]
        size = request.region.box.size * itemsize(leaf.dtype)
        if batch and batch_bytes + size > memory_bytes:
            _do_batch(source, index, batch, targets, tree, outcome)
            batch, batch_bytes = [], 0
        batch.append(request)
        batch_bytes += size
    if batch:
        _do_batch(source, index, batch, targets, tree, outcome)


def _requests(source: RegionSource, pieces: Sequence[Piece]) -> Iterator[_Request]:
    by_leaf: defaultdict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_leaf[piece.region.leaf].append(piece)
    for leaf, wanted in by_leaf.items():
        chunk = source.chunk_of(leaf) if len(wanted) > 1 else ()
        by_cell: defaultdict[tuple[int, ...], list[Piece]] = defaultdict(list)
        if len(wanted) > 1:
            for piece in wanted:
                for cell in _cells(piece.region.box, chunk):
                    by_cell[cell].append(piece)
        shared = {id(p) for sharers in by_cell.values() if len(sharers) > 1 for p in sharers}
        for piece in wanted:
            if id(piece) not in shared:
                yield _Request(region=piece.region, pieces=(piece,))
        for cell, sharers in by_cell.items():
            if id(sharers[0]) in shared:
                yield _of_cell(leaf, _cell_box(cell, chunk), sharers)


def _of_cell(leaf: int, cell: Box, sharers: Sequence[Piece]) -> _Request:
    """Read what the pieces want of one chunk: the least box around their parts of it."""
    parts: list[Piece] = []
    for piece in sharers:
        common = piece.region.box.intersect(cell)
        if common is not None:
            parts.append(Piece(target=piece.target, region=Region(leaf, common)))
    boxes = [part.region.box for part in parts]
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))
    return _Request(region=Region(leaf, Box(start, stop)), pieces=tuple(parts))


def _do_batch(
    source: RegionSource,
    index: int,
    batch: Sequence[_Request],
    targets: Sequence[Target],
    tree: TreeSpec,
    outcome: Outcome,
) -> None:
    """Read together; after a failure one by one, so that only what is bad is missing."""
    arrays = [_array(request, targets, tree) for request in batch]
    try:
        source.read_many([(r.region, array) for r, array in zip(batch, arrays, strict=True)])
    except Retryable as error:
        _give_up(source, index, error, [p for r in batch for p in r.pieces], outcome)
        return
    except CheckpointInvalid as error:
        if len(batch) > 1:
            del arrays
            for request in batch:
                _do_batch(source, index, [request], targets, tree, outcome)
            return
        outcome.reject(Bad(source=index, leaf=batch[0].region.leaf), f"{source.name}: {error}")
        outcome.note_missing(batch[0].pieces)
        return
    for request, array in zip(batch, arrays, strict=True):
        for piece in request.pieces:
            if not request.is_direct:
                part = part_of(array, piece.region.box, request.region.box)
                targets[piece.target].part(piece.region)[...] = part
            size = piece.region.box.size * array.itemsize
            outcome.note_moved(SourceKind.STORAGE, size)


def _give_up(
    source: RegionSource,
    index: int,
    error: CheckpointInvalid | Retryable,
    pieces: Sequence[Piece],
    outcome: Outcome,
) -> None:
    outcome.reject(Bad(source=index), f"{source.name}: {error}")
    outcome.note_missing(pieces)
    if isinstance(error, StorageUnavailable):
        outcome.unavailable = error


def _array(request: _Request, targets: Sequence[Target], tree: TreeSpec) -> NDArray[Any]:
    if request.is_direct:
        piece = request.pieces[0]
        return targets[piece.target].part(piece.region)
    return np.empty(request.region.box.shape, numpy_dtype(tree.leaves[request.region.leaf].dtype))


def _cells(box: Box, chunk: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Positions in the grid of the chunks that a box touches."""
    return itertools.product(
        *(
            range(start // side, -(-stop // side))
            for start, stop, side in zip(box.start, box.stop, chunk, strict=True)
        )
    )


def _cell_box(cell: Sequence[int], chunk: Sequence[int]) -> Box:
    return Box(
        tuple(at * side for at, side in zip(cell, chunk, strict=True)),
        tuple((at + 1) * side for at, side in zip(cell, chunk, strict=True)),
    )
