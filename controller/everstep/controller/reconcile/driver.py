"""Keeps passes going: wakes on what the world says, on what was planned, and on a slow backstop.

One thread. A pass never runs beside another one, so a job's passes are ordered by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from everstep.controller.core.model import World
from everstep.controller.ops.clock import Clock
from everstep.controller.reconcile.queue import Backoff, Queue
from everstep.controller.reconcile.reconciler import Pass, Reconciler, Result

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

BACKSTOP_S = 5.0
"""How often every job is looked at although nothing was heard of it."""


class TendedWorld(World, Protocol):
    """A world in which something goes on by itself that has to be looked after."""

    def tend(self, job: str) -> float | None:
        """Finish what has begun; return when to tend again (Unix seconds), or None."""
        ...


class Signals(Protocol):
    """What a world tells its driver."""

    async def wait(self, timeout_s: float | None) -> frozenset[str]:
        """Wait until something changed; return the jobs it concerns, none when time is over."""
        ...

    def attend(self, job: str) -> None:
        """Be ready for what may happen to a job from now on. Called after each pass over it."""
        ...

    def wake(self) -> None:
        """Make `wait` return now."""
        ...


class Driver:
    """Runs a reconciler over all jobs of a world, until told to stop or idle for long."""

    def __init__(
        self,
        world: TendedWorld,
        reconciler: Reconciler,
        signals: Signals,
        *,
        clock: Clock,
        log: FilteringBoundLogger,
        backoff: Backoff | None = None,
    ) -> None:
        self._world = world
        self._reconciler = reconciler
        self._signals = signals
        self._clock = clock
        self._log = log
        self._queue = Queue(backoff=backoff or Backoff())
        self._busy: set[str] = set()
        self._is_stopping = False

    def stop(self) -> None:
        """Return from `run` after the pass that is running. Agents are left alone (G8)."""
        self._is_stopping = True
        self._signals.wake()

    async def run(self, *, idle_s: float | None = None) -> None:
        """Run until `stop`, or until no job needs a controller for `idle_s` in a row."""
        backstop_s = idle_since_s = self._clock.monotonic_s()
        while not self._is_stopping:
            now_s = self._clock.monotonic_s()
            if now_s >= backstop_s:
                for job in self._world.jobs():
                    self._queue = self._queue.add(job, now_s)
                backstop_s = now_s + BACKSTOP_S
            self._queue, taken = self._queue.take(now_s)
            if taken is not None:
                self._look_at(taken)
                continue
            if self._busy:
                idle_since_s = now_s
            elif idle_s is not None and now_s - idle_since_s >= idle_s:
                return
            due_s = self._queue.next_due_s()
            until_s = backstop_s if due_s is None else min(due_s, backstop_s)
            if idle_s is not None and not self._busy:
                until_s = min(until_s, idle_since_s + idle_s)
            for changed in sorted(await self._signals.wait(max(0.0, until_s - now_s))):
                self._queue = self._queue.add(changed, self._clock.monotonic_s())

    def _look_at(self, job: str) -> None:
        self._busy.add(job)
        try:
            # First what agents wait for, then what nobody waits for.
            outcome = self._reconciler.reconcile(job)
            tend_at_s = self._world.tend(job)
            self._signals.attend(job)
        except Exception as error:  # noqa: BLE001
            # One job that cannot be looked at must not stop the others; this is the place where
            # it is said, and where it is tried again.
            self._log.error("pass failed", job=job, why=str(error), exc_info=error)
            self._queue = self._queue.fail(job, self._clock.monotonic_s())
            return
        self._settle(job, outcome, tend_at_s)

    def _settle(self, job: str, outcome: Pass, tend_at_s: float | None) -> None:
        now_s = self._clock.monotonic_s()
        if outcome.result is Result.GONE:
            self._busy.discard(job)
            self._queue = self._queue.forget(job)
            return
        if outcome.result is Result.CONFLICT:
            # Tried again at once, and later each time, for a conflict can repeat.
            self._queue = self._queue.fail(job, now_s)
            return
        self._queue = self._queue.succeed(job)
        if outcome.requeue_after_s is not None:
            self._queue = self._queue.add(job, now_s + max(outcome.requeue_after_s, 0.001))
        if tend_at_s is not None:
            self._queue = self._queue.add(job, now_s + max(tend_at_s - self._clock.unix_s(), 0.001))
        if outcome.is_settled and tend_at_s is None:
            self._busy.discard(job)
