"""Read pieces from storage, each stored chunk once however many pieces it serves.

A chunk is what storage reads and verifies, so two devices whose boxes meet in one chunk would
cost it twice. Such chunks are read into a buffer and handed round, and so are those that are cast;
all others are read straight into the wanted arrays.
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
from everstep.runtime.restore.places import part_of, place_cast
from everstep.runtime.restore.reshard import Bad, Piece, Read, SourceKind
from everstep.runtime.restore.sources import RegionSource

BUFFER_BYTES_MAX = 64 << 20
"""Of buffers at once, whatever may be in flight: the arrays themselves are memory enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One region to be read, and the pieces that it serves; all of them lie in it."""

    region: Region
    pieces: tuple[Piece, ...]
    is_direct: bool
    """Whether it is read straight into its place."""


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
    batch_bytes = buffer_bytes = 0
    try:
        requests = list(_requests(source, [read.piece for read in reads], targets, tree))
    except (CheckpointInvalid, Retryable) as error:
        # It does not even open.
        _give_up(source, index, error, [read.piece for read in reads], outcome)
        return
    for request in requests:
        leaf = tree.leaves[request.region.leaf]
        size = request.region.box.size * itemsize(leaf.dtype)
        buffer = 0 if request.is_direct else size
        if batch and (
            batch_bytes + size > memory_bytes or buffer_bytes + buffer > BUFFER_BYTES_MAX
        ):
            _do_batch(source, index, batch, targets, tree, outcome)
            batch, batch_bytes, buffer_bytes = [], 0, 0
        batch.append(request)
        batch_bytes += size
        buffer_bytes += buffer
    if batch:
        _do_batch(source, index, batch, targets, tree, outcome)


def _requests(
    source: RegionSource, pieces: Sequence[Piece], targets: Sequence[Target], tree: TreeSpec
) -> Iterator[_Request]:
    by_leaf: defaultdict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_leaf[piece.region.leaf].append(piece)
    for leaf, wanted in by_leaf.items():
        stored = numpy_dtype(tree.leaves[leaf].dtype)
        is_cast = any(targets[piece.target].array.dtype != stored for piece in wanted)
        if len(wanted) == 1 and not is_cast:
            yield _Request(region=wanted[0].region, pieces=(wanted[0],), is_direct=True)
            continue
        chunk = source.chunk_of(leaf)
        by_cell: defaultdict[tuple[int, ...], list[Piece]] = defaultdict(list)
        for piece in wanted:
            for cell in _cells(piece.region.box, chunk):
                by_cell[cell].append(piece)
        shared = {id(p) for sharers in by_cell.values() if len(sharers) > 1 for p in sharers}
        if is_cast:
            # Chunk by chunk, so that there is never a second copy of a whole leaf.
            shared = {id(piece) for piece in wanted}
        for piece in wanted:
            if id(piece) not in shared:
                yield _Request(region=piece.region, pieces=(piece,), is_direct=True)
        for cell, sharers in by_cell.items():
            if id(sharers[0]) in shared:
                yield _of_cell(leaf, _cell_box(cell, chunk), sharers, is_cast=is_cast)


def _of_cell(leaf: int, cell: Box, sharers: Sequence[Piece], *, is_cast: bool) -> _Request:
    """Read what the pieces want of one chunk: the least box around their parts of it."""
    parts: list[Piece] = []
    for piece in sharers:
        common = piece.region.box.intersect(cell)
        if common is not None:
            parts.append(Piece(target=piece.target, region=Region(leaf, common)))
    boxes = [part.region.box for part in parts]
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))
    region = Region(leaf, Box(start, stop))
    is_direct = not is_cast and len(parts) == 1 and parts[0].region == region
    return _Request(region=region, pieces=tuple(parts), is_direct=is_direct)


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
                place_cast(part, targets[piece.target].part(piece.region))
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
