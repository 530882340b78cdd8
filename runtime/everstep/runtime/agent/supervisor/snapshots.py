"""The shelf and the worker that fills it: slots granted, captures checksummed, steps awaited."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, ExitStack

from structlog.typing import FilteringBoundLogger

from everstep.controller.api.ids import HostId, Incarnation, Step
from everstep.controller.api.wire import Settings
from everstep.runtime.agent.link import (
    Assignment,
    Captured,
    PlotAnnounced,
    SlotsGranted,
    SlotsRefused,
    Word,
)
from everstep.runtime.agent.supervisor.programs import WorkerProcess
from everstep.runtime.errors import ConfigurationError
from everstep.runtime.layout.manifest import Inventory, SnapshotManifest
from everstep.runtime.snapshot.shelf import Shelf

NO_SLOT = -1
NAMESPACE = "everstep"
DUE_PIN_S = 2.0
"""A step that is to be made durable is kept so long for its write to begin, which then keeps it.
Not longer: storage that does not answer must not hold up the next snapshots."""


class Snapshots:
    """All snapshot memory of this host, and the one worker that may write into it."""

    def __init__(self, host: HostId, settings: Settings, log: FilteringBoundLogger) -> None:
        self.shelf = Shelf(
            host=host,
            slots=settings.snapshot_slots,
            bytes_max=settings.snapshot_bytes_max,
            namespace=f"{NAMESPACE}-{host.slice}-{host.host}",
        )
        self._log = log
        self._worker: WorkerProcess | None = None
        self._incarnation = Incarnation(0)
        self._granted = NO_SLOT
        self._handing_over = 0
        """Captured slots that the shelf still counts as granted: it would grant them again."""
        self._completing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._restoring = ExitStack()
        self._held_here: set[Step] = set()
        """Steps captured and completed in this incarnation."""
        self._coming: set[Step] = set()
        """Steps captured in this incarnation whose checksums are being computed."""
        self._durable_every: int | None = None
        self._due = ExitStack()
        """Keeps the newest step that is due for storage."""
        self._asked: Step | None = None
        """The step that members agreed to hold."""
        self.copy_s: float | None = None
        self.complete_s: float | None = None
        self.refused: str | None = None

    def begin(self, assignment: Assignment) -> tuple[int, ...]:
        """Pin what the incarnation restores from; returns its descriptors for the worker.

        Raises:
            KeyError: a holding that this host offered is gone.
        """
        self.end_restore()
        self._incarnation = assignment.incarnation
        self._held_here = set()
        self._durable_every = assignment.settings.checkpoint_every_steps
        self._asked = None
        self.release_due()
        self.refused = None
        # Not only the own slots: other members read what this host offered, parcels included.
        for id_, manifest in self.shelf.manifests():
            if manifest.step == assignment.restore_step:
                self._restoring.enter_context(self.shelf.pin(id_))
        return tuple(self.shelf.fd(id_) for id_ in assignment.own_slots)

    def attach(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._granted = NO_SLOT

    def end_restore(self) -> None:
        """Let go of what was restored from: every member has its own copy by now."""
        self._restoring.close()
        self._restoring = ExitStack()
        self.grant()

    async def make_slots(self, frame: PlotAnnounced, worker: WorkerProcess) -> None:
        """Answer a worker that announced its plot."""
        worker.control.write(Word.SLOT_GRANTED, NO_SLOT)
        self._granted = NO_SLOT
        await self.settle()
        try:
            fds = await asyncio.to_thread(self.shelf.allocate, frame.plot)
        except ConfigurationError as error:
            self.refused = str(error)
            self._log.error("no memory for snapshots", why=self.refused)
            await worker.link.send(SlotsRefused(message=self.refused))
            return
        self.grant()
        granted = SlotsGranted(count=len(fds), size_bytes=self.shelf.slot_size_bytes)
        await worker.link.send(granted, fds)

    def grant(self) -> None:
        """Tell the worker which slot it may overwrite, when there is one and none is granted."""
        if self._worker is None or self._granted != NO_SLOT or self._handing_over:
            return
        if not self.shelf.slot_size_bytes:
            return
        slot = self.shelf.grant()
        if slot is not None:
            self._granted = slot
            self._worker.control.write(Word.SLOT_GRANTED, slot)

    @property
    def has_grant(self) -> bool:
        return self._granted != NO_SLOT

    def captured(self, frame: Captured) -> None:
        """A slot is completely written: checksum it beside the training."""
        self.copy_s = frame.copy_s
        if self._worker is not None:
            self._worker.control.write(Word.SLOT_GRANTED, NO_SLOT)
        self._granted = NO_SLOT
        self._handing_over += 1
        self._coming.add(frame.step)
        task = asyncio.create_task(self._complete(frame), name=f"complete step {frame.step}")
        self._completing.add(task)
        task.add_done_callback(self._completing.discard)

    async def _complete(self, frame: Captured) -> None:
        incarnation = self._incarnation
        began_s = asyncio.get_running_loop().time()
        completing = asyncio.create_task(
            self.shelf.complete(frame.slot, frame.step, incarnation, dict(frame.extra))
        )
        # Once it has begun, the next slot can be chosen.
        await asyncio.sleep(0)
        self._handing_over -= 1
        self.grant()
        try:
            await completing
        finally:
            self._coming.discard(frame.step)
        self.complete_s = asyncio.get_running_loop().time() - began_s
        if incarnation == self._incarnation:
            self._held_here.add(frame.step)
            self._keep_due(frame.step)
        self.grant()
        async with self._changed:
            self._changed.notify_all()

    def _keep_due(self, step: Step) -> None:
        """Keep a step that is due for storage until it is written, or a moment has passed."""
        every = self._durable_every
        if step != self._asked and (every is None or step % every != 0):
            return
        kept = ExitStack()
        for id_, manifest in self.shelf.manifests():
            if manifest.step == step and manifest.incarnation == self._incarnation:
                kept.enter_context(self.shelf.pin(id_))
        self._due.close()
        self._due = kept
        asyncio.get_running_loop().call_later(DUE_PIN_S, self._give_up_due, kept)

    def expect(self, step: Step) -> None:
        """This step is asked for: once it is complete it is kept, as one that is due."""
        self._asked = step

    def _give_up_due(self, kept: ExitStack) -> None:
        if self._due is kept:
            self.release_due()

    def release_due(self) -> None:
        """What was due is written, or will not be."""
        self._due.close()
        self.grant()

    def detach(self, worker: WorkerProcess) -> None:
        """The worker is gone: a slot that it was writing holds nothing."""
        if self._worker is worker:
            self._worker = None
            if self._granted != NO_SLOT:
                self.shelf.abandon(self._granted)
                self._granted = NO_SLOT

    async def settle(self) -> None:
        """Wait until everything captured so far is complete."""
        while self._completing:
            await asyncio.wait(set(self._completing))

    async def wait_held(self, step: Step, timeout_s: float) -> bool:
        """Wait until this incarnation's `step` is complete in memory."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.is_held(step))
        except TimeoutError:
            return False
        return True

    async def wait_newer(self, step: Step | None) -> Step:
        """Wait until a step of this incarnation newer than `step` is complete; returns it."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._newer(step)))
            return max(self._newer(step))

    def _newer(self, step: Step | None) -> list[Step]:
        return [s for s in self._held_here if (step is None or s > step) and self.is_held(s)]

    def is_held(self, step: Step) -> bool:
        """Whether a snapshot of this step, taken in this incarnation, is complete."""
        return step in self._held_here and any(
            manifest.step == step for _, manifest in self.shelf.manifests()
        )

    def is_coming(self, step: Step) -> bool:
        """Whether this incarnation's `step` is held, or will be in a moment."""
        return step in self._coming or self.is_held(step)

    @property
    def newest_step(self) -> Step | None:
        newest = self.shelf.newest()
        return None if newest is None else newest.step

    def inventory(self, address: str, port: int, step: Step | None) -> Inventory:
        whole = self.shelf.inventory(address, port)
        if step is None:
            return whole
        holdings = tuple(h for h in whole.holdings if h.step == step)
        wanted = {h.fingerprint for h in holdings}
        trees = {f: tree for f, tree in whole.trees.items() if f in wanted}
        return Inventory(holdings=holdings, trees=trees)

    def manifest(self, holding_id: str) -> SnapshotManifest:
        """Raises `KeyError` when the holding is gone."""
        return dict(self.shelf.manifests())[holding_id]

    def pin(self, holding_id: str) -> AbstractContextManager[None]:
        return self.shelf.pin(holding_id)

    def close(self) -> None:
        self._restoring.close()
        self.shelf.close()
