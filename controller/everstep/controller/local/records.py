"""What the files of the state folder hold. Reading is tolerant of nothing: garbage is refused."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.controller.api.ids import HostId, Incarnation, SliceId
from everstep.controller.api.spec import JobSpec
from everstep.controller.api.status import JobStatus
from everstep.controller.core.ledger import Ledger
from everstep.controller.core.model import Capacity, NoticeClass
from everstep.controller.local.errors import RecordCorrupt
from everstep.controller.local.files import read_or_none
from everstep.controller.local.identity import Identity, Place

KIND = "multislicejobs.everstep.dev"
"""What a job is called in messages, as `kubectl` calls it."""

T = TypeVar("T")


class JobMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    name: str
    uid: str
    generation: int
    """Grows with every change of the spec, and with nothing else."""
    resource_version: int
    """Grows with every write of the record."""
    created_at: float
    deleted_at: float | None = None
    number: int
    """Chooses the job's addresses."""
    namespace: str = "default"
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`job.json`. One file, so that one precondition guards spec, status and ledger together."""

    metadata: JobMetadata
    spec: JobSpec
    status: JobStatus = JobStatus()
    ledger: Ledger = Ledger()

    @property
    def precondition(self) -> str:
        # The uid makes the version of a deleted job of the same name useless.
        return f"{self.metadata.uid}/{self.metadata.resource_version}"


class ProgressRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`progress.json`: the status with newer figures. Soft: it may be lost, old or torn.

    It counts only beside the record that it was written for.
    """

    precondition: str
    status: JobStatus


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`hosts/<slice>-<host>.json`: the process that is the agent of one host.

    Written before the process does anything, so that no agent can live that nobody knows of.
    """

    host: HostId
    job_uid: str
    pid: int
    start_ticks: int
    boot_id: str
    pgid: int
    address: str
    port: int
    started_for: Incarnation
    started_at: float
    stop_by_s: float | None = None
    """The process was told to end; from this moment on it is killed."""
    exit_code: int | None = None
    """Negative for a signal. Known only of processes that this controller started."""
    exited_at: float | None = None

    @property
    def place(self) -> Place:
        return Place(job_uid=self.job_uid, slice=self.host.slice, host=self.host.host)

    @property
    def identity(self) -> Identity:
        return Identity(pid=self.pid, start_ticks=self.start_ticks, boot_id=self.boot_id)


class NoticeRecord(msgspec.Struct, frozen=True, kw_only=True, rename={"notice_class": "class"}):
    id: str
    deadline_s: float
    first_seen_s: float
    notice_class: NoticeClass = NoticeClass.IMMINENT


class CapacityRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`capacity/<slice>.json`: what the machine grants for one slice. Absent means available."""

    state: Capacity = Capacity.AVAILABLE
    notice: NoticeRecord | None = None
    since_s: float


class ReclaimerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`reclaimers/<slice>.json`: the process that takes a slice away at its deadline."""

    slice: SliceId
    notice_id: str
    pid: int
    start_ticks: int
    boot_id: str

    @property
    def identity(self) -> Identity:
        return Identity(pid=self.pid, start_ticks=self.start_ticks, boot_id=self.boot_id)


class EventRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `events.jsonl`."""

    id: str
    at_s: float
    reason: str
    severity: str
    message: str
    slice: SliceId | None = None


class MetricsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `metrics.jsonl`, written by the agent of rank 0."""

    step: int
    incarnation: int
    at_s: float
    values: dict[str, float] = {}


class Outcome(Enum):
    """What an apply did."""

    CREATED = "created"
    CONFIGURED = "configured"
    UNCHANGED = "unchanged"


def with_progress(record: JobRecord, progress: ProgressRecord | None) -> JobRecord:
    """Return the record with newer figures, if these belong to it."""
    if progress is None or progress.precondition != record.precondition:
        return record
    return msgspec.structs.replace(record, status=progress.status)


def encode(record: msgspec.Struct) -> bytes:
    """Encode for a file: indented, because people look into the folder."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(path: Path, data: bytes, type_: type[T]) -> T:
    """Decode the content of a file.

    Raises:
        RecordCorrupt: it is not what it should be; the file's path and the field are named.
    """
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordCorrupt(path, str(error)) from error


def load(path: Path, type_: type[T]) -> T | None:
    """Read a record; None when there is none.

    Raises:
        RecordCorrupt: there is one, and it cannot be read.
    """
    data = read_or_none(path)
    return None if data is None else decode(path, data, type_)
