"""The state folder of one job as the `View` that the core plans on. Reads, and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.wire import WIRE_VERSION, Directive, Report
from everstep.controller.core.model import (
    Capacity,
    HostView,
    Notice,
    ProcessState,
    SliceView,
    View,
)
from everstep.controller.local import identity
from everstep.controller.local.addresses import host_address
from everstep.controller.local.errors import RecordCorrupt
from everstep.controller.local.folder import JobFolder
from everstep.controller.local.processes import load_host, recorded_hosts, was_started
from everstep.controller.local.records import (
    CapacityRecord,
    HostRecord,
    JobRecord,
    NoticeRecord,
    load,
)
from everstep.controller.ops.clock import Clock

T = TypeVar("T", bound=msgspec.Struct)

SETTLED_S = 0.1
"""Younger files are read each time: within one tick of the file system's clock an inode may be
freed and used again, and two contents look the same."""

CLOCK_SLACK_S = 1.0
"""A report may be dated this much before its process was recorded: two clocks are read."""


class Tolerance:
    """Remembers the last good content of each file, and says once when one turned to garbage.

    A file that did not change is not read again: each is replaced as a whole, so another content
    is another inode, or another time.
    """

    def __init__(self, say: Callable[[RecordCorrupt], None], clock: Clock) -> None:
        self._say = say
        self._clock = clock
        self._good: dict[str, msgspec.Struct] = {}
        self._said: dict[str, str] = {}
        self._read_at: dict[str, tuple[int, int, int]] = {}

    def load(self, path: Path, read: Callable[[], T | None]) -> T | None:
        """Return what `read` returns; the last good content while it raises `RecordCorrupt`.

        Args:
            path: of the file that `read` reads. A path is always read as the same type.
            read: reads and decodes it.
        """
        name = str(path)
        try:
            at = os.stat(name)
        except (FileNotFoundError, NotADirectoryError):
            self._forget(name)
            return None
        looks = (at.st_ino, at.st_mtime_ns, at.st_size)
        if self._read_at.get(name) == looks:
            return cast("T | None", self._good.get(name))
        self._read_at.pop(name, None)
        try:
            found = read()
        except RecordCorrupt as error:
            if self._said.get(name) != error.why:
                self._said[name] = error.why
                self._say(error)
            return cast("T | None", self._good.get(name))
        self._said.pop(name, None)
        if found is None:
            self._forget(name)
            return None
        self._good[name] = found
        if self._clock.unix_s() - at.st_mtime > SETTLED_S:
            self._read_at[name] = looks
        return found

    def forget_below(self, folder: Path) -> None:
        """Forget all files of a job that was removed."""
        prefix = f"{folder}/"
        for name in [name for name in (*self._good, *self._said) if name.startswith(prefix)]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._good.pop(name, None)
        self._said.pop(name, None)
        self._read_at.pop(name, None)


def observe_job(record: JobRecord, folder: JobFolder, tolerance: Tolerance) -> View:
    """Look at everything of a job anew."""
    hosts_per_slice = record.spec.slices.hosts_per_slice
    records = {host: _host_record(folder, host, tolerance) for host in recorded_hosts(folder)}
    surplus = {
        host.slice
        for host, found in records.items()
        if host.slice >= record.spec.slices.count_max
        and found is not None
        and process_state(found, folder) is not ProcessState.ABSENT
    }
    numbers = [*range(record.spec.slices.count_max), *sorted(surplus)]
    return View(
        job=record.metadata.name,
        job_uid=record.metadata.uid,
        generation=record.metadata.generation,
        spec=record.spec,
        is_deleting=record.metadata.deleted_at is not None,
        slices=tuple(
            _slice_view(record, folder, SliceId(n), hosts_per_slice, records, tolerance)
            for n in numbers
        ),
        directive=load_directive(folder, record.metadata.uid, tolerance),
        created_at_s=record.metadata.created_at,
    )


def process_state(record: HostRecord, folder: JobFolder) -> ProcessState:
    """Return what is known of an agent's process without asking it."""
    if identity.is_running(record.identity):
        return ProcessState.ALIVE
    if record.stop_by_s is not None:
        # It was told to end, and has: nothing about it is of interest any more.
        return ProcessState.ABSENT
    if record.exited_at is None and not was_started(record, folder):
        # The controller was killed between the record and the start: it never was an agent.
        return ProcessState.ABSENT
    return ProcessState.EXITED


def load_directive(folder: JobFolder, job_uid: str, tolerance: Tolerance) -> Directive | None:
    """Read the directive that agents can read now."""
    found = tolerance.load(folder.directive, lambda: load(folder.directive, Directive))
    return found if found is not None and found.job_uid == job_uid else None


def load_report(
    folder: JobFolder, record: HostRecord, tolerance: Tolerance | None = None
) -> Report | None:
    """Read the newest report of exactly this agent process."""
    path = folder.report(record.host)
    if tolerance is None:
        try:
            found = load(path, Report)
        except RecordCorrupt:
            return None
    else:
        found = tolerance.load(path, lambda: load(path, Report))
    if (
        found is None
        or found.version != WIRE_VERSION
        or found.job_uid != record.job_uid
        or found.host != record.host
        or found.pid != record.pid
        or found.renewed_at_s < record.started_at - CLOCK_SLACK_S
    ):
        return None
    return found


def _host_record(folder: JobFolder, host: HostId, tolerance: Tolerance) -> HostRecord | None:
    return tolerance.load(folder.host(host), lambda: load_host(folder, host))


def _slice_view(
    record: JobRecord,
    folder: JobFolder,
    slice_id: SliceId,
    hosts_per_slice: int,
    records: dict[HostId, HostRecord | None],
    tolerance: Tolerance,
) -> SliceView:
    path = folder.slice_capacity(slice_id)
    found = tolerance.load(path, lambda: load(path, CapacityRecord))
    granted = found or CapacityRecord(since_s=record.metadata.created_at)
    hosts = [HostId(slice=slice_id, host=n) for n in range(hosts_per_slice)]
    is_available = granted.state is Capacity.AVAILABLE
    return SliceView(
        id=slice_id,
        capacity=granted.state,
        notice=_notice(slice_id, granted.notice) if is_available else None,
        hosts=tuple(
            _host_view(record, folder, host, records.get(host), tolerance) for host in hosts
        ),
        available_since_s=granted.since_s if is_available else None,
    )


def _notice(slice_id: SliceId, announced: NoticeRecord | None) -> Notice | None:
    if announced is None:
        return None
    return Notice(
        id=announced.id,
        slice=slice_id,
        notice_class=announced.notice_class,
        deadline_s=announced.deadline_s,
        first_seen_s=announced.first_seen_s,
    )


def _host_view(
    record: JobRecord,
    folder: JobFolder,
    host: HostId,
    found: HostRecord | None,
    tolerance: Tolerance,
) -> HostView:
    state = ProcessState.ABSENT if found is None else process_state(found, folder)
    if found is None or state is ProcessState.ABSENT:
        return HostView(
            host=host.host,
            process=ProcessState.ABSENT,
            started_for=None,
            address=host_address(record.metadata.number, host),
            port=record.spec.runtime.agent_port,
        )
    has_exited = state is ProcessState.EXITED
    return HostView(
        host=host.host,
        process=state,
        started_for=found.started_for,
        address=found.address,
        port=found.port,
        exit_code=found.exit_code if has_exited else None,
        exited_at_s=found.exited_at if has_exited else None,
        report=load_report(folder, found, tolerance),
    )
