"""Slices as processes of this machine, with a coordinator on loopback: real workers, no agents.

A test starts a training on some slices, looks at its steps, asks for a hold, and reads what the
slots hold in the end. Everything that it started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step
from everstep.controller.api.wire import Member, MemberHost, RestoreFigures, Settings
from everstep.runtime.agent.control import ControlBlock, create_control_file
from everstep.runtime.agent.coordinator import NotServing, Serve, ServiceFrame
from everstep.runtime.agent.frames import LinkClosed, receive, send
from everstep.runtime.agent.link import (
    ENV_LINK_FD,
    Assignment,
    Captured,
    Ending,
    HoldKind,
    MetricNames,
    PlotAnnounced,
    Restored,
    SlotsGranted,
    SlotsRefused,
    Word,
    WorkerFrame,
)
from everstep.runtime.clock import SystemClock
from everstep.runtime.errors import ConfigurationError, PeerUnavailable
from everstep.runtime.layout.manifest import SnapshotManifest
from everstep.runtime.snapshot.shelf import Shelf

COORDINATOR_PORT = 22000
POLL_S = 0.01


def default_settings() -> Settings:
    """Settings of a job with short time-outs and no durable checkpoints."""
    return Settings(
        checkpoint_uri="",
        checkpoint_every_steps=None,
        checkpoint_every_s=None,
        retention_latest=3,
        retention_every_steps=None,
        snapshot_every_steps=None,
        snapshot_slots=2,
        snapshot_bytes_max=None,
        snapshot_replicas=0,
        report_interval_s=0.5,
        report_timeout_s=4.0,
        progress_timeout_s=60.0,
        join_timeout_s=60.0,
        start_grace_s=120.0,
    )


@dataclass(slots=True, kw_only=True)
class LocalHost:
    """One worker, and what was heard of it."""

    host: HostId
    process: subprocess.Popen[bytes]
    control: ControlBlock
    shelf: Shelf
    ending: Ending | None = None
    restored: RestoreFigures | None = None
    metric_names: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Steps that the worker has finished; -1 before it has a state."""
        return self.control.read(Word.STEP_DONE)

    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics of every step, by the number of finished steps."""
        return {
            step: dict(zip(self.metric_names, values, strict=True))
            for step, values in self.control.entries(0)
        }

    def newest(self) -> SnapshotManifest | None:
        """The newest complete snapshot."""
        return self.shelf.newest()


class LocalSlices:
    """A training on several slices of this machine. Use it as a context.

    Example:
        with LocalSlices([sys.executable, "train.py"], slices=[0, 2]) as world:
            world.wait_until_ended(timeout_s=60)
            losses = world.hosts[0].metrics()
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        slices: Sequence[int],
        devices_per_host: int = 2,
        environment: Mapping[str, str] | None = None,
        snapshot_every_steps: int = 0,
        settings: Settings | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> None:
        """Say what to run; `start` (or entering the context) runs it.

        Args:
            command: a program that calls `es.main`.
            slices: ids of the member slices, one host each, in rank order.
            devices_per_host: CPU devices of each worker.
            environment: on top of this process's own.
            snapshot_every_steps: cadence; 0 captures on request and at the last step only.
            settings: of the job.
            stderr: as for `subprocess.Popen`.
        """
        self._command = tuple(command)
        self._slices = tuple(SliceId(s) for s in slices)
        self._environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices_per_host),
            **(environment or {}),
        }
        self._every_steps = snapshot_every_steps
        self._settings = settings or default_settings()
        self._stderr = stderr
        self._clock = SystemClock()
        # Two worlds of one machine must not meet: each has a network of its own in 127/8.
        self._network = f"127.{64 + secrets.randbelow(128)}.{secrets.randbelow(256)}"
        self._pause = threading.Event()
        self._threads: list[threading.Thread] = []
        self._closing: list[contextlib.AbstractContextManager[object]] = []
        self.hosts: list[LocalHost] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the coordinator, then a worker for each slice. Call it from the main thread."""
        coordinator = self._start_coordinator()
        members = tuple(
            Member(
                slice=s,
                rank=Rank(rank),
                hosts=(MemberHost(host=0, address=self._address(rank), port=0),),
            )
            for rank, s in enumerate(self._slices)
        )
        for rank, s in enumerate(self._slices):
            assignment = Assignment(
                job="local-slices",
                job_uid="local-slices",
                host=HostId(s, 0),
                incarnation=Incarnation(1),
                rank=Rank(rank),
                process_count=len(members),
                members=members,
                coordinator_address=coordinator,
                local_address=self._address(rank),
                token="",
                settings=self._settings,
                restore_step=None,
            )
            self._start_worker(assignment)

    def hold(self, step: int, *, leave: bool) -> None:
        """Ask every worker to hold a step that none has reached, and to leave after it or go on."""
        for one in self.hosts:
            one.control.write(Word.HOLD_KIND, HoldKind.LEAVE if leave else HoldKind.CONTINUE)
            one.control.write(Word.HOLD_AFTER, step)

    def wait_for_step(self, step: int, *, timeout_s: float) -> None:
        """Wait until every worker has finished a step.

        Raises:
            PeerUnavailable: names the hosts that had not, or had ended.
        """
        self._wait(
            lambda one: one.step >= step, timeout_s, what=f"step {step}", may_end_before=False
        )

    def wait_until_ended(self, *, timeout_s: float) -> None:
        """Wait until every worker's process has ended and all its frames are read.

        Raises:
            PeerUnavailable: names the hosts that had not.
        """
        self._wait(lambda one: one.process.poll() is not None, timeout_s, what="the end")
        for thread in self._threads:
            thread.join(timeout_s)

    def close(self) -> None:
        """End every process that was started, and free the slots."""
        for one in self.hosts:
            if one.process.poll() is None:
                one.process.kill()
            one.process.wait()
        for thread in self._threads:
            thread.join()
        for one in self.hosts:
            one.shelf.close()
        while self._closing:
            self._closing.pop().__exit__(None, None, None)

    def _wait(
        self,
        condition: Callable[[LocalHost], bool],
        timeout_s: float,
        *,
        what: str,
        may_end_before: bool = True,
    ) -> None:
        deadline_s = self._clock.monotonic_s() + timeout_s
        while waiting := [one for one in self.hosts if not condition(one)]:
            ended = [one for one in waiting if one.process.poll() is not None]
            if (ended and not may_end_before) or self._clock.monotonic_s() > deadline_s:
                said = "; ".join(f"{one.host} at step {one.step}, {one.ending}" for one in waiting)
                raise PeerUnavailable(f"waited {timeout_s:g} s for {what} of: {said}")
            self._pause.wait(POLL_S)

    def _address(self, rank: int) -> str:
        return f"{self._network}.{rank + 1}"

    def _start_coordinator(self) -> str:
        ours, theirs = socket.socketpair()
        line, service_line = socket.socketpair()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "everstep.runtime.agent.coordinator"),
                *(str(os.getpid()), str(theirs.fileno())),
            ],
            pass_fds=[theirs.fileno()],
            env=self._environment,
            # What jaxlib's service says of each connection is of no use to a test.
            stderr=subprocess.DEVNULL,
        )
        self._closing += [process, contextlib.closing(ours), contextlib.closing(line)]
        order = Serve(
            address=self._address(0),
            port=COORDINATOR_PORT,
            process_count=len(self._slices),
            heartbeat_timeout_s=600,
            register_timeout_s=600,
        )
        send(ours, order, [service_line.fileno()])
        theirs.close()
        service_line.close()
        answer, fds = receive(line, ServiceFrame, 1)
        for fd in fds:
            os.close(fd)
        if isinstance(answer, NotServing):
            raise PeerUnavailable(answer.why)
        return f"{order.address}:{answer.port}"

    def _start_worker(self, assignment: Assignment) -> None:
        ours, theirs = socket.socketpair()
        control_fd = create_control_file()
        control = ControlBlock(control_fd)
        control.write(Word.SNAPSHOT_EVERY, self._every_steps)
        process = subprocess.Popen(
            self._command,
            pass_fds=[theirs.fileno()],
            env={**self._environment, ENV_LINK_FD: str(theirs.fileno())},
            stderr=self._stderr,
        )
        theirs.close()
        send(ours, assignment, [control_fd])
        os.close(control_fd)
        shelf = Shelf(
            host=assignment.host,
            slots=self._settings.snapshot_slots,
            bytes_max=self._settings.snapshot_bytes_max,
            namespace=f"local-{assignment.host.slice}-{secrets.token_hex(4)}",
        )
        one = LocalHost(host=assignment.host, process=process, control=control, shelf=shelf)
        thread = threading.Thread(target=self._serve, args=(one, ours), daemon=True)
        thread.start()
        self.hosts.append(one)
        self._threads.append(thread)

    def _serve(self, one: LocalHost, sock: socket.socket) -> None:
        """What an agent does for its worker, as far as a test needs it."""
        with sock, contextlib.suppress(LinkClosed):
            while True:
                frame, _ = receive(sock, WorkerFrame)
                match frame:
                    case PlotAnnounced():
                        self._grant_slots(one, sock, frame)
                    case Captured():
                        asyncio.run(
                            one.shelf.complete(
                                frame.slot, Step(frame.step), Incarnation(1), frame.extra
                            )
                        )
                        self._grant_next(one)
                    case MetricNames():
                        one.metric_names = frame.names
                    case Restored():
                        one.restored = frame.figures
                    case Ending():
                        one.ending = frame
                    case _:
                        continue

    def _grant_slots(self, one: LocalHost, sock: socket.socket, frame: PlotAnnounced) -> None:
        one.control.write(Word.SLOT_GRANTED, -1)
        try:
            fds = one.shelf.allocate(frame.plot)
        except ConfigurationError as error:
            send(sock, SlotsRefused(message=str(error)))
            return
        self._grant_next(one)
        send(sock, SlotsGranted(count=len(fds), size_bytes=one.shelf.slot_size_bytes), fds)

    def _grant_next(self, one: LocalHost) -> None:
        slot = one.shelf.grant()
        one.control.write(Word.SLOT_GRANTED, -1 if slot is None else slot)
