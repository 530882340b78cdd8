"""Where everything lies in the state folder, and the lock that orders its writers."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.local.errors import FolderBusy
from everstep.controller.ops.clock import SystemClock, pause

LOCK_PATIENCE_S = 20.0
"""Writers hold the lock for milliseconds; whoever holds it this long is stopped or stuck."""


@dataclass(frozen=True, slots=True)
class JobFolder:
    """Paths of one job. Building one touches nothing."""

    path: Path

    @property
    def record(self) -> Path:
        return self.path / "job.json"

    @property
    def progress(self) -> Path:
        return self.path / "progress.json"

    @property
    def directive(self) -> Path:
        return self.path / "directive.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def reports(self) -> Path:
        return self.path / "reports"

    @property
    def hosts(self) -> Path:
        return self.path / "hosts"

    @property
    def capacity(self) -> Path:
        return self.path / "capacity"

    @property
    def reclaimers(self) -> Path:
        return self.path / "reclaimers"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def report(self, host: HostId) -> Path:
        return self.reports / f"{host.slice}-{host.host}.json"

    def host(self, host: HostId) -> Path:
        return self.hosts / f"{host.slice}-{host.host}.json"

    def started(self, host: HostId) -> Path:
        """Written by the agent's process itself, right before it becomes the agent."""
        return self.hosts / f"{host.slice}-{host.host}.started"

    def log(self, host: HostId) -> Path:
        return self.logs / f"{host.slice}-{host.host}.log"

    def slice_capacity(self, slice_id: SliceId) -> Path:
        return self.capacity / f"{slice_id}.json"

    def reclaimer(self, slice_id: SliceId) -> Path:
        return self.reclaimers / f"{slice_id}.json"

    def make(self) -> None:
        """Make the folders that are there as long as the job is."""
        for folder in (self.reports, self.hosts, self.capacity, self.reclaimers, self.logs):
            folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class StateFolder:
    """Paths of the state folder. Building one touches nothing."""

    root: Path

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def controller_lock(self) -> Path:
        return self.root / "controller.lock"

    @property
    def controller_log(self) -> Path:
        return self.root / "controller.log"

    @property
    def write_lock(self) -> Path:
        return self.root / "write.lock"

    def job(self, name: str) -> JobFolder:
        return JobFolder(self.jobs / name)

    def removed(self, uid: str) -> Path:
        """Where the records of a job go on their way out; nobody sees a job there."""
        return self.jobs / f".removed-{uid}"

    def job_names(self) -> tuple[str, ...]:
        """Names of all jobs, sorted."""
        try:
            entries = list(os.scandir(self.jobs))
        except FileNotFoundError:
            return ()
        return tuple(
            sorted(entry.name for entry in entries if entry.is_dir() and entry.name[0] != ".")
        )

    def make(self) -> None:
        self.jobs.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def writing(self) -> Generator[None]:
        """Hold the lock under which a precondition is compared and the new content written.

        It is not re-entrant.

        Raises:
            FolderBusy: somebody else held it for `LOCK_PATIENCE_S`.

        Blocking: usually not at all, for `LOCK_PATIENCE_S` at most.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.write_lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock_within(fd, self.write_lock, LOCK_PATIENCE_S)
            yield
        finally:
            # Closing releases the lock, and so does the death of this process.
            os.close(fd)


def try_lock(fd: int) -> bool:
    """Take the lock of an open file if it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_holder(path: Path) -> int | None:
    """Return the process that holds the lock of a file, as the kernel knows it."""
    try:
        inode = path.stat().st_ino
        table = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return None
    for line in table.splitlines():
        fields = line.split()
        # `1: FLOCK ADVISORY WRITE <pid> <major>:<minor>:<inode> 0 EOF`; a waiter has `->` first.
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            return int(fields[4])
    return None


def _lock_within(fd: int, path: Path, patience_s: float) -> None:
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + patience_s
    pause_s = 0.0005
    while not try_lock(fd):
        if clock.monotonic_s() >= deadline_s:
            raise FolderBusy(path, lock_holder(path))
        pause(pause_s)
        pause_s = min(pause_s * 2, 0.02)
