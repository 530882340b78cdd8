"""What wakes a controller of this machine: files by inotify, ends of agents by pidfd.

Also agents that this process did not start are watched: a pidfd can be had of any process. Their
exit codes are known to their parent alone, so those stay unknown.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from asyncinotify import Event, Inotify, Mask, Watch

from everstep.controller.api.ids import HostId
from everstep.controller.local import identity
from everstep.controller.local.files import TEMPORARY_SUFFIX
from everstep.controller.local.folder import JobFolder
from everstep.controller.local.records import HostRecord
from everstep.controller.local.world import LocalWorld

_MASK = Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.CREATE | Mask.ONLYDIR
_OWN_FILES = frozenset({"directive.json", "progress.json", "events.jsonl", "metrics.jsonl"})
"""Of a job's folder, what only controller and agents write and no decision depends on."""


@dataclass(frozen=True, slots=True)
class _Agent:
    job: str
    host: HostId
    pid: int
    pidfd: int


class LocalWatch:
    """Implements the driver's `Signals` for a `LocalWorld`."""

    def __init__(self, world: LocalWorld) -> None:
        self._world = world
        self._inotify = Inotify(sync_timeout=0)
        self._folders: dict[str, tuple[Watch, ...]] = {}
        self._jobs_of: dict[int, str] = {}
        self._agents: dict[tuple[str, HostId], _Agent] = {}
        self._changed: set[str] = set()
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        world.folder.make()
        self._root = self._inotify.add_watch(world.folder.jobs, _MASK)
        self._loop.add_reader(self._inotify.fd, self._on_files)
        for job in world.jobs():
            self._follow(job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._inotify.fd)
        for agent in list(self._agents.values()):
            self._drop(agent)
        self._inotify.close()

    async def wait(self, timeout_s: float | None) -> frozenset[str]:
        """Wait until something changed; return the jobs it concerns, none when the time is over.

        Blocking: `timeout_s` at most.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        self._wake.clear()
        changed = frozenset(self._changed)
        self._changed.clear()
        return changed

    def wake(self) -> None:
        """Return from `wait` now."""
        self._wake.set()

    def attend(self, job: str) -> None:
        """Watch every agent that the job has now. Called after each pass."""
        living = {record.host: record for record in self._world.living(job)}
        for key, agent in list(self._agents.items()):
            if key[0] == job and (agent.host not in living or living[agent.host].pid != agent.pid):
                # Its end may not have been read yet: then this is where it is.
                self._on_end(agent)
        for record in living.values():
            if (job, record.host) not in self._agents:
                self._add_agent(job, record)

    def _add_agent(self, job: str, record: HostRecord) -> None:
        try:
            pidfd = os.pidfd_open(record.pid)
        except ProcessLookupError:
            self._mark(job)
            return
        if not identity.is_running(record.identity):
            os.close(pidfd)
            self._reap(job, record.host, record.pid)
            self._mark(job)
            return
        agent = _Agent(job, record.host, record.pid, pidfd)
        self._agents[job, record.host] = agent
        self._loop.add_reader(pidfd, self._on_end, agent)

    def _on_end(self, agent: _Agent) -> None:
        self._drop(agent)
        self._reap(agent.job, agent.host, agent.pid)
        self._mark(agent.job)

    def _reap(self, job: str, host: HostId, pid: int) -> None:
        exit_code: int | None = None
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            # An earlier controller started it; whoever inherited it has its exit code.
            pass
        else:
            exit_code = os.waitstatus_to_exitcode(status) if ended else None
        self._world.note_exit(job, host, pid, exit_code)

    def _drop(self, agent: _Agent) -> None:
        if self._agents.get((agent.job, agent.host)) is agent:
            del self._agents[agent.job, agent.host]
            self._loop.remove_reader(agent.pidfd)
            os.close(agent.pidfd)

    def _on_files(self) -> None:
        while (event := self._inotify.sync_get()) is not None:
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        if event.mask & Mask.Q_OVERFLOW or event.watch is None:
            # Events were lost: everything may have changed.
            for job in self._world.jobs():
                self._follow(job)
                self._mark(job)
            return
        name = "" if event.name is None else str(event.name)
        if event.watch is self._root:
            if name and not name.startswith("."):
                self._follow(name)
                self._mark(name)
            return
        owner = self._jobs_of.get(id(event.watch))
        if owner is not None and not name.endswith(TEMPORARY_SUFFIX) and name not in _OWN_FILES:
            self._mark(owner)

    def _follow(self, job: str) -> None:
        """Watch the folders of a job, or stop watching those of one that has gone."""
        for watch in self._folders.pop(job, ()):
            self._jobs_of.pop(id(watch), None)
            with suppress(OSError, KeyError, ValueError):
                self._inotify.rm_watch(watch)
        folder = self._world.folder.job(job)
        if not folder.path.is_dir():
            return
        try:
            folder.make()
            watches = tuple(self._inotify.add_watch(path, _MASK) for path in _watched(folder))
        except OSError:
            # It went away between the two lines; the event of that is on its way.
            return
        self._folders[job] = watches
        for watch in watches:
            self._jobs_of[id(watch)] = job

    def _mark(self, job: str) -> None:
        self._changed.add(job)
        self._wake.set()


def _watched(folder: JobFolder) -> tuple[os.PathLike[str], ...]:
    return (folder.path, folder.reports, folder.capacity)
