"""One worker from its start to its end, as seen from the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from msgspec.structs import replace

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.agent.channel import Channel, MetricsLine
from everstep.runtime.agent.events import (
    Event,
    WorkerEnded,
    WorkerFirstStep,
    WorkerProgressed,
    WorkerRestored,
)
from everstep.runtime.agent.frames import LinkClosed
from everstep.runtime.agent.link import (
    Captured,
    Connected,
    Ending,
    EndKind,
    FirstStepDone,
    MetricNames,
    PlotAnnounced,
    Restored,
    Warmed,
    Word,
    WorkerFrame,
    WorkerPhase,
)
from everstep.runtime.agent.supervisor.programs import ExitStatus, WorkerProcess
from everstep.runtime.agent.supervisor.scope import Scope
from everstep.runtime.agent.supervisor.snapshots import Snapshots
from everstep.runtime.clock import Clock

RATE_WINDOW_S = 10.0


@dataclass(slots=True, kw_only=True)
class Pace:
    """How fast steps are finished, over the last seconds."""

    marks: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    def note(self, step: int, at_s: float) -> None:
        if self.marks and step <= self.marks[-1][1]:
            return
        self.marks.append((at_s, step))
        while len(self.marks) > 2 and self.marks[0][0] < at_s - RATE_WINDOW_S:
            self.marks.pop(0)

    @property
    def steps_per_s(self) -> float | None:
        if len(self.marks) < 2:
            return None
        (start_s, first), (stop_s, last) = self.marks[0], self.marks[-1]
        return (last - first) / (stop_s - start_s) if stop_s > start_s else None


class Following:
    """Reads the link and the control block of one worker and tells what they say."""

    def __init__(
        self,
        worker: WorkerProcess,
        scope: Scope,
        snapshots: Snapshots,
        channel: Channel,
        *,
        feed: Callable[[Event], None],
        clock: Clock,
    ) -> None:
        self._worker = worker
        self._scope = scope
        self._snapshots = snapshots
        self._channel = channel
        self._feed = feed
        self._clock = clock
        self._incarnation: Incarnation = scope.incarnation
        self._is_recorder = scope.assignment is not None and scope.assignment.rank == 0
        self._names: tuple[str, ...] = ()
        self._metrics_read = 0
        self._ending: Ending | None = None
        self._is_over = False
        self.pace = Pace()
        self.loss: float | None = None

    async def follow(self) -> None:
        """Return when the worker has ended and everything it left is taken care of."""
        worker = self._worker
        worker.exited.add_done_callback(lambda _: worker.link.finish())
        try:
            while True:
                await self._take(await worker.link.receive())
        except LinkClosed:
            pass
        status = await worker.exited
        self.poll()
        self._end(status)
        # From here on nobody looks into its control block.
        self._is_over = True
        self._scope.worker = None
        self._snapshots.detach(worker)
        worker.close()
        await self._snapshots.settle()

    def poll(self) -> None:
        """Look at the control block: a step that is finished, metrics that are new."""
        if self._is_over:
            return
        step = self._worker.control.read(Word.STEP_DONE)
        at_s = self._clock.unix_s()
        if step >= 0 and (not self.pace.marks or step > self.pace.marks[-1][1]):
            self.pace.note(step, at_s)
            self._feed(WorkerProgressed(incarnation=self._incarnation, step=Step(step), at_s=at_s))
        self._drain(at_s)

    def _drain(self, at_s: float) -> None:
        if not self._names:
            return
        head = self._worker.control.head
        if head == self._metrics_read:
            return
        for step, numbers in self._worker.control.entries(self._metrics_read):
            values = dict(zip(self._names, numbers, strict=False))
            self.loss = values.get("loss", self.loss)
            if self._is_recorder:
                line = MetricsLine(
                    step=Step(step), incarnation=self._incarnation, at_s=at_s, values=values
                )
                self._channel.record(line)
        self._metrics_read = head

    async def _take(self, frame: WorkerFrame) -> None:
        at_s = self._clock.unix_s()
        scope = self._scope
        match frame:
            case Connected():
                scope.start_s = at_s - scope.answered_at_s
            case Restored():
                scope.restored_at_s = at_s
                scope.figures = replace(
                    frame.figures,
                    join_s=scope.answered_at_s - scope.begun_at_s,
                    start_s=scope.start_s,
                )
                self._feed(
                    WorkerRestored(incarnation=self._incarnation, figures=scope.figures, at_s=at_s)
                )
            case PlotAnnounced():
                await self._snapshots.make_slots(frame, self._worker)
            case Captured():
                if scope.hold_armed == frame.step:
                    scope.hold_armed = None
                    self._worker.control.write(Word.HOLD_AFTER, -1)
                self._snapshots.captured(frame)
            case FirstStepDone():
                self._take_first_step(frame, at_s)
            case MetricNames():
                self._names = frame.names
            case Ending():
                self._ending = frame
            case Warmed():
                pass  # Read by its spare; a worker that has an assignment says it no more.
            case _:
                assert_never(frame)

    def _take_first_step(self, frame: FirstStepDone, at_s: float) -> None:
        scope = self._scope
        # Every member has restored, or its collectives would not have finished this step.
        self._snapshots.end_restore()
        if scope.figures is not None:
            scope.figures = replace(
                scope.figures,
                first_step_s=frame.at_s - scope.restored_at_s,
                first_step_at_s=frame.at_s,
            )
        self._feed(WorkerFirstStep(incarnation=self._incarnation, figures=scope.figures, at_s=at_s))

    def _end(self, status: ExitStatus) -> None:
        step = self._worker.control.read(Word.STEP_DONE)
        ending = self._ending
        if ending is None and self._scope.leave_step is not None:
            ending = Ending(kind=EndKind.LEFT, step=self._scope.leave_step)
        self._feed(
            WorkerEnded(
                incarnation=self._incarnation,
                ending=ending,
                code=status.code,
                signal=status.signal,
                step=Step(max(0, step)),
                phase=WorkerPhase(self._worker.control.read(Word.PHASE)),
                at_s=self._clock.unix_s(),
            )
        )


async def bury(following: asyncio.Task[None], timeout_s: float) -> None:
    """Wait for the end of a worker that was killed, within bounds."""
    await asyncio.wait({following}, timeout=timeout_s)
