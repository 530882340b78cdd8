"""One process's part in an exchange: what it reads alone, what it gives, what it takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.errors import CheckpointInvalid, Retryable, check
from everstep.runtime.layout.boxes import Box, uncovered
from everstep.runtime.layout.dtypes import numpy_dtype
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.restore.arrivals import Arrival, Arrivals
from everstep.runtime.restore.division import Division, SharedChunk, parts_of
from everstep.runtime.restore.giving import Budget, Gift, Loan, Sender
from everstep.runtime.restore.outcome import Target
from everstep.runtime.restore.places import part_of, place_cast
from everstep.runtime.restore.reshard import Piece
from everstep.runtime.restore.sources import RegionSource

BUFFER_BYTES_MAX = 128 << 20
"""Chunks that were read for others and are on their way, whatever the bound of a restore is."""
BATCH_BYTES = 16 << 20
"""So much is read at once before the others get their parts of it."""

Needs = Mapping[int, Sequence[Region]]
"""Disjoint regions by process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What is restored together: a part of the leaves, the same on all processes."""

    needs: Needs
    division: Division


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A chunk that this process reads for others, and for itself."""

    number: int
    chunk: SharedChunk
    values: NDArray[Any]
    loan: Loan | None
    """None: the memory is a place of this process's own, where the chunk belongs."""

    def gift(self, part: int, values: NDArray[Any] | None) -> Gift:
        if self.loan is not None:
            self.loan.borrow()
        return Gift(chunk=self.number, part=part, values=values, loan=self.loan)

    def give_back(self) -> None:
        if self.loan is not None:
            self.loan.give_back()


class Passing:
    """One process's part in one stage: `alone`, then `give`, then `take`."""

    def __init__(
        self,
        *,
        own: int,
        stage: Stage,
        first: int,
        pieces: Sequence[Piece],
        targets: Sequence[Target],
        tree: TreeSpec,
        senders: Mapping[int, Sender],
        arrivals: Arrivals,
    ) -> None:
        self._own, self._first, self._tree = own, first, tree
        self._pieces, self._targets = pieces, targets
        self._senders, self._arrivals = senders, arrivals
        self._needs = {process: _by_leaf(regions) for process, regions in stage.needs.items()}
        self._own_pieces: defaultdict[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._own_pieces[piece.region.leaf].append(piece)
        self._chunks = [
            (first + at, chunk)
            for at, chunk in enumerate(stage.division.shared)
            if own in chunk.needers
        ]
        self.read_bytes = 0
        """From storage, for itself and for others."""
        self.passed_bytes = 0
        """That others read, and that came from them."""
        self._expect(first + len(stage.division.shared))

    def alone(self) -> list[Piece]:
        """What this process reads as if it were alone."""
        shared: defaultdict[int, list[Box]] = defaultdict(list)
        for _, chunk in self._chunks:
            shared[chunk.region.leaf].append(chunk.region.box)
        return [
            Piece(target=piece.target, region=Region(piece.region.leaf, box))
            for piece in self._pieces
            for box in uncovered(piece.region.box, shared[piece.region.leaf])
        ]

    def give(self, source: RegionSource, memory_bytes: int) -> list[Piece]:
        """Read this process's share, and hand it out.

        Returns:
            What this process itself needs of chunks that could not be read.

        Blocking: for the reads, and while more is on its way than `memory_bytes`.
        """
        budget = Budget(min(memory_bytes, BUFFER_BYTES_MAX))
        failed: list[Piece] = []
        batch: list[_Load] = []
        batch_bytes = 0
        for number, chunk in self._chunks:
            if chunk.reader != self._own:
                continue
            place = self._place(chunk)
            dtype = numpy_dtype(self._tree.leaves[chunk.region.leaf].dtype)
            size = chunk.region.box.size * dtype.itemsize
            is_lent = place is not None or budget.try_take(size)
            if batch and (batch_bytes >= BATCH_BYTES or not is_lent):
                failed += self._give_batch(batch, source)
                batch, batch_bytes = [], 0
            if not is_lent:
                budget.take(size)
            if place is None:
                values, loan = np.empty(chunk.region.box.shape, dtype), Loan(budget, size)
            else:
                values, loan = place, None
            batch.append(_Load(number=number, chunk=chunk, values=values, loan=loan))
            batch_bytes += size
        if batch:
            failed += self._give_batch(batch, source)
        return failed

    def take(self) -> tuple[list[Piece], list[str]]:
        """Wait for what the others give.

        Returns:
            What did not come, and why.
        """
        missing, moved_bytes, words = self._arrivals.wait()
        self.passed_bytes += moved_bytes
        return missing, words

    def _expect(self, end: int) -> None:
        expected: dict[tuple[int, int], Arrival] = {}
        for number, chunk in self._chunks:
            if chunk.reader != self._own:
                dtype = numpy_dtype(self._tree.leaves[chunk.region.leaf].dtype)
                for part, (piece, _) in enumerate(self._parts(chunk)):
                    array = self._targets[piece.target].part(piece.region)
                    expected[number, part] = Arrival(
                        giver=chunk.reader, piece=piece, place=array, dtype=dtype
                    )
        self._arrivals.open(expected, end)

    def _parts(self, chunk: SharedChunk) -> list[tuple[Piece, Box]]:
        """What this process needs of a chunk."""
        pieces = self._own_pieces[chunk.region.leaf]
        check(
            [piece.region.box for piece in pieces] == self._needs[self._own].get(chunk.region.leaf),
            "a process needs something else than the others were told",
        )
        return [
            (Piece(target=pieces[at].target, region=Region(chunk.region.leaf, box)), box)
            for at, box in parts_of(chunk, [piece.region.box for piece in pieces])
        ]

    def _place(self, chunk: SharedChunk) -> NDArray[Any] | None:
        """Where all of a chunk belongs in this process, if there is such a place."""
        parts = self._parts(chunk)
        if len(parts) != 1 or parts[0][1] != chunk.region.box:
            return None
        target = self._targets[parts[0][0].target]
        is_as_stored = target.array.dtype == numpy_dtype(self._tree.leaves[chunk.region.leaf].dtype)
        return target.part(chunk.region) if is_as_stored else None

    def _give_batch(self, batch: Sequence[_Load], source: RegionSource) -> list[Piece]:
        """Read chunks together; after a failure one by one, so that only what is bad is lost."""
        try:
            source.read_many([(load.chunk.region, load.values) for load in batch])
        except (CheckpointInvalid, Retryable) as error:
            if len(batch) > 1 and isinstance(error, CheckpointInvalid):
                return [piece for load in batch for piece in self._give_batch([load], source)]
            return [piece for load in batch for piece in self._refuse(load)]
        for load in batch:
            self._arrivals.note_progress()
            self._hand_out(load)
        return []

    def _hand_out(self, load: _Load) -> None:
        box = load.chunk.region.box
        for process, part, common in self._parts_of_others(load.chunk):
            self._senders[process].put(load.gift(part, part_of(load.values, common, box)))
        for piece, common in self._parts(load.chunk):
            if load.loan is not None:
                values = part_of(load.values, common, box)
                place_cast(values, self._targets[piece.target].part(piece.region))
        self.read_bytes += load.values.nbytes
        load.give_back()

    def _refuse(self, load: _Load) -> list[Piece]:
        for process, part, _ in self._parts_of_others(load.chunk):
            self._senders[process].put(load.gift(part, None))
        load.give_back()
        return [piece for piece, _ in self._parts(load.chunk)]

    def _parts_of_others(self, chunk: SharedChunk) -> Iterator[tuple[int, int, Box]]:
        """Process, number and box of every part that another process needs."""
        for process in chunk.needers:
            if process != self._own:
                boxes = self._needs[process][chunk.region.leaf]
                for part, (_, common) in enumerate(parts_of(chunk, boxes)):
                    yield process, part, common


def _by_leaf(regions: Sequence[Region]) -> dict[int, list[Box]]:
    found: defaultdict[int, list[Box]] = defaultdict(list)
    for region in regions:
        found[region.leaf].append(region.box)
    return dict(found)
