"""Carry a read plan out: read, verify every block, and put each element where it belongs.

Whole blocks are read, because a block is what a checksum is of. Where a run of blocks lies in one
wanted array as it lies in the shard, it is read straight into that array and verified there;
otherwise through a buffer of one run. A block is read once, however many regions it serves.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.errors import CheckpointInvalid, Retryable
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.checksums import crc_of
from everstep.runtime.layout.dtypes import numpy_dtype
from everstep.runtime.layout.manifest import BLOCK_BYTES, Region, Shard, SnapshotManifest
from everstep.runtime.layout.runs import is_run, run_boxes, span_of
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.restore.outcome import Outcome, Target
from everstep.runtime.restore.places import part_of, place_cast
from everstep.runtime.restore.reshard import Bad, Piece, Read
from everstep.runtime.restore.sources import MemorySource, RegionSource
from everstep.runtime.restore.stored import read_stored

RUN_BYTES_MAX = 8 * BLOCK_BYTES
THREAD_COUNT = 4
GAP_BYTES_MAX = 1 << 16
"""Bytes that are read in vain rather than to ask twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Consecutive blocks of one shard, and the pieces that have elements in them."""

    source: int
    position: int
    shard: Shard
    first: int
    """Index of the first block."""
    start: int
    """Bytes from the start of the shard."""
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def offset(self) -> int:
        """Bytes from the start of the slot."""
        return self.shard.offset + self.start

    @property
    def end(self) -> int:
        return self.shard.offset + self.stop

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


class Fetch:
    """Reads of one restore. Sources by the index that plans call them by."""

    def __init__(
        self,
        tree: TreeSpec,
        targets: Sequence[Target],
        memories: Mapping[int, MemorySource],
        storages: Mapping[int, RegionSource],
        *,
        memory_bytes: int,
    ) -> None:
        self._tree, self._targets = tree, targets
        self._memories, self._storages = memories, storages
        self._memory_bytes = memory_bytes
        blocks = max(memory_bytes // (THREAD_COUNT * BLOCK_BYTES), 1)
        self._run_bytes = min(blocks * BLOCK_BYTES, RUN_BYTES_MAX)
        self._buffers = threading.local()

    def execute(self, reads: Sequence[Read]) -> Outcome:
        """Carry reads out, all sources at once.

        Raises:
            Fenced: a peer is in a newer incarnation. Nothing else: what fails is in the outcome.

        **Blocking**: until all are done or failed; each wait on a peer has a deadline.
        """
        outcome = Outcome()
        runs = self._runs([r for r in reads if r.source in self._memories], outcome)
        requests = self._requests(list(runs))
        with ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="restore") as pool:
            jobs = [pool.submit(self._do_request, request, outcome) for request in requests]
            try:
                for index, source in self._storages.items():
                    read_stored(
                        source,
                        index,
                        [read for read in reads if read.source == index],
                        self._targets,
                        self._tree,
                        outcome,
                        memory_bytes=self._memory_bytes,
                    )
                for job in jobs:
                    job.result()
            finally:
                for job in jobs:
                    job.cancel()
        return outcome

    # Memory

    def _runs(self, reads: Sequence[Read], outcome: Outcome) -> Iterator[_Run]:
        by_shard: defaultdict[tuple[int, int], list[Piece]] = defaultdict(list)
        for read in reads:
            by_shard[read.source, read.shard or 0].append(read.piece)
        for (index, position), pieces in by_shard.items():
            try:
                manifest = self._memories[index].manifest()
            except (Retryable, CheckpointInvalid) as error:
                outcome.note_missing(pieces)
                outcome.reject(Bad(source=index), str(error))
                continue
            yield from self._runs_of(manifest, index, position, pieces)

    def _runs_of(
        self, manifest: SnapshotManifest, source: int, position: int, pieces: list[Piece]
    ) -> Iterator[_Run]:
        """Runs of the blocks that hold wanted elements, none longer than the bound."""
        shard = manifest.plot.shards[position]
        element_bytes = shard.size_bytes // max(shard.box.size, 1)
        needed: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            for block in _blocks_of(piece.region.box, shard, element_bytes):
                needed[block].append(piece)
        blocks_max = self._run_bytes // BLOCK_BYTES
        first: int | None = None
        blocks = sorted(needed)
        for at, block in enumerate(blocks):
            first = block if first is None else first
            is_last = at + 1 == len(blocks) or blocks[at + 1] != block + 1
            if is_last or block - first + 1 == blocks_max:
                inside = {id(p): p for b in range(first, block + 1) for p in needed[b]}
                yield _Run(
                    source=source,
                    position=position,
                    shard=shard,
                    first=first,
                    start=first * BLOCK_BYTES,
                    stop=min((block + 1) * BLOCK_BYTES, shard.size_bytes),
                    pieces=tuple(inside.values()),
                )
                first = None

    def _requests(self, runs: Sequence[_Run]) -> Iterator[tuple[_Run, ...]]:
        """Runs that are read together: many small ones that lie close to each other, or one."""
        together: list[_Run] = []
        for run in sorted(runs, key=lambda run: (run.source, run.offset)):
            if together and not (
                run.source == together[0].source
                and run.size_bytes < BLOCK_BYTES
                and run.offset - together[-1].end <= GAP_BYTES_MAX
                and run.end - together[0].offset <= self._run_bytes
            ):
                yield tuple(together)
                together = []
            together.append(run)
        if together:
            yield tuple(together)

    def _do_request(self, runs: tuple[_Run, ...], outcome: Outcome) -> None:
        source = self._memories[runs[0].source]
        if Bad(source=runs[0].source) in outcome.bad:
            # Found out meanwhile; asking again would cost another deadline.
            for run in runs:
                self._miss(run, [(run.start, run.stop)], outcome)
            return
        offset = runs[0].offset
        size = runs[-1].end - offset
        data = source.view(offset, size)
        direct = self._direct(runs[0]) if data is None and len(runs) == 1 else None
        if data is None:
            data = direct if direct is not None else self._buffer(size)
            try:
                source.read_into(offset, data)
            except Retryable as error:
                outcome.reject(Bad(source=runs[0].source), str(error))
                for run in runs:
                    self._miss(run, [(run.start, run.stop)], outcome)
                return
        for run in runs:
            part = data[run.offset - offset : run.end - offset]
            self._place(run, part, outcome, is_in_place=direct is not None)

    def _place(
        self, run: _Run, data: NDArray[np.uint8], outcome: Outcome, *, is_in_place: bool
    ) -> None:
        """Verify a run, and put it where it belongs unless it is there already.

        Block by block: what was just verified is still in the cache when it is copied.
        """
        source = self._memories[run.source]
        crcs = source.manifest().crcs[run.position]
        moved, damaged = 0, list[tuple[int, int]]()
        for start in range(0, data.size, BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            at = run.start + start
            if crc_of(block) != crcs[at // BLOCK_BYTES]:
                damaged.append((at, at + block.size))
            elif is_in_place:
                moved += block.size
            else:
                moved += self._scatter(run, block, at)
        if damaged:
            name = self._tree.leaves[run.shard.leaf].name
            bad = Bad(source=run.source, shard=run.position)
            outcome.reject(bad, f"{source.name}: {name}: checksum differs")
            self._miss(run, damaged, outcome)
        outcome.note_moved(source.kind, moved)

    def _direct(self, run: _Run) -> NDArray[np.uint8] | None:
        """The bytes of the wanted array that are exactly this run, when there are such."""
        if len(run.pieces) != 1:
            return None
        piece = run.pieces[0]
        target = self._targets[piece.target]
        if target.array.dtype != numpy_dtype(self._tree.leaves[run.shard.leaf].dtype):
            return None
        box = piece.region.box.relative_to(run.shard.box)
        inside = piece.region.box.relative_to(target.region.box)
        if not is_run(box, run.shard.box.shape) or not is_run(inside, target.region.box.shape):
            return None
        element_bytes = target.array.itemsize
        first, last = (at * element_bytes for at in span_of(box, run.shard.box.shape))
        if run.start < first or run.stop > last:
            return None
        offset = span_of(inside, target.region.box.shape)[0] * element_bytes + run.start - first
        flat = target.array.reshape(-1).view(np.uint8)
        return flat[offset : offset + run.stop - run.start]

    def _scatter(self, run: _Run, block: NDArray[np.uint8], at: int) -> int:
        """Copy the elements of a block into every array that wants them; returns the bytes."""
        moved = 0
        for piece, box, values in self._parts(run, block, at):
            common = box.intersect(piece.region.box)
            if common is None:
                continue
            target = self._targets[piece.target]
            source = part_of(values, common, box)
            place_cast(source, target.part(Region(run.shard.leaf, common)))
            moved += source.nbytes
        return moved

    def _parts(
        self, run: _Run, block: NDArray[np.uint8], at: int
    ) -> Iterator[tuple[Piece, Box, NDArray[Any]]]:
        """The boxes that lie in a block, as arrays over it, each with each piece of the run."""
        values = block.view(numpy_dtype(self._tree.leaves[run.shard.leaf].dtype))
        first = at // values.itemsize
        done = 0
        for box in run_boxes(run.shard.box.shape, first, first + values.size):
            array = values[done : done + box.size].reshape(box.shape)
            done += box.size
            placed = _moved_to(box, run.shard.box)
            for piece in run.pieces:
                yield piece, placed, array

    def _miss(self, run: _Run, ranges: list[tuple[int, int]], outcome: Outcome) -> None:
        """Note the wanted elements in these byte ranges of a shard as missing."""
        element_bytes = numpy_dtype(self._tree.leaves[run.shard.leaf].dtype).itemsize
        missing: list[Piece] = []
        for start, stop in ranges:
            first, last = start // element_bytes, stop // element_bytes
            for box in run_boxes(run.shard.box.shape, first, last):
                placed = _moved_to(box, run.shard.box)
                for piece in run.pieces:
                    common = placed.intersect(piece.region.box)
                    if common is not None:
                        region = Region(run.shard.leaf, common)
                        missing.append(Piece(target=piece.target, region=region))
        outcome.note_missing(missing)

    def _buffer(self, size_bytes: int) -> NDArray[np.uint8]:
        """This thread's buffer of one run: its pages are touched once per restore."""
        buffer: NDArray[np.uint8] | None = getattr(self._buffers, "run", None)
        if buffer is None:
            buffer = self._buffers.run = np.empty(self._run_bytes, np.uint8)
        return buffer[:size_bytes]


def _blocks_of(box: Box, shard: Shard, element_bytes: int) -> Iterator[int]:
    """Indices of the blocks of a shard that hold elements of a box."""
    inside = box.relative_to(shard.box)
    shape = shard.box.shape
    first, last = span_of(inside, shape)
    blocks = range(first * element_bytes // BLOCK_BYTES, -(-last * element_bytes // BLOCK_BYTES))
    if last - first == inside.size:
        yield from blocks
        return
    per_block = BLOCK_BYTES // element_bytes
    for block in blocks:
        run = run_boxes(shape, block * per_block, min((block + 1) * per_block, shard.box.size))
        if any(part.intersect(inside) is not None for part in run):
            yield block


def _moved_to(box: Box, origin: Box) -> Box:
    """A box given relative to `origin`, in the coordinates of the leaf."""
    return Box(
        tuple(a + o for a, o in zip(box.start, origin.start, strict=True)),
        tuple(b + o for b, o in zip(box.stop, origin.start, strict=True)),
    )
