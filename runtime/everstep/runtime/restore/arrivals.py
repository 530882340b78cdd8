"""Parts of chunks on their way in: expected, received into their places, or given up."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.clock import Clock
from everstep.runtime.errors import PeerUnavailable
from everstep.runtime.restore.handover import Header, Kind, Wire, WrongBytes, scratch_of
from everstep.runtime.restore.places import place_cast
from everstep.runtime.restore.reshard import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A part that another process reads."""

    giver: int
    piece: Piece
    place: NDArray[Any]
    dtype: np.dtype[np.generic]
    """As it is stored; the place may be of another."""

    @property
    def size_bytes(self) -> int:
        return self.place.size * self.dtype.itemsize


Key = tuple[int, int]
"""Chunk and part."""


class Arrivals:
    """All that one process gets in a restore. One thread waits, one for each giver receives."""

    def __init__(self, deadline_s: float, clock: Clock) -> None:
        self._deadline_s, self._clock = deadline_s, clock
        self._changed = threading.Condition()
        self._begun_s = clock.monotonic_s()
        self._expected: dict[Key, Arrival] = {}
        self._end = 0
        """Chunks before this one are of stages that have begun."""
        self.chunk_count = 0
        """Of all stages."""
        self._missing: list[Piece] = []
        self._arrived_bytes = 0
        self._wires: dict[int, Wire] = {}
        self._lost: dict[int, str] = {}
        self._told: set[int] = set()
        self._is_closed = False
        self.progress = 0
        """Grows with every block that came."""

    def lose(self, givers: Iterable[int], why: str) -> None:
        """Expect nothing more of these."""
        with self._changed:
            for giver in givers:
                self._lost.setdefault(giver, why)
                if giver in self._wires:
                    self._wires[giver].close()
            self._changed.notify_all()

    def open(self, expected: Mapping[Key, Arrival], end: int) -> None:
        """Begin a stage: parts may go to their places from now on.

        Args:
            expected: by number of the chunk and of its part.
            end: one past the last chunk of the stage.
        """
        with self._changed:
            self._expected = dict(expected)
            self._end = end
            self._changed.notify_all()

    def wait(self) -> tuple[list[Piece], int, list[str]]:
        """Wait until nothing more is to come in this stage.

        Returns:
            What did not come, the bytes that did, and why some did not.

        Blocking: at most the deadline without a block of a giver.
        """
        with self._changed:
            while late := {a.giver for a in self._expected.values()} - self._lost.keys():
                absent = late - self._wires.keys()
                left_s = self._begun_s + self._deadline_s - self._clock.monotonic_s()
                if absent and left_s <= 0:
                    for giver in absent:
                        self._lost[giver] = (
                            f"process {giver} did not come within {self._deadline_s:g} s"
                        )
                    continue
                # Those who are here have deadlines of their own, in the threads that receive.
                self._changed.wait(left_s if absent else None)
            missing = [*self._missing, *(a.piece for a in self._expected.values())]
            moved_bytes = self._arrived_bytes
            lost = {a.giver for a in self._expected.values()} - self._told
            self._told |= lost
            words = [self._lost[giver] for giver in sorted(lost)]
            self._expected, self._missing, self._arrived_bytes = {}, [], 0
        return missing, moved_bytes, words

    def receive(self, wire: Wire, token: str, agreement: str) -> None:
        """Receive all that comes over a connection, to its end. In a thread of its own."""
        giver: int | None = None
        try:
            giver = wire.meet(token, agreement)
            wire.name = f"process {giver} at {wire.name}"
            with self._changed:
                if self._is_closed or giver in self._lost or giver in self._wires:
                    return
                self._wires[giver] = wire
                self._changed.notify_all()
            while (header := wire.hear()).kind is not Kind.DONE:
                self._accept(giver, wire, header)
            # What it had to give is here; if not, it is read by whoever still expects it.
            self.lose([giver], f"{wire.name} ended too early")
        except PeerUnavailable as error:
            if giver is not None:
                self.lose([giver], str(error))
        finally:
            wire.close()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            wires = list(self._wires.values())
            self._changed.notify_all()
        for wire in wires:
            wire.close()

    def note_progress(self) -> None:
        self.progress += 1

    def _accept(self, giver: int, wire: Wire, header: Header) -> None:
        if header.kind is Kind.ALIVE:
            return
        arrival = self._arrival(giver, wire, header)
        if header.kind is Kind.PART:
            if header.size_bytes != arrival.size_bytes:
                raise WrongBytes(f"{wire.name} sent {header.size_bytes} bytes of a part")
            landed = scratch_of(arrival.place, arrival.dtype)
            wire.take(landed, self.note_progress)
            if landed is not arrival.place:
                place_cast(landed, arrival.place)
        with self._changed:
            del self._expected[header.chunk, header.part]
            if header.kind is Kind.PART:
                self._arrived_bytes += arrival.size_bytes
            else:
                self._missing.append(arrival.piece)
            self._changed.notify_all()

    def _arrival(self, giver: int, wire: Wire, header: Header) -> Arrival:
        """What this is; waits until its stage has begun, because only then it has a place."""
        with self._changed:
            if header.chunk < self.chunk_count:
                self._changed.wait_for(lambda: header.chunk < self._end or self._is_closed)
            arrival = self._expected.get((header.chunk, header.part))
            if arrival is None or arrival.giver != giver or self._is_closed:
                raise WrongBytes(f"{wire.name} sent what nobody expects of it")
            return arrival
