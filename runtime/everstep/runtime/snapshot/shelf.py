"""The agent's snapshots: slots that a worker fills, and parcels that came from other hosts.

A slot is valid only while its manifest is on the shelf, and the manifest is put there last, after
the checksums were computed. A worker that dies while writing therefore damages nothing but the
slot that was granted to it, and that is never the newest complete one.

Used from the agent's event loop; `complete`, `allocate` and parcels do their long work in other
threads, so every change of state is made under one lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.controller.api.ids import HostId, Incarnation, Step
from everstep.runtime.errors import ConfigurationError, InvariantViolated, check
from everstep.runtime.layout.manifest import (
    Holding,
    Inventory,
    Plot,
    Region,
    Shard,
    SnapshotManifest,
)
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.snapshot.memfd import SharedMemory
from everstep.runtime.snapshot.memory import refusal, require
from everstep.runtime.snapshot.parcel import Parcel, checksums
from everstep.runtime.snapshot.regions import plot_of, region_array

_WASTE_MAX = 2
"""Memory of an older plot is re-used when it is at most this many times what is needed."""


class _State(Enum):
    FREE = "free"
    GRANTED = "granted"
    SUMMING = "summing"
    COMPLETE = "complete"


@dataclass(slots=True)
class _Slot:
    memory: SharedMemory
    state: _State = _State.FREE
    holding_id: str | None = None


@dataclass(slots=True)
class _Held:
    """One valid holding. `sequence` grows with every one; the greatest own one is the newest."""

    manifest: SnapshotManifest
    memory: SharedMemory
    sequence: int
    is_parcel: bool
    pins: int = 0
    by_leaf: dict[int, list[Shard]] = field(default_factory=dict[int, list[Shard]])

    def __post_init__(self) -> None:
        for shard in self.manifest.plot.shards:
            self.by_leaf.setdefault(shard.leaf, []).append(shard)


class Shelf:
    """All snapshot memory of one host.

    Invariants: (1) the newest complete snapshot is neither granted nor freed; (2) neither is a
    pinned holding; (3) a holding's id is never used again; (4) memory on the shelf never exceeds
    `bytes_max`.
    """

    def __init__(self, *, host: HostId, slots: int, bytes_max: int | None, namespace: str) -> None:
        if slots < 2:
            raise ConfigurationError(
                "spec.checkpoint.snapshot.slots",
                slots,
                "at least 2, so that the newest complete snapshot is never overwritten",
            )
        self._host, self._count, self._bytes_max = host, slots, bytes_max
        self._namespace = namespace
        self._lock = threading.RLock()
        self._dividing = threading.Lock()
        self._plot: Plot | None = None
        self._slots: list[_Slot] = []
        self._held: dict[str, _Held] = {}
        # Neither in a slot nor on the shelf: parcels being filled, old slots being checksummed.
        self._loose: list[SharedMemory] = []
        self._sequence = 0

    # Slots

    def allocate(self, plot: Plot) -> tuple[int, ...]:
        """Make the slots of a new plot, out of the memory of the old ones where it fits.

        A slot that holds the newest complete snapshot, or a pinned one, keeps it: either within
        the new slots (it is then not granted before a newer one is complete) or beside them.
        Whatever was granted to an earlier worker is taken back.

        Returns:
            One descriptor per slot, in slot order. They stay the shelf's own.

        Raises:
            ConfigurationError: needed, available, which limit, and which setting bounds it.

        **Blocking**: makes every new page, about one second per GiB. Call it in a thread.
        """
        with self._dividing:
            with self._lock:
                fits = self._sort_out(plot)
                self._slots, self._plot = fits, plot
                missing = self._count - len(fits)
                self._require(plot.size_bytes * missing, plot.size_bytes * self._count)
            # Touching pages takes long, and the event loop asks the shelf meanwhile.
            made: list[_Slot] = []
            try:
                for index in range(missing):
                    name = f"{self._namespace}-slot-{len(fits) + index}"
                    made.append(_Slot(SharedMemory(name, plot.size_bytes)))
            except MemoryError as error:
                for slot in made:
                    slot.memory.close()
                raise self._refusal(plot.size_bytes * self._count, error) from error
            with self._lock:
                self._slots = [*fits, *made]
                return tuple(slot.memory.fd for slot in self._slots)

    @property
    def slot_size_bytes(self) -> int:
        """Bytes that every slot has at least; 0 before the first plot."""
        return self._plot.size_bytes if self._plot is not None else 0

    def grant(self) -> int | None:
        """Choose the slot that may be overwritten now; its old content leaves the shelf at once.

        Asked again before the granted slot was completed or abandoned, the answer is the same.

        Returns:
            None when every slot is the newest complete one, pinned, or being checksummed.
        """
        with self._lock:
            for index, slot in enumerate(self._slots):
                if slot.state is _State.GRANTED:
                    return index
            chosen = self._choose()
            if chosen is None:
                return None
            slot = self._slots[chosen]
            if slot.holding_id is not None:
                del self._held[slot.holding_id]
            slot.holding_id, slot.state = None, _State.GRANTED
            return chosen

    async def complete(
        self, slot: int, step: Step, incarnation: Incarnation, extra: dict[str, str]
    ) -> SnapshotManifest:
        """Checksum a slot that a worker has finished writing, then make it valid.

        The snapshot becomes the newest. What an older plot had kept is dropped with it.
        """
        with self._lock:
            check(0 <= slot < len(self._slots), f"slot {slot} of {len(self._slots)}")
            one, plot = self._slots[slot], self._plot
            check(one.state is _State.GRANTED, f"slot {slot} is {one.state.value}, not granted")
            one.state = _State.SUMMING
        if plot is None:
            raise InvariantViolated("a slot is complete without a plot")
        crcs = await asyncio.to_thread(checksums, one.memory, plot)
        manifest = SnapshotManifest(
            step=step, incarnation=incarnation, host=self._host, plot=plot, crcs=crcs, extra=extra
        )
        with self._lock:
            if one in self._slots:
                one.state = _State.COMPLETE
            elif one.memory in self._loose:
                # The slots were divided anew meanwhile. What is complete is kept all the same.
                self._loose.remove(one.memory)
            else:
                return manifest
            one.holding_id = self._add(manifest, one.memory, is_parcel=False)
            self._drop_superseded()
        return manifest

    def abandon(self, slot: int) -> None:
        """Take a slot back from a worker that died while writing it. Its content is nothing."""
        with self._lock:
            if 0 <= slot < len(self._slots) and self._slots[slot].state is _State.GRANTED:
                self._slots[slot].state = _State.FREE

    # What is there

    def newest(self) -> SnapshotManifest | None:
        """The own snapshot that was completed last, whatever its step."""
        held = self._newest()
        return held.manifest if held is not None else None

    def steps(self) -> tuple[Step, ...]:
        """All steps of which something is held, ascending."""
        with self._lock:
            return tuple(sorted({held.manifest.step for held in self._held.values()}))

    def manifests(self) -> tuple[tuple[str, SnapshotManifest], ...]:
        """Holding id and manifest of everything that is valid, oldest first."""
        with self._lock:
            return tuple((id_, held.manifest) for id_, held in self._held.items())

    def inventory(self, address: str, port: int) -> Inventory:
        """What this host can offer at a join, readable at this address."""
        holdings: list[Holding] = []
        trees: dict[str, TreeSpec] = {}
        for id_, manifest in self.manifests():
            fingerprint = manifest.plot.tree.fingerprint
            trees.setdefault(fingerprint, manifest.plot.tree)
            holdings.append(self._holding(id_, manifest, address, port, fingerprint))
        return Inventory(holdings=tuple(holdings), trees=trees)

    @contextmanager
    def pin(self, holding_id: str) -> Generator[None]:
        """Keep a holding from being overwritten or dropped while the context is open.

        Raises:
            KeyError: it is not there, or no longer.
        """
        with self._lock:
            held = self._held[holding_id]
            held.pins += 1
        try:
            yield
        finally:
            with self._lock:
                held.pins -= 1

    def view(self, holding_id: str) -> memoryview:
        """All bytes of a holding's memory, read only. Pin it for as long as the bytes matter."""
        return self._get(holding_id).memory.view()

    def fd(self, holding_id: str) -> int:
        """Descriptor of a holding's memory, for sendfile or for a worker to inherit."""
        return self._get(holding_id).memory.fd

    def region(self, holding_id: str, region: Region) -> NDArray[Any]:
        """One region of a holding, C-contiguous; a view where possible, so pin the holding.

        Raises:
            KeyError: the holding is gone, or does not hold all of the region.
        """
        held = self._get(holding_id)
        memory: NDArray[np.uint8] = np.frombuffer(held.memory.view(), dtype=np.uint8)
        shards = held.by_leaf.get(region.leaf, [])
        return region_array(memory, held.manifest.plot.tree, shards, region)

    # Parcels: regions of a step that came from other hosts

    def open_parcel(
        self,
        step: Step,
        incarnation: Incarnation,
        tree: TreeSpec,
        regions: Sequence[Region],
        extra: Mapping[str, str] | None = None,
    ) -> Parcel:
        """Make memory for regions of other hosts, to be received straight into it.

        Raises:
            ConfigurationError: the memory does not suffice; with the figures.

        **Blocking**: makes every page. Call it in a thread.
        """
        plot = plot_of(tree, regions)
        with self._lock:
            self._require(plot.size_bytes, plot.size_bytes)
        try:
            memory = SharedMemory(f"{self._namespace}-parcel", plot.size_bytes)
        except MemoryError as error:
            raise self._refusal(plot.size_bytes, error) from error
        with self._lock:
            self._loose.append(memory)
        return Parcel(self, memory, step, incarnation, plot, dict(extra or {}))

    def add_parcel(
        self,
        step: Step,
        incarnation: Incarnation,
        tree: TreeSpec,
        regions: Sequence[tuple[Region, bytes | bytearray | memoryview]],
        extra: Mapping[str, str] | None = None,
    ) -> str:
        """Take verified bytes of other hosts' regions in. Returns the new holding's id."""
        parcel = self.open_parcel(step, incarnation, tree, [r for r, _ in regions], extra)
        filled = [data for region, data in regions if not region.box.is_empty]
        try:
            for index, data in enumerate(filled):
                parcel.buffer(index)[:] = memoryview(data).cast("B")
            return parcel.finish()
        except BaseException:
            parcel.abandon()
            raise

    def finish_parcel(self, parcel: Parcel) -> str:
        """Called by `Parcel.finish`."""
        crcs = checksums(parcel.memory, parcel.plot)
        manifest = SnapshotManifest(
            step=parcel.step,
            incarnation=parcel.incarnation,
            host=self._host,
            plot=parcel.plot,
            crcs=crcs,
            extra=parcel.extra,
        )
        with self._lock:
            check(parcel.memory in self._loose, "a parcel is finished twice")
            self._loose.remove(parcel.memory)
            return self._add(manifest, parcel.memory, is_parcel=True)

    def abandon_parcel(self, parcel: Parcel) -> None:
        """Called by `Parcel.abandon`."""
        with self._lock:
            if parcel.memory in self._loose:
                self._loose.remove(parcel.memory)
                parcel.memory.close()

    def drop_before(self, step: Step) -> None:
        """Forget everything older than a step, but neither the newest nor what is pinned."""
        with self._lock:
            newest = self._newest()
            for id_, held in list(self._held.items()):
                if held.manifest.step < step and held is not newest and not held.pins:
                    self._drop(id_)

    def close(self) -> None:
        """Give all memory up. What a worker or a reader still maps lives until they let go."""
        with self._lock:
            memories = {
                *(slot.memory for slot in self._slots),
                *(held.memory for held in self._held.values()),
                *self._loose,
            }
            self._slots, self._held, self._loose, self._plot = [], {}, [], None
            for memory in memories:
                memory.close()

    # Inside; the lock is held

    def _newest(self) -> _Held | None:
        with self._lock:
            own = [held for held in self._held.values() if not held.is_parcel]
            return max(own, key=lambda held: held.sequence, default=None)

    def _get(self, holding_id: str) -> _Held:
        with self._lock:
            return self._held[holding_id]

    def _add(self, manifest: SnapshotManifest, memory: SharedMemory, *, is_parcel: bool) -> str:
        self._sequence += 1
        id_ = f"{self._namespace}-{self._sequence}"
        self._held[id_] = _Held(manifest, memory, self._sequence, is_parcel)
        return id_

    def _drop(self, id_: str) -> None:
        held = self._held.pop(id_)
        for slot in self._slots:
            if slot.memory is held.memory:
                slot.state, slot.holding_id = _State.FREE, None
                return
        held.memory.close()

    def _choose(self) -> int | None:
        """The free slot, else the one with the oldest content that may go."""
        newest = self._newest()
        best: tuple[int, int] | None = None
        for index, slot in enumerate(self._slots):
            if slot.state is _State.FREE:
                return index
            if slot.state is not _State.COMPLETE or slot.holding_id is None:
                continue
            held = self._held[slot.holding_id]
            if held is newest or held.pins:
                continue
            if best is None or held.sequence < best[0]:
                best = (held.sequence, index)
        return best[1] if best is not None else None

    def _sort_out(self, plot: Plot) -> list[_Slot]:
        """The present slots that serve the new plot.

        The others give their memory back now, so that it is not needed twice, unless what is in
        them must stay: that is on the shelf still, without a slot.
        """
        newest = self._newest()
        fits: list[_Slot] = []
        # Slots with content that must stay come first: they then serve the new plot as well.
        self._slots.sort(key=lambda slot: not self._must_stay(slot, newest))
        for slot in self._slots:
            if slot.state is _State.SUMMING:
                self._loose.append(slot.memory)
                continue
            if slot.state is _State.GRANTED:
                slot.state = _State.FREE
            size = slot.memory.size_bytes
            is_right = plot.size_bytes <= size <= max(_WASTE_MAX * plot.size_bytes, 1 << 20)
            if is_right and len(fits) < self._count:
                fits.append(slot)
            elif not self._must_stay(slot, newest):
                if slot.holding_id is not None:
                    del self._held[slot.holding_id]
                slot.memory.close()
        return fits

    def _must_stay(self, slot: _Slot, newest: _Held | None) -> bool:
        if slot.holding_id is None:
            return False
        held = self._held[slot.holding_id]
        return held is newest or held.pins > 0

    def _drop_superseded(self) -> None:
        """Let go of what a newer complete snapshot makes needless.

        That is memory kept from an older plot, and parcels older than the own snapshot before
        the newest: another host may be one snapshot behind, never two.
        """
        own = sorted(
            (held for held in self._held.values() if not held.is_parcel),
            key=lambda held: held.sequence,
        )
        in_slots = {slot.memory for slot in self._slots}
        before_newest = own[-2].sequence if len(own) > 1 else 0
        for id_, held in list(self._held.items()):
            if held.pins or held is own[-1] or held.memory in in_slots:
                continue
            if not held.is_parcel or held.sequence < before_newest:
                self._drop(id_)

    def _holding(
        self, id_: str, manifest: SnapshotManifest, address: str, port: int, fingerprint: str
    ) -> Holding:
        return Holding(
            id=id_,
            step=manifest.step,
            incarnation=manifest.incarnation,
            host=self._host,
            address=address,
            port=port,
            fingerprint=fingerprint,
            shards=manifest.plot.shards,
        )

    def _taken_bytes(self) -> int:
        memories = {
            *(slot.memory for slot in self._slots),
            *(held.memory for held in self._held.values()),
            *self._loose,
        }
        return sum(memory.size_bytes for memory in memories)

    def _require(self, new_bytes: int, wanted_bytes: int) -> None:
        taken = self._taken_bytes()
        require(new_bytes, wanted=wanted_bytes, taken=taken, bytes_max=self._bytes_max)

    def _refusal(self, wanted_bytes: int, error: MemoryError) -> ConfigurationError:
        taken = self._taken_bytes()
        return refusal(str(error), wanted=wanted_bytes, taken=taken, bytes_max=self._bytes_max)
