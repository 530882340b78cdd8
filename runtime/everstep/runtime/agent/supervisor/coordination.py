"""The lead's side of JAX's coordination service: a forker kept ready, one service at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from everstep.runtime.agent.coordinator import NotServing, Serve, ServiceFrame, Serving
from everstep.runtime.agent.frames import FrameStream, LinkClosed, send
from everstep.runtime.errors import PeerUnavailable

# A backstop only: members are watched by their agents, and a long compile starves heartbeats.
SERVICE_TIMEOUT_S = 600


class Service:
    """One running coordination service."""

    def __init__(self, line: FrameStream[ServiceFrame], pid: int, pidfd: int, port: int) -> None:
        self._line = line
        self.pid = pid
        self.port = port
        self._pidfd = pidfd
        self._is_closed = False

    async def lost(self) -> None:
        """Return when the service has ended."""
        with contextlib.suppress(LinkClosed):
            while True:
                await self._line.receive()

    def close(self) -> None:
        """End the service. Its port is free a moment later."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._line.close()
        os.close(self._pidfd)


class Coordination:
    """Starts coordination services out of a process that has imported jaxlib already."""

    def __init__(
        self, log: FilteringBoundLogger, note_forker: Callable[[int], None] | None = None
    ) -> None:
        self._log = log
        self._note_forker = note_forker
        self._forker: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._port_last: int | None = None

    @property
    def own_pids(self) -> frozenset[int]:
        return frozenset() if self._forker is None else frozenset({self._forker.pid})

    def warm(self) -> None:
        """Start the forker unless it runs."""
        if self._forker is not None and self._forker.poll() is None:
            return
        self._end_forker()
        ours, theirs = socket.socketpair()
        with theirs:
            self._forker = subprocess.Popen(
                [
                    *(sys.executable, "-m", "everstep.runtime.agent.coordinator"),
                    *(str(os.getpid()), str(theirs.fileno())),
                ],
                # A line for each connection is too much; errors are enough.
                env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._sock = ours
        if self._note_forker is not None:
            self._note_forker(self._forker.pid)

    async def serve(
        self, *, address: str, port: int, process_count: int, timeout_s: float
    ) -> Service:
        """Start a service for one incarnation, on `port` or the next free one.

        One that is killed before it serves is started once more, by a new forker.

        Raises:
            PeerUnavailable: it did not come up within `timeout_s`; why, in words.
        """
        order = Serve(
            address=address,
            port=port,
            process_count=process_count,
            heartbeat_timeout_s=SERVICE_TIMEOUT_S,
            register_timeout_s=SERVICE_TIMEOUT_S,
        )
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._serve(order)
                except LinkClosed:
                    self._log.warning("the coordination service ended at its start; once more")
                    self._end_forker()
                    return await self._serve(order)
        except (LinkClosed, TimeoutError) as error:
            raise PeerUnavailable(
                f"the coordination service did not come up on {address}:{port}"
            ) from error

    async def _serve(self, order: Serve) -> Service:
        self.warm()
        ours, theirs = socket.socketpair()
        line: FrameStream[ServiceFrame] = FrameStream(ours, ServiceFrame)
        try:
            with theirs:
                # A few bytes into an empty buffer: this does not wait.
                if self._sock is not None:
                    send(self._sock, order, [theirs.fileno()])
            frame = await line.receive()
        except (LinkClosed, asyncio.CancelledError):
            line.close()
            raise
        if isinstance(frame, NotServing):
            line.close()
            raise PeerUnavailable(f"no coordination service: {frame.why}")
        return self._adopt(line, frame, order.address, order.port)

    def _adopt(
        self, line: FrameStream[ServiceFrame], frame: Serving, address: str, port: int
    ) -> Service:
        # The service of the last incarnation may not have let go of its port yet; that is no news.
        is_own = self._port_last == port
        self._port_last = frame.port
        if frame.port != port and not is_own:
            self._log.warning(
                "coordinator port is taken; another is used",
                address=address,
                taken=port,
                used=frame.port,
            )
        return Service(line, frame.pid, line.take_descriptor(), frame.port)

    def _end_forker(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._forker is not None:
            self._forker.kill()
            self._forker.wait()
            self._forker = None

    def close(self) -> None:
        """End the forker, and with it every service. Blocking: until it is reaped."""
        self._end_forker()
