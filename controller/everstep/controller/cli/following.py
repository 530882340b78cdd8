"""Waiting for the state folder to change, in a command that has nothing else to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from asyncinotify import Inotify, Mask

from everstep.controller.local.folder import StateFolder

_MASK = Mask.MOVED_TO | Mask.CREATE | Mask.DELETE | Mask.MODIFY | Mask.ONLYDIR
BACKSTOP_S = 1.0


class Follower:
    """Wakes when anything of a job changes, or of any job."""

    def __init__(self, folder: StateFolder, name: str | None) -> None:
        self._folder = folder
        self._name = name
        self._inotify = Inotify(sync_timeout=BACKSTOP_S)
        folder.make()
        self._inotify.add_watch(folder.jobs, _MASK)
        self._watch_jobs()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._inotify.close()

    def wait(self, timeout_s: float | None) -> None:
        """Return when something changed, or the time is over; a backstop wakes once a second."""
        self._inotify.sync_timeout = BACKSTOP_S if timeout_s is None else min(timeout_s, BACKSTOP_S)
        event = self._inotify.sync_get()
        self._inotify.sync_timeout = 0
        is_new = False
        while event is not None:
            is_new |= bool(event.mask & Mask.CREATE)
            event = self._inotify.sync_get()
        if is_new:
            self._watch_jobs()

    def until(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until a condition holds; return False when the time is over before."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return False
            self.wait(left_s)
        return True

    def _watch_jobs(self) -> None:
        names = self._folder.job_names() if self._name is None else (self._name,)
        for name in names:
            job = self._folder.job(name)
            for path in (job.path, job.reports, job.logs):
                # It may be gone by now, or not be there yet; then its creation wakes us.
                with suppress(OSError):
                    self._inotify.add_watch(path, _MASK)
