"""A local world for tests: a state folder, agents that obey, and eyes of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import structlog
from structlog.testing import CapturingLogger
from structlog.typing import FilteringBoundLogger

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.local import identity
from everstep.controller.local.capacity import take_away
from everstep.controller.local.events import read_events
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.processes import was_started
from everstep.controller.local.world import LocalWorld
from everstep.controller.ops.clock import SystemClock, fresh_uid
from jobs import make_job
from waiting import wait_for

OBEDIENT = (sys.executable, str(Path(__file__).with_name("obedient_agent.py")))
PATIENT = ("/bin/sh", "-c", "exec sleep 1000000", "patient-agent")
"""Stays until it is killed, and is there at once."""


def silent_log() -> FilteringBoundLogger:
    log: FilteringBoundLogger = structlog.wrap_logger(
        CapturingLogger(), wrapper_class=structlog.make_filtering_bound_logger(0), processors=[]
    )
    return log


class LocalRig:
    """The `Rig` of the conformance suite, over a real state folder and real processes."""

    def __init__(
        self,
        root: Path,
        agent_command: tuple[str, ...] = PATIENT,
        world_type: type[LocalWorld] = LocalWorld,
    ) -> None:
        self.folder = StateFolder(root / "state")
        self.agent_command = agent_command
        self.world_type = world_type
        self.clock = SystemClock()
        self.world = self.restart()

    def restart(self) -> LocalWorld:
        """Forget everything that a controller had in memory, as if it had been killed."""
        self.world = self.world_type(
            self.folder,
            agent_command=self.agent_command,
            clock=self.clock,
            log=silent_log(),
        )
        return self.world

    def add_job(self, name: str = "llm", *, root: Path, **options: object) -> str:
        job = make_job(name, folder=root, **options)
        _, record = self.world.store.apply(job, uid=fresh_uid(), now_s=self.clock.unix_s())
        return record.metadata.uid

    def settle(self) -> None:
        for job in self.world.jobs():
            self.world.tend(job)

    def agents(self) -> dict[HostId, tuple[int, ...]]:
        """Every process that carries the mark of this folder, by the host in its mark."""
        found: dict[HostId, tuple[int, ...]] = {}
        for who, mark in identity.find_marked(""):
            _, slice_id, host, root = mark.split(":", 3)
            if root == str(self.folder.root):
                key = HostId(slice=SliceId(int(slice_id)), host=int(host))
                found[key] = (*found.get(key, ()), who.pid)
        return {host: tuple(sorted(found[host])) for host in sorted(found)}

    def kill_agent(self, host: HostId) -> None:
        record = next(r for r in self.world.living("llm") if r.host == host)
        # Before that it is no agent yet, and its end no loss.
        folder = self.folder.job("llm")
        wait_for(lambda: was_started(record, folder), what=f"agent {host} to be one")
        os.killpg(record.pid, signal.SIGKILL)

    def take_capacity(self, slice_id: SliceId) -> None:
        take_away(self.folder, "llm", slice_id, clock=self.clock)

    def events(self) -> list[str]:
        return [event.id for event in read_events(self.folder.job("llm"))]

    def close(self) -> None:
        """End everything that was started, whatever state the test left."""
        for pids in self.agents().values():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for path in self.folder.jobs.glob("*/reclaimers/*.json"):
            path.unlink(missing_ok=True)
