"""The worker's way into the slots of its agent: announce, wait for a grant, copy, say so."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from everstep.controller.api.ids import Step
from everstep.runtime.agent.control import ControlBlock
from everstep.runtime.agent.frames import receive, send
from everstep.runtime.agent.link import (
    AgentFrame,
    Captured,
    PlotAnnounced,
    SlotsGranted,
    SlotsRefused,
    Word,
)
from everstep.runtime.clock import Clock
from everstep.runtime.engine.state import flatten, reflatten
from everstep.runtime.errors import ConfigurationError, InvariantViolated, PeerUnavailable, check
from everstep.runtime.layout.flat import FlatState
from everstep.runtime.layout.scalars import inline_extra
from everstep.runtime.loop.recent import RECENT_STEPS, recent_extra
from everstep.runtime.snapshot.capture import CapturePlan, PlotOutdated
from everstep.runtime.snapshot.slots import SlotWriter

SLOTS_MAX = 64
GRANT_POLL_S = 0.0005
NO_SLOT = -1


class AgentSlots:
    """Captures states into the agent's slots. One per incarnation."""

    def __init__(
        self, sock: socket.socket, control: ControlBlock, clock: Clock, *, grant_timeout_s: float
    ) -> None:
        self._sock = sock
        self._control = control
        self._clock = clock
        self._grant_timeout_s = grant_timeout_s
        self._before: FlatState | None = None
        self._plan: CapturePlan | None = None
        self._writer: SlotWriter | None = None
        self._slot_used = NO_SLOT
        self.metric_names: tuple[str, ...] = ()
        """Of the values in the ring; its last steps go with each capture."""

    def prepare(self, state: Any) -> None:
        """Have slots made for a state of this tree and layout.

        Raises:
            StateRefused: a leaf cannot be stored.
            ConfigurationError: the agent has not enough memory for it; with the figures.

        Blocking: until the agent has made the slots.
        """
        self._announce(flatten(state))

    def _announce(self, flat: FlatState) -> tuple[CapturePlan, SlotWriter]:
        plan = CapturePlan(flat)
        send(self._sock, PlotAnnounced(plot=plan.plot))
        frame, fds = receive(self._sock, AgentFrame, SLOTS_MAX)
        if isinstance(frame, SlotsRefused):
            raise ConfigurationError(
                "spec.checkpoint.snapshot.memory", frame.message, "enough for the slots"
            )
        check(isinstance(frame, SlotsGranted), f"slots were asked for; the agent sent {frame}")
        writer = SlotWriter(fds, frame.size_bytes, plan.plot)
        for fd in fds:
            os.close(fd)
        self._before, self._plan, self._writer = flat.without_values(), plan, writer
        self._slot_used = NO_SLOT
        return plan, writer

    def capture(self, step: Step, state: Any, *, is_required: bool) -> bool:
        """Copy a state into the granted slot; False when none is granted and none is required.

        Raises:
            StateRefused: the tree is another than before; the leaves are named.
            PeerUnavailable: required, and the agent granted no slot before the deadline.
        """
        flat = self._flatten(state)
        plan, writer = self._plan_of(flat)
        slot = self._take_slot(step, is_required=is_required)
        if slot is None:
            return False
        self._control.write(Word.SLOT_WRITING, slot)
        started_s = self._clock.monotonic_s()
        plan.capture(flat, writer.targets(slot))
        copy_s = self._clock.monotonic_s() - started_s
        self._slot_used = slot
        extra = inline_extra(flat.tree) | self._recent()
        send(self._sock, Captured(slot=slot, step=step, copy_s=copy_s, extra=extra))
        self._control.write(Word.SLOT_WRITING, NO_SLOT)
        return True

    def _recent(self) -> dict[str, str]:
        first = max(0, self._control.head - RECENT_STEPS)
        width = len(self.metric_names)
        lines = ((step, values[:width]) for step, values in self._control.entries(first))
        return recent_extra(self.metric_names, lines)

    def _flatten(self, state: Any) -> FlatState:
        if self._before is None:
            raise InvariantViolated("a state was captured before run.restore")
        return reflatten(state, self._before)

    def _plan_of(self, flat: FlatState) -> tuple[CapturePlan, SlotWriter]:
        """The plan and the slots for this layout.

        The user's step function may leave its results elsewhere on the devices than `run.restore`
        put them; the agent then divides its slots anew, once.
        """
        if self._plan is not None and self._writer is not None:
            try:
                self._plan.check_layout(flat)
            except PlotOutdated:
                pass
            else:
                return self._plan, self._writer
        return self._announce(flat)

    def _take_slot(self, step: Step, *, is_required: bool) -> int | None:
        # The word still names the slot of the last capture until the agent has read of it. The
        # agent never grants the newest complete slot, so that number can only be the old grant.
        deadline_s = self._clock.monotonic_s() + self._grant_timeout_s
        while (slot := self._control.read(Word.SLOT_GRANTED)) in (NO_SLOT, self._slot_used):
            if not is_required:
                return None
            if self._clock.monotonic_s() > deadline_s:
                raise PeerUnavailable(
                    f"the agent granted no slot for step {step} within {self._grant_timeout_s:g} s"
                )
            time.sleep(GRANT_POLL_S)
        return slot
