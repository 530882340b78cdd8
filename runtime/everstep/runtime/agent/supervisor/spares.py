"""A worker that was forked ahead of time, and waits warm for its assignment.

What it saves is the fork with its page faults, and what jax loads at its first trace. It belongs to
no incarnation: it has run nothing of the user's `train` and opened no device. A spare that is not
surely fit is thrown away, and a worker is forked as if there had been none.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.runtime.agent.frames import LinkClosed
from everstep.runtime.agent.link import Warmed, WarmUp

if TYPE_CHECKING:
    from everstep.runtime.agent.supervisor.programs import ExitStatus, WorkerProcess


class Spare:
    """One spare, from its fork to the moment when it becomes a worker or is thrown away."""

    def __init__(self, worker: WorkerProcess, patience_s: float) -> None:
        self._worker = worker
        self._patience_s = patience_s
        self.is_warm = False
        self._warming = asyncio.create_task(self._warm(), name="spare")

    async def _warm(self) -> None:
        link = self._worker.link
        await link.send(WarmUp(patience_s=self._patience_s))
        with contextlib.suppress(LinkClosed):
            self.is_warm = isinstance(await link.receive(), Warmed)

    @property
    def ended(self) -> ExitStatus | None:
        """How it ended by itself; None while it lives."""
        exited = self._worker.exited
        return exited.result() if exited.done() else None

    def suits(self, patience_s: float) -> bool:
        """Whether it lives, and was or is being warmed up for such settings."""
        return self.ended is None and self._patience_s == patience_s

    def take(self, patience_s: float) -> WorkerProcess | None:
        """The worker, if it is fit to be assigned now. Otherwise it is thrown away."""
        if self.is_warm and self.suits(patience_s) and is_running(self._worker.pid):
            return self._worker
        self.discard()
        return None

    def discard(self) -> None:
        """Kill it. Its zygote reaps it."""
        self._warming.cancel()
        self._worker.kill()
        self._worker.close()


def is_running(pid: int) -> bool:
    """Whether a process is there and was not stopped by a signal or a debugger."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name before it is in brackets and may contain anything.
    return stat.rpartition(")")[2].split()[0] in ("R", "S", "D")
