"""What this host answers to the members of its incarnation."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.agent.link import HoldKind, Word, WorkerPhase
from everstep.runtime.agent.supervisor.programs import WorkerProcess
from everstep.runtime.agent.supervisor.scope import Scope
from everstep.runtime.agent.supervisor.snapshots import Snapshots
from everstep.runtime.agent.wire import (
    Cadence,
    CommittedStep,
    Hold,
    HoldAnswer,
    Join,
    Joined,
    NoticePosted,
    Part,
    Progress,
    Take,
    Taken,
    WriteOrder,
)
from everstep.runtime.layout.manifest import Inventory, SnapshotManifest

if TYPE_CHECKING:
    from everstep.runtime.agent.supervisor.host import Host

WAIT_S_MAX = 30.0
LAST_FRAMES_S = 0.5
COMPLETING_S = 5.0
"""How long a capture that was seen may take to be checksummed."""


class HostAnswers:
    """Implements `server.Answers` for one host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def identity(self) -> tuple[Incarnation, str]:
        directive = self._host.session.directive
        if directive is None:
            return Incarnation(0), ""
        return directive.incarnation, directive.token

    @property
    def _snapshots(self) -> Snapshots | None:
        return self._host.snapshots

    def _present(self) -> Snapshots:
        snapshots = self._host.snapshots
        if snapshots is None:
            raise KeyError("anything")
        return snapshots

    async def join(self, join: Join) -> Joined:
        scope = self._host.scope
        if scope is None or scope.join is None:
            return Joined(failed=f"host {self._host.options.host} is not the lead")
        return await scope.join.receive(join)

    async def progress(self, wait_held: Step | None, wait_s: float) -> Progress:
        snapshots = self._snapshots
        scope = self._host.scope
        if wait_held is not None and snapshots is not None:
            worker = None if scope is None else scope.worker
            await _wait_held(snapshots, worker, wait_held, min(wait_s, WAIT_S_MAX))
        step, is_training = self._host.session.step, False
        if scope is not None and scope.worker is not None:
            control = scope.worker.control
            step = Step(max(0, control.read(Word.STEP_DONE)))
            is_training = control.read(Word.PHASE) == WorkerPhase.TRAINING
        held = None if snapshots is None else snapshots.newest_step
        if wait_held is not None and snapshots is not None and snapshots.is_held(wait_held):
            held = wait_held
        return Progress(
            incarnation=self._host.session.incarnation,
            step_done=step,
            is_training=is_training,
            step_held=held,
            has_worker=scope is not None and scope.worker is not None,
        )

    async def hold(self, hold: Hold) -> HoldAnswer:
        """Arm the worker, or say that it is past the step. See `agreement` for why this is safe."""
        scope, snapshots = self._host.scope, self._snapshots
        if scope is None or snapshots is None:
            return HoldAnswer(accepted=False, step_done=self._host.session.step)
        worker = scope.worker
        if worker is None:
            accepted = snapshots.is_coming(hold.step)
            return HoldAnswer(accepted=accepted, step_done=self._host.session.step)
        if hold.settled:
            _leave_now(scope, worker, hold.step)
            return HoldAnswer(accepted=True, step_done=_step_done(worker))
        if scope.hold_armed is not None and hold.step < scope.hold_armed:
            # Overtaken by a later proposal on its way here (A2).
            return HoldAnswer(accepted=False, step_done=_step_done(worker))
        if _step_done(worker) < hold.step:
            self._arm(scope, snapshots, worker, hold)
        # Read after the word was written: a worker that finishes the step from here on sees it.
        done = _step_done(worker)
        if done < hold.step:
            return HoldAnswer(accepted=True, step_done=done)
        return await self._answer_passed(scope, snapshots, worker, hold)

    def _arm(self, scope: Scope, snapshots: Snapshots, worker: WorkerProcess, hold: Hold) -> None:
        if not snapshots.has_grant:
            # A write to storage may have all slots; the request goes first.
            self._host.checkpoints.yield_slots()
            if self._host.local is not None:
                self._host.local.yield_slots()
            snapshots.grant()
        # A repeated proposal does not take back the confirmation that overtook it.
        leaves = hold.leave or (scope.hold_armed == hold.step and scope.hold_leaves)
        kind = HoldKind.LEAVE if leaves else HoldKind.CONTINUE
        snapshots.expect(hold.step)
        if scope.hold_armed not in (None, hold.step):
            # No worker may take the kind of this hold for that of the one before.
            worker.control.write(Word.HOLD_AFTER, -1)
        worker.control.write(Word.HOLD_KIND, kind)
        worker.control.write(Word.HOLD_AFTER, hold.step)
        scope.hold_armed, scope.hold_leaves = hold.step, leaves

    async def _answer_passed(
        self, scope: Scope, snapshots: Snapshots, worker: WorkerProcess, hold: Hold
    ) -> HoldAnswer:
        """The worker has finished the step already: fine if it was copied on the way."""
        was_armed = hold.step == scope.hold_armed or snapshots.is_coming(hold.step)
        held = was_armed and await snapshots.wait_held(hold.step, COMPLETING_S)
        if not held and scope.worker is worker:
            worker.control.write(Word.HOLD_AFTER, -1)
            scope.hold_armed = None
        return HoldAnswer(accepted=held, step_done=_step_done_of(scope, worker, hold.step))

    def disarm(self) -> None:
        """Forget a hold that was withdrawn."""
        scope = self._host.scope
        if scope is not None and scope.worker is not None and scope.hold_armed is not None:
            scope.worker.control.write(Word.HOLD_AFTER, -1)
            scope.hold_armed = None

    async def holdings(self, step: Step | None) -> Inventory:
        options = self._host.options
        snapshots = self._snapshots
        if snapshots is None:
            return Inventory(holdings=(), trees={})
        return snapshots.inventory(options.address, options.port, step)

    async def take(self, take: Take) -> Taken:
        return await self._host.parcels.take(take)

    async def write(self, order: WriteOrder) -> Part:
        return await self._host.checkpoints.write(order)

    async def notice(self, notice: NoticePosted) -> None:
        self._host.take_notice(notice)

    async def cadence(self, cadence: Cadence) -> None:
        self._host.set_cadence(cadence.every_steps)

    async def committed(self, committed: CommittedStep) -> None:
        self._host.note_committed(committed.step, committed.committed_at_s)

    def manifest(self, holding_id: str) -> SnapshotManifest:
        local = self._host.local
        if local is not None and local.has(holding_id):
            return local.manifest(holding_id)
        return self._present().manifest(holding_id)

    def pin(self, holding_id: str) -> AbstractContextManager[None]:
        local = self._host.local
        if local is not None and local.has(holding_id):
            return nullcontext()
        return self._present().pin(holding_id)

    def holding_fd(self, holding_id: str) -> int:
        local = self._host.local
        if local is not None and local.has(holding_id):
            return local.fd(holding_id)
        return self._present().shelf.fd(holding_id)


async def _wait_held(
    snapshots: Snapshots, worker: WorkerProcess | None, step: Step, wait_s: float
) -> None:
    """Wait until the step is held, or the worker can no longer make it so, or `wait_s` is over."""
    if worker is None or worker.exited.done():
        await snapshots.settle()
        return
    holding = asyncio.ensure_future(snapshots.wait_held(step, wait_s))
    try:
        either: set[asyncio.Future[Any]] = {holding, worker.exited}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        holding.cancel()
    if worker.exited.done():
        # Its last frames are being read; what it captured is then complete in a moment.
        await snapshots.wait_held(step, min(wait_s, LAST_FRAMES_S))


def _step_done(worker: WorkerProcess) -> Step:
    return Step(worker.control.read(Word.STEP_DONE))


def _step_done_of(scope: Scope, worker: WorkerProcess, otherwise: Step) -> Step:
    """As `_step_done`; the worker may have ended while something was awaited."""
    return _step_done(worker) if scope.worker is worker else otherwise


def _leave_now(scope: Scope, worker: WorkerProcess, step: Step) -> None:
    scope.leave_step = step
    if scope.worker is worker:
        worker.kill()
