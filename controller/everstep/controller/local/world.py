"""One machine as a `World`: what `core.model.World` promises, kept with files and processes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.reasons import TABLE
from everstep.controller.api.status import JobStatus, Phase
from everstep.controller.core.ledger import Ledger
from everstep.controller.core.model import (
    Action,
    Capacity,
    EmitEvent,
    Observation,
    ProcessState,
    RemoveJob,
    StartSlice,
    StopSlice,
    WriteDirective,
)
from everstep.controller.local import identity
from everstep.controller.local.agents import spawn_order
from everstep.controller.local.capacity import (
    end_reclaimer,
    kill,
    load_capacity,
    place_of,
    take_away,
)
from everstep.controller.local.errors import NotFound, RecordCorrupt
from everstep.controller.local.events import EventLog
from everstep.controller.local.files import write_soft
from everstep.controller.local.folder import JobFolder, StateFolder
from everstep.controller.local.identity import Place
from everstep.controller.local.observe import (
    Tolerance,
    load_directive,
    observe_job,
    process_state,
)
from everstep.controller.local.processes import (
    ask_to_stop,
    end_rest,
    enforce_stop,
    forget,
    load_host,
    recorded_hosts,
    spawn,
)
from everstep.controller.local.records import (
    EventRecord,
    HostRecord,
    JobRecord,
    encode,
    with_progress,
)
from everstep.controller.local.store import Store
from everstep.controller.ops.clock import Clock

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

RECLAIMER_SLACK_S = 0.5
"""How long after a deadline the controller leaves the slice to its reclaimer."""

FINISHED = frozenset({Phase.SUCCEEDED, Phase.FAILED})


class LocalWorld:
    """Implements `core.model.World` and what the driver needs beside it (`tend`).

    Used from one thread of one process, the one that holds the controller's lock.
    """

    def __init__(
        self,
        folder: StateFolder,
        *,
        agent_command: tuple[str, ...],
        clock: Clock,
        log: FilteringBoundLogger,
    ) -> None:
        self.folder = folder
        self.store = Store(folder)
        self._agent_command = agent_command
        self._clock = clock
        self._log = log
        self._tolerance = Tolerance(say=self._say_garbage, clock=clock)
        self._events: dict[str, EventLog] = {}

    def jobs(self) -> tuple[str, ...]:
        return self.store.names()

    def observe(self, job: str) -> Observation | None:
        folder = self.folder.job(job)
        record = self._look_up(job)
        if record is None:
            return None
        return Observation(
            view=observe_job(record, folder, self._tolerance),
            ledger=record.ledger,
            status=record.status,
            precondition=record.precondition,
        )

    def persist(self, job: str, ledger: Ledger, status: JobStatus, precondition: str) -> str | None:
        return self.store.persist(job, ledger, status, precondition)

    def note_progress(self, job: str, status: JobStatus, precondition: str) -> bool:
        return self.store.note_progress(job, status, precondition)

    def perform(self, job: str, action: Action) -> None:
        match action:
            case StartSlice():
                self._start(job, action)
            case StopSlice():
                self._stop(job, action)
            case WriteDirective():
                self._write_directive(job, action)
            case EmitEvent():
                self._emit(job, action)
            case RemoveJob():
                self._remove(job)
            case _:
                assert_never(action)

    def tend(self, job: str) -> float | None:
        """Finish what has begun: stops whose grace is over, ended agents, overdue reclaimers.

        Returns:
            When to tend again although nothing is seen to change; Unix seconds.
        """
        record = self._look_up(job)
        if record is None:
            return None
        due = [
            *self._tend_hosts(self.folder.job(job), record.status.phase),
            *self._tend_notices(job, record),
        ]
        return min(due, default=None)

    def note_exit(self, job: str, host: HostId, pid: int, exit_code: int | None) -> None:
        """Record that an agent ended, and with which code if that is known."""
        folder = self.folder.job(job)
        with self.folder.writing():
            record = self._load_host(folder, host)
            if record is None or record.pid != pid or record.exited_at is not None:
                return
            ended = replace(record, exit_code=exit_code, exited_at=self._clock.unix_s())
            write_soft(folder.host(host), encode(ended))

    def living(self, job: str) -> tuple[HostRecord, ...]:
        """Return the records of all agents of a job that have not ended."""
        folder = self.folder.job(job)
        records = (self._load_host(folder, host) for host in recorded_hosts(folder))
        return tuple(r for r in records if r is not None and identity.is_running(r.identity))

    def _start(self, job: str, action: StartSlice) -> None:
        folder = self.folder.job(job)
        # Under the lock: a slice that is being taken away is seen as gone here, or its reclaimer
        # sees the process that is started here.
        with self.folder.writing():
            record = self._read(job)
            if record is None:
                return
            granted = load_capacity(folder, action.slice)
            if granted is not None and granted.state is Capacity.GONE:
                self._log.info("slice not started", job=job, slice=action.slice, why="it is gone")
                return
            for number in range(record.spec.slices.hosts_per_slice):
                host = HostId(slice=action.slice, host=number)
                found = self._load_host(folder, host)
                if found is not None:
                    if identity.is_running(found.identity):
                        continue
                if folder.host(host).exists():
                    # Also with an unreadable record: two agents of one host never live at once.
                    end_rest(Place(job_uid=record.metadata.uid, slice=host.slice, host=host.host))
                    forget(folder, host)
                order = spawn_order(record, self.folder, host, self._agent_command)
                spawn(
                    order,
                    folder,
                    incarnation=action.incarnation,
                    now_s=self._clock.unix_s(),
                )

    def _stop(self, job: str, action: StopSlice) -> None:
        folder = self.folder.job(job)
        for host in recorded_hosts(folder):
            record = self._load_host(folder, host)
            if (
                host.slice != action.slice
                or record is None
                or record.started_for > action.incarnation
            ):
                continue
            now_s = self._clock.unix_s()
            ask_to_stop(folder, record, grace_s=action.grace_s, now_s=now_s)
        self._tend_hosts(folder, Phase.RUNNING)

    def _write_directive(self, job: str, action: WriteDirective) -> None:
        folder, directive = self.folder.job(job), action.directive
        record = self._look_up(job)
        if record is None or record.metadata.uid != directive.job_uid:
            return
        found = load_directive(folder, directive.job_uid, self._tolerance)
        if found is not None and found.sequence >= directive.sequence:
            return
        # Not synced, for agents wait for it. It is made anew from the ledger when it is not there,
        # and a crash of the machine that takes it takes all its readers too.
        write_soft(folder.directive, encode(directive))

    def _emit(self, job: str, action: EmitEvent) -> None:
        folder = self.folder.job(job)
        if not folder.path.exists():
            return
        log = self._events.setdefault(job, EventLog(folder))
        log.emit(
            EventRecord(
                id=action.id,
                at_s=self._clock.unix_s(),
                reason=action.reason.value,
                severity=TABLE[action.reason].severity.value,
                message=action.message,
                slice=action.slice,
            )
        )

    def _remove(self, job: str) -> None:
        folder = self.folder.job(job)
        record = self._read(job)
        if record is None:
            return
        for n in range(record.spec.slices.count_max):
            end_reclaimer(folder, SliceId(n))
        kill(place_of(folder), clock=self._clock)
        self.store.remove(job, record.metadata.uid)
        self._events.pop(job, None)
        self._tolerance.forget_below(folder.path)

    def _tend_hosts(self, folder: JobFolder, phase: Phase) -> list[float]:
        due: list[float] = []
        for host in recorded_hosts(folder):
            record = self._load_host(folder, host)
            if record is None:
                continue
            if identity.is_running(record.identity):
                if record.stop_by_s is not None:
                    now_s = self._clock.unix_s()
                    enforce_stop(record, now_s=now_s)
                    # Its end is seen by its pidfd; the second look is the backstop.
                    due.append(max(record.stop_by_s, now_s + 1.0))
            elif phase in FINISHED or process_state(record, folder) is ProcessState.ABSENT:
                # Of a finished job nothing stays but what people read.
                end_rest(record.place)
                forget(folder, host)
        return due

    def _tend_notices(self, job: str, record: JobRecord) -> list[float]:
        due: list[float] = []
        folder = self.folder.job(job)
        for n in range(record.spec.slices.count_max):
            slice_id = SliceId(n)
            path = folder.slice_capacity(slice_id)
            granted = self._tolerance.load(path, partial(load_capacity, folder, slice_id))
            if granted is None or granted.notice is None:
                continue
            overdue_s = granted.notice.deadline_s + RECLAIMER_SLACK_S
            if self._clock.unix_s() < overdue_s:
                due.append(overdue_s)
                continue
            self._log.warning("reclaimer is missing", job=job, slice=slice_id)
            take_away(self.folder, job, slice_id, clock=self._clock, notice_id=granted.notice.id)
        return due

    def _look_up(self, job: str) -> JobRecord | None:
        """Return a job's record; the last good one while its file is garbage."""
        folder = self.folder.job(job)
        record = self._tolerance.load(folder.record, lambda: self._read(job))
        if record is None:
            return None
        shown = self._tolerance.load(folder.progress, lambda: self.store.read_progress(job))
        return with_progress(record, shown)

    def _read(self, job: str) -> JobRecord | None:
        try:
            return self.store.read_durable(job)
        except NotFound:
            return None

    def _load_host(self, folder: JobFolder, host: HostId) -> HostRecord | None:
        return self._tolerance.load(folder.host(host), lambda: load_host(folder, host))

    def _say_garbage(self, error: RecordCorrupt) -> None:
        self._log.error("record refused", path=str(error.path), why=error.why)
