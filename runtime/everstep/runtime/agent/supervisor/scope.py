"""Everything that lives in the name of one incarnation on this host, and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from everstep.controller.api.ids import Incarnation, SliceId, Step
from everstep.controller.api.wire import Directive, RestoreFigures
from everstep.runtime.agent.link import Assignment
from everstep.runtime.agent.supervisor.coordination import Service
from everstep.runtime.agent.supervisor.joining import LeadJoin
from everstep.runtime.agent.supervisor.members import Members
from everstep.runtime.agent.supervisor.programs import WorkerProcess


@dataclass(slots=True, kw_only=True)
class Scope:
    """One incarnation. After `end` nothing of it acts any more."""

    directive: Directive
    members: Members
    note_failure: Callable[[BaseException], None]
    begun_at_s: float
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    join: LeadJoin | None = None
    service: Service | None = None
    assignment: Assignment | None = None
    worker: WorkerProcess | None = None
    serving: asyncio.Task[None] | None = None
    notices: dict[SliceId, float] = field(default_factory=dict[SliceId, float])
    """Lead only: doomed slices by deadline, as members told."""
    answered_at_s: float = 0.0
    restored_at_s: float = 0.0
    start_s: float = 0.0
    figures: RestoreFigures | None = None
    hold_armed: Step | None = None
    hold_leaves: bool = False
    """Whether the armed hold is confirmed: the worker leaves after it."""
    leave_step: Step | None = None
    """The worker is being ended at this step, which memory holds: it counts as having left."""
    is_ended: bool = False

    @property
    def incarnation(self) -> Incarnation:
        return self.directive.incarnation

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run something until it is done or the incarnation ends."""
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._settle)
        return task

    def _settle(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.note_failure(error)

    def end(self) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        if self.worker is not None:
            self.worker.kill()
        for task in set(self.tasks):
            task.cancel()
        if self.join is not None:
            self.join.abandon()
        if self.service is not None:
            self.service.close()
