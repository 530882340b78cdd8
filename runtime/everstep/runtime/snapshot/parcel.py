"""Regions of a step that came from other hosts: memory being filled, and its checksums."""

from __future__ import annotations

import threading
from typing import Protocol

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.layout.checksums import block_crcs
from everstep.runtime.layout.manifest import Plot
from everstep.runtime.snapshot.memfd import SharedMemory


class ParcelKeeper(Protocol):
    """The shelf, as a parcel sees it."""

    def finish_parcel(self, parcel: Parcel) -> str: ...

    def abandon_parcel(self, parcel: Parcel) -> None: ...


class Parcel:
    """Memory for regions of other hosts, being filled. Not on the shelf before `finish`."""

    def __init__(
        self,
        shelf: ParcelKeeper,
        memory: SharedMemory,
        step: Step,
        incarnation: Incarnation,
        plot: Plot,
        extra: dict[str, str],
    ) -> None:
        self._shelf = shelf
        self.memory, self.step, self.incarnation = memory, step, incarnation
        self.plot, self.extra = plot, extra

    def buffer(self, index: int) -> memoryview:
        """The memory of one region, writable; counted without the empty regions."""
        shard = self.plot.shards[index]
        return self.memory.bytes().data[shard.offset : shard.offset + shard.size_bytes]

    def finish(self) -> str:
        """Checksum what was received and put it on the shelf; returns the holding's id.

        **Blocking**: about 0.15 s per GiB. Call it in a thread.
        """
        return self._shelf.finish_parcel(self)

    def abandon(self) -> None:
        """Give the memory back. Does nothing after `finish`."""
        self._shelf.abandon_parcel(self)


def checksums(memory: SharedMemory, plot: Plot) -> tuple[tuple[int, ...], ...]:
    """Block checksums of all shards. Lets the event loop run in between."""
    data = memory.bytes()
    # Never set: a wait that ends by its timeout is the shortest pause that gives up the GIL for
    # certain; the extension itself holds it.
    never = threading.Event()
    return tuple(
        block_crcs(
            data[shard.offset : shard.offset + shard.size_bytes],
            pause=lambda: never.wait(0.0001),
        )
        for shard in plot.shards
    )
