"""A keeper that has an agent: restores from what the assignment names, captures into its slots."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from everstep.controller.api.ids import Step
from everstep.controller.api.wire import RestoreFigures
from everstep.runtime.agent.control import ControlBlock
from everstep.runtime.agent.frames import send
from everstep.runtime.agent.link import Assignment, FirstStepDone, MetricNames, Restored
from everstep.runtime.clock import Clock
from everstep.runtime.engine.placement import with_shardings
from everstep.runtime.engine.state import flatten
from everstep.runtime.loop.recent import recent_lines
from everstep.runtime.loop.slots import AgentSlots

RESTORE_BYTES_IN_FLIGHT = 1 << 30
GRANT_TIMEOUT_MAX_S = 30.0


class LinkedKeeper:
    """Implements `Keeper` over the link and the control block of one worker."""

    def __init__(
        self,
        assignment: Assignment,
        sock: socket.socket,
        control: ControlBlock,
        own_slot_fds: Sequence[int],
        clock: Clock,
    ) -> None:
        self.failure: BaseException | None = None
        self._assignment = assignment
        self._sock = sock
        self._control = control
        self._extra: Mapping[str, str] = {}
        self._restores = 0
        self._own_slot_fds = own_slot_fds
        self._clock = clock
        timeout_s = min(GRANT_TIMEOUT_MAX_S, assignment.settings.progress_timeout_s / 2)
        self._slots = AgentSlots(sock, control, clock, grant_timeout_s=timeout_s)

    def restore(
        self, abstract: Any, shardings: list[Any], build_fresh: Callable[[], Any]
    ) -> tuple[Any, Step | None]:
        """See `Keeper.restore`."""
        started_s = self._clock.monotonic_s()
        step = self._assignment.restore_step
        if step is None:
            state = build_fresh()
            figures = RestoreFigures(
                incarnation=self._assignment.incarnation, step=Step(0), source="fresh"
            )
        else:
            state, figures = self._restore_held(abstract, shardings)
        self._release_own_slots()
        restore_s = self._clock.monotonic_s() - started_s
        send(self._sock, Restored(figures=_with_restore_s(figures, restore_s)))
        self._slots.prepare(state)
        return state, step

    def _restore_held(self, abstract: Any, shardings: list[Any]) -> tuple[Any, RestoreFigures]:
        # Fetching and verifying brings a few libraries; a fresh start does without them.
        from everstep.runtime.engine.channel import open_channel
        from everstep.runtime.engine.exchanging import exchanging
        from everstep.runtime.engine.talk import Talk
        from everstep.runtime.restore.assemble import restore_state

        own = {
            holding: memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
            for holding, fd in zip(self._assignment.own_slots, self._own_slot_fds, strict=True)
        }
        assignment = self._assignment
        # What is read from storage is read once, whoever needs it. Who does not come is not
        # waited for as long as it takes until it is found to hang.
        channel = open_channel(f"restore/{assignment.incarnation}")
        self._restores += 1
        with exchanging(
            Talk(channel, self._clock),
            f"{self._restores}/step/{assignment.restore_step}",
            assignment.settings.progress_timeout_s / 2,
            address=assignment.local_address,
            clock=self._clock,
        ) as exchange:
            state, figures, self._extra = restore_state(
                flatten(with_shardings(abstract, shardings)),
                shardings,
                assignment=assignment,
                own_slots=own,
                memory_bytes=RESTORE_BYTES_IN_FLIGHT,
                exchange=exchange,
            )
        return state, figures

    def _release_own_slots(self) -> None:
        for fd in self._own_slot_fds:
            os.close(fd)
        self._own_slot_fds = ()

    def capture(self, step: Step, state: Any, *, is_required: bool) -> bool:
        """See `Keeper.capture`."""
        return self._slots.capture(step, state, is_required=is_required)

    def note_first_step(self, step: Step) -> None:
        """See `Keeper.note_first_step`."""
        send(self._sock, FirstStepDone(step=step, at_s=self._clock.unix_s()))

    def name_metrics(self, names: tuple[str, ...]) -> None:
        """See `Keeper.name_metrics`."""
        send(self._sock, MetricNames(names=names))
        self._slots.metric_names = names
        for step, values in recent_lines(self._extra, names):
            self._control.record(step, values)

    def close(self) -> None:
        """See `Keeper.close`: the agent owns every captured step already."""


def _with_restore_s(figures: RestoreFigures, restore_s: float) -> RestoreFigures:
    return msgspec.structs.replace(figures, restore_s=restore_s)
