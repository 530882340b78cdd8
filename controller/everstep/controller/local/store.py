"""The jobs of a state folder: created, changed and deleted under one precondition.

Two kinds of writers meet here: people's verbs change the spec, the controller changes status and
ledger. Each write compares and replaces the whole record under the folder's lock.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from everstep.controller.api.spec import JobSpec, MultiSliceJob
from everstep.controller.api.status import JobStatus
from everstep.controller.core.ledger import Ledger
from everstep.controller.local.addresses import choose_number
from everstep.controller.local.errors import Conflict, NotFound, RecordCorrupt
from everstep.controller.local.files import sync_folder, write_durable, write_soft
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.records import (
    KIND,
    JobMetadata,
    JobRecord,
    Outcome,
    ProgressRecord,
    encode,
    load,
    with_progress,
)


class Store:
    """Reads and writes `job.json` files."""

    def __init__(self, folder: StateFolder) -> None:
        self.folder = folder
        self._good: dict[str, JobRecord] = {}

    def read(self, name: str) -> JobRecord:
        """Return a job with its newest figures.

        Raises:
            NotFound, RecordCorrupt: as `read_durable`.
        """
        record = self.read_durable(name)
        try:
            return with_progress(record, self.read_progress(name))
        except RecordCorrupt:
            # A crash of the machine may tear what nothing depends on.
            return record

    def read_progress(self, name: str) -> ProgressRecord | None:
        return load(self.folder.job(name).progress, ProgressRecord)

    def read_durable(self, name: str) -> JobRecord:
        """Return a job as it was persisted.

        Raises:
            NotFound: there is none of this name.
            RecordCorrupt: its record cannot be read; nothing was changed.
        """
        record = load(self.folder.job(name).record, JobRecord)
        if record is None:
            raise NotFound(KIND, name)
        if record.metadata.name != name:
            found = record.metadata.name
            raise RecordCorrupt(
                self.folder.job(name).record, f"it holds the job {found!r}, expected {name!r}"
            )
        self._good[name] = record
        return record

    def read_last_good(self, name: str) -> JobRecord | None:
        """Return the record that this process read last, for the time its file is garbage."""
        return self._good.get(name)

    def names(self) -> tuple[str, ...]:
        return self.folder.job_names()

    def apply(self, job: MultiSliceJob, *, uid: str, now_s: float) -> tuple[Outcome, JobRecord]:
        """Create a job, or give it another spec.

        Args:
            uid: of the job if it is created.
            now_s: Unix seconds.

        Raises:
            Conflict: the job is being deleted.
            RecordCorrupt: there is a record of this name that cannot be read.

        Durability: on return the job survives a crash of the machine; a crash within leaves the
        old job or the new one.
        """
        name = job.metadata.name
        with self.folder.writing():
            try:
                found = self.read(name)
            except NotFound:
                return Outcome.CREATED, self._create(job, uid, now_s)
            if found.metadata.deleted_at is not None:
                raise Conflict(name, f'object is being deleted: {KIND} "{name}" already exists')
            metadata = replace(
                found.metadata,
                namespace=job.metadata.namespace,
                labels=job.metadata.labels,
                annotations=job.metadata.annotations,
            )
            if found.spec == job.spec and found.metadata == metadata:
                return Outcome.UNCHANGED, found
            changed = replace(found, metadata=metadata, spec=job.spec)
            return Outcome.CONFIGURED, self._write(found, changed)

    def edit(self, name: str, change: Callable[[JobSpec], JobSpec]) -> Outcome:
        """Change the spec of a job, whatever it is now.

        Raises:
            NotFound, Conflict, RecordCorrupt: as `apply`.
        """
        with self.folder.writing():
            found = self.read(name)
            if found.metadata.deleted_at is not None:
                raise Conflict(name, f'{KIND} "{name}" is being deleted')
            changed = replace(found, spec=change(found.spec))
            if changed.spec == found.spec:
                return Outcome.UNCHANGED
            self._write(found, changed)
            return Outcome.CONFIGURED

    def mark_deleted(self, name: str, *, now_s: float) -> JobRecord:
        """Ask for the end of a job; the controller ends it and then takes its records away."""
        with self.folder.writing():
            found = self.read(name)
            if found.metadata.deleted_at is not None:
                return found
            metadata = replace(found.metadata, deleted_at=now_s)
            return self._write(found, replace(found, metadata=metadata))

    def persist(
        self, name: str, ledger: Ledger, status: JobStatus, precondition: str
    ) -> str | None:
        """Write ledger and status if nothing was written since; see `core.model.World.persist`."""
        with self.folder.writing():
            try:
                found = self.read(name)
            except NotFound:
                return None
            except RecordCorrupt as error:
                found = self._set_aside(name, error)
            if found.precondition != precondition:
                return None
            return self._write(found, replace(found, ledger=ledger, status=status)).precondition

    def note_progress(self, name: str, status: JobStatus, precondition: str) -> bool:
        """Show newer figures; see `core.model.World.note_progress`."""
        with self.folder.writing():
            try:
                found = self.read_durable(name)
            except NotFound:
                return False
            if found.precondition != precondition:
                return False
            noted = ProgressRecord(precondition=precondition, status=status)
            write_soft(self.folder.job(name).progress, encode(noted))
            return True

    def remove(self, name: str, uid: str) -> None:
        """Take all records of a job away; another job of the same name is left alone.

        Durability: after a crash within, the job is there as a whole or a hidden folder is left,
        which `tidy` removes.
        """
        folder = self.folder.job(name)
        with self.folder.writing():
            try:
                if self.read(name).metadata.uid != uid:
                    return
            except NotFound:
                return
            hidden = self.folder.removed(uid)
            folder.path.rename(hidden)
            sync_folder(self.folder.jobs)
        self._good.pop(name, None)
        shutil.rmtree(hidden, ignore_errors=True)

    def _create(self, job: MultiSliceJob, uid: str, now_s: float) -> JobRecord:
        name = job.metadata.name
        taken = frozenset(self._numbers())
        record = JobRecord(
            metadata=JobMetadata(
                name=name,
                uid=uid,
                generation=1,
                resource_version=1,
                created_at=now_s,
                number=choose_number(
                    uid,
                    taken,
                    port=job.spec.runtime.agent_port,
                    owner=self.folder.job(name).record,
                ),
                namespace=job.metadata.namespace,
                labels=job.metadata.labels,
                annotations=job.metadata.annotations,
            ),
            spec=job.spec,
        )
        folder = self.folder.job(name)
        self.folder.make()
        # Whatever lies there has no record: it is the rest of an apply that was killed.
        if folder.path.exists():
            shutil.rmtree(folder.path)
        folder.make()
        write_durable(folder.record, encode(record))
        sync_folder(self.folder.jobs)
        return record

    def _numbers(self) -> list[int]:
        found: list[int] = []
        for name in self.names():
            try:
                found.append(self.read(name).metadata.number)
            except (NotFound, RecordCorrupt):
                # Its addresses are unknown; the probe of `choose_number` still keeps off them.
                continue
        return found

    def _write(self, found: JobRecord, changed: JobRecord) -> JobRecord:
        is_new_spec = changed.spec != found.spec
        metadata = replace(
            changed.metadata,
            resource_version=found.metadata.resource_version + 1,
            generation=found.metadata.generation + (1 if is_new_spec else 0),
        )
        written = replace(changed, metadata=metadata)
        write_durable(self.folder.job(metadata.name).record, encode(written))
        self._good[metadata.name] = written
        return written

    def _set_aside(self, name: str, error: RecordCorrupt) -> JobRecord:
        """Keep a garbage record for people to look at, and go on with the last good one."""
        good = self.read_last_good(name)
        if good is None:
            raise error
        path: Path = self.folder.job(name).record
        path.rename(path.with_name("job.json.refused"))
        return good
