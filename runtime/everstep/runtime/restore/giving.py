"""Parts of chunks on their way out: one thread for each process that gets some.

A chunk's memory is lent to all who get parts of it, and given back when the last of them has
taken his; so much memory is on loan at most. A process that does not take what it gets within
the deadline gets nothing more, and its part of the memory is free again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from everstep.runtime.errors import PeerUnavailable
from everstep.runtime.restore.handover import Header, Kind, Wire


class Budget:
    """Bytes that may be on loan at once; what is larger than all of it goes alone."""

    def __init__(self, size_bytes: int) -> None:
        self._free = self._all = size_bytes
        self._changed = threading.Condition()

    def try_take(self, size_bytes: int) -> bool:
        with self._changed:
            if size_bytes > self._free and self._free < self._all:
                return False
            self._free -= size_bytes
            return True

    def take(self, size_bytes: int) -> None:
        """Blocking: until others have given enough back, for which they have a deadline."""
        with self._changed:
            self._changed.wait_for(lambda: size_bytes <= self._free or self._free == self._all)
            self._free -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._changed:
            self._free += size_bytes
            self._changed.notify_all()


class Loan:
    """Memory that several have borrowed. It is made with one borrower, its maker."""

    def __init__(self, budget: Budget, size_bytes: int) -> None:
        self._budget, self._size_bytes = budget, size_bytes
        self._borrowers = 1
        self._lock = threading.Lock()

    def borrow(self) -> None:
        with self._lock:
            self._borrowers += 1

    def give_back(self) -> None:
        with self._lock:
            self._borrowers -= 1
            is_last = self._borrowers == 0
        if is_last:
            self._budget.give_back(self._size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gift:
    """A part of a chunk for one process; nothing when the chunk could not be read."""

    chunk: int
    part: int
    values: NDArray[Any] | None = None
    loan: Loan | None = None

    def done(self) -> None:
        if self.loan is not None:
            self.loan.give_back()


@dataclass(slots=True)
class Sender:
    """Gives one process its parts, in order."""

    process: int
    connect: Callable[[int], Wire]
    """Goes there; raises `PeerUnavailable`."""
    progress: Callable[[], int]
    """Grows as long as this process gets on with its own work."""
    lost: Callable[[int, str], None]
    """Told when the process gets nothing more, and why."""
    deadline_s: float
    _queue: queue.SimpleQueue[Gift | None] = field(default_factory=queue.SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wire: Wire | None = None
    _is_over: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="everstep-give", daemon=True)
        self._thread.start()

    def put(self, gift: Gift | None) -> None:
        """Send this next; None: that was all. Never waits."""
        with self._lock:
            if not self._is_over:
                self._queue.put(gift)
                return
        if gift is not None:
            gift.done()

    def join(self) -> None:
        """Blocking: until all was taken or given up. Each wait on the process has a deadline."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """End now: the process gets nothing more, and sees it, also if it is still gone to."""
        with self._lock:
            self._is_over = True
            with contextlib.suppress(queue.Empty):
                while True:
                    gift = self._queue.get_nowait()
                    if gift is not None:
                        gift.done()
            # Wakes the thread up if it waits for the next one.
            self._queue.put(None)
            wire = self._wire
        if wire is not None:
            wire.close()

    def _run(self) -> None:
        try:
            wire = self.connect(self.process)
            with self._lock:
                self._wire = wire
            told = self.progress()
            while True:
                try:
                    gift = self._queue.get(timeout=self.deadline_s / 4)
                except queue.Empty:
                    now = self.progress()
                    if now != told:
                        told = now
                        wire.tell(Header(Kind.ALIVE))
                    continue
                if gift is not None:
                    self._send(wire, gift)
                elif self._is_over:
                    break
                else:
                    wire.tell(Header(Kind.DONE))
                    break
        except PeerUnavailable as error:
            self.lost(self.process, str(error))
        finally:
            self.stop()

    def _send(self, wire: Wire, gift: Gift) -> None:
        try:
            if gift.values is None:
                wire.tell(Header(Kind.REFUSED, gift.chunk, gift.part))
            else:
                wire.give(gift.chunk, gift.part, gift.values)
        finally:
            gift.done()
