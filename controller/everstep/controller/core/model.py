"""What the core sees (`View`), remembers (`Ledger`) and wants (`Plan`).

`View` is rebuilt from scratch in each pass. `Ledger` is the little that cannot be observed.
The reconciler persists `Plan.ledger` under the precondition of the view it was computed from, on
conflict drops the whole plan, and only then performs `Plan.actions`, in order; each is idempotent
under its key.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from everstep.controller.api.ids import Incarnation, SliceId
from everstep.controller.api.reasons import Reason
from everstep.controller.api.spec import JobSpec
from everstep.controller.api.status import JobStatus
from everstep.controller.api.wire import Directive, Report
from everstep.controller.core.ledger import Ledger


class Capacity(Enum):
    """What the world grants for one slice."""

    AVAILABLE = "Available"
    GONE = "Gone"


class NoticeClass(Enum):
    PLANNED = "Planned"
    IMMINENT = "Imminent"


class ProcessState(Enum):
    """What is known of one host's agent without asking it."""

    ABSENT = "Absent"
    ALIVE = "Alive"
    EXITED = "Exited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A sign of a coming loss of a slice. `id` is stable for one incident of one slice."""

    id: str
    slice: SliceId
    notice_class: NoticeClass
    deadline_s: float
    first_seen_s: float
    reason: Reason = Reason.PREEMPTION_NOTICE


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    host: int
    process: ProcessState
    started_for: Incarnation | None
    """Incarnation in whose name the agent was started; None when absent."""
    address: str
    port: int
    exit_code: int | None = None
    exited_at_s: float | None = None
    report: Report | None = None
    """Newest report of *this* agent process; one of an earlier process is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceView:
    """One slice, member or not. `hosts` has `hostsPerSlice` entries, in order."""

    id: SliceId
    capacity: Capacity
    notice: Notice | None
    hosts: tuple[HostView, ...]
    available_since_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    job: str
    job_uid: str
    generation: int
    spec: JobSpec
    is_deleting: bool
    slices: tuple[SliceView, ...]
    """All slices with an id below `spec.slices.max`, and any above it that still has processes."""
    directive: Directive | None
    """The one that agents can read now."""
    created_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSlice:
    """Start the agents of all hosts of a slice that have none. Never touches a live one."""

    slice: SliceId
    incarnation: Incarnation

    @property
    def key(self) -> str:
        return f"start/{self.incarnation}/{self.slice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSlice:
    """End all processes of a slice that were started for an incarnation up to this one."""

    slice: SliceId
    incarnation: Incarnation
    reason: Reason
    grace_s: float
    """0: SIGKILL at once. Else SIGTERM first."""

    @property
    def key(self) -> str:
        return f"stop/{self.incarnation}/{self.slice}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDirective:
    """Replace the directive. A directive with a smaller or equal sequence is never written."""

    directive: Directive

    @property
    def key(self) -> str:
        return f"directive/{self.directive.incarnation}/{self.directive.sequence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitEvent:
    """Tell people. Repeated emission under one key shows once."""

    id: str
    reason: Reason
    message: str
    slice: SliceId | None = None

    @property
    def key(self) -> str:
        return f"event/{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveJob:
    """Everything has ended: take the job's own records away (deletion only)."""

    @property
    def key(self) -> str:
        return "remove"


Action = StartSlice | StopSlice | WriteDirective | EmitEvent | RemoveJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    ledger: Ledger
    status: JobStatus
    actions: tuple[Action, ...]
    requeue_after_s: float | None
    """When to plan again even if nothing is seen to change."""
    must_persist: bool = True
    """False: the ledger is the same and in the status at most figures for the eye differ (step,
    rate, loss, newest snapshot and commit). They may be written at leisure or not at all, so that
    steady state costs no write (invariant 7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One consistent look at the world, and the precondition for writing on its strength."""

    view: View
    ledger: Ledger
    status: JobStatus
    """As last persisted."""
    precondition: str
    """Opaque: a `resourceVersion`."""


class World(Protocol):
    """The controller's seam to where jobs live: a cluster, one machine, or the simulator.

    Every implementation passes `tests/controller/world_conformance`.
    """

    def jobs(self) -> tuple[str, ...]:
        """Names of all jobs, also those being deleted."""
        ...

    def observe(self, job: str) -> Observation | None:
        """Look at everything anew. None when the job does not exist."""
        ...

    def persist(self, job: str, ledger: Ledger, status: JobStatus, precondition: str) -> str | None:
        """Write ledger and status together if nothing was written since `precondition`.

        Returns:
            The new precondition, or None on conflict: then nothing was written.

        Durability: when this returns, a crash of the machine does not undo it.
        """
        ...

    def note_progress(self, job: str, status: JobStatus, precondition: str) -> bool:
        """Show figures that change while a job simply trains, if nothing was persisted since.

        The precondition stays good. What is persisted later replaces what is shown.

        Returns:
            False on conflict: then nothing is shown.

        Durability: survives the controller's process, not necessarily the machine. Blocking: not
        for the disk.
        """
        ...

    def perform(self, job: str, action: Action) -> None:
        """Do one action. Idempotent under `action.key`; may be called again after a crash."""
        ...
