"""What the controller publishes about a job. Derived and for people; nothing branches on it.

The one exception is `ledger`, the little that cannot be observed: `core` reads and writes it, and
it is stored inside the status so that one precondition guards both.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step


class _Node(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class Phase(Enum):
    """Display only."""

    PENDING = "Pending"
    SCHEDULING = "Scheduling"
    JOINING = "Joining"
    RESTORING = "Restoring"
    RUNNING = "Running"
    CHECKPOINTING = "Checkpointing"
    DRAINING = "Draining"
    RESCHEDULING = "Rescheduling"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Condition(_Node, frozen=True, kw_only=True):
    type: str
    status: str
    """`True`, `False` or `Unknown`."""
    reason: str
    """A name of the one table, `reasons`."""
    message: str = ""
    last_transition_at_s: float
    observed_generation: int


class SliceCounts(_Node, frozen=True, kw_only=True):
    desired: int
    granted: int = 0
    ready: int = 0


class SliceStatus(_Node, frozen=True, kw_only=True):
    id: SliceId
    rank: int | None
    """None when the slice is not a member of the current incarnation."""
    state: str
    """Absent, Gone, Starting, Joining, Ready, Disrupted, Suspect or Lost."""
    ready_hosts: int = 0
    restarts: int = 0
    disruptions: int = 0
    deadline_s: float | None = None
    reason: str = ""


class Coordinator(_Node, frozen=True, kw_only=True):
    address: str
    lead: HostId


class CheckpointRequest(_Node, frozen=True, kw_only=True):
    id: str
    reason: str
    deadline_s: float
    requested_at_s: float


class LastCommitted(_Node, frozen=True, kw_only=True):
    step: Step
    completed_at_s: float | None = None


class CheckpointStatus(_Node, frozen=True, kw_only=True):
    request: CheckpointRequest | None = None
    last_committed: LastCommitted | None = None
    step_snapshot: Step | None = None
    """Newest step held whole in the memory of the members."""
    budget_seconds_learnt: float | None = None


class RestartCounts(_Node, frozen=True, kw_only=True):
    failures: int = 0
    disruptions: int = 0
    counted_in_window: int = 0


class Recovery(_Node, frozen=True, kw_only=True):
    """One change of incarnation, from its first cause to the first finished step after it."""

    incarnation: Incarnation
    cause: str
    """A reason of the one table."""
    slice: SliceId | None = None
    at_s: float
    from_slices: int
    to_slices: int
    step_before: Step
    step_restored: Step | None = None
    lost_steps: int | None = None
    source: str = ""
    own_bytes: int = 0
    peer_bytes: int = 0
    storage_bytes: int = 0
    local_bytes: int = 0
    """From disks of hosts."""
    detect_s: float | None = None
    """First trace of the cause → persisted decision."""
    drain_s: float | None = None
    schedule_s: float | None = None
    join_s: float | None = None
    restore_s: float | None = None
    first_step_s: float | None = None
    total_s: float | None = None


class JobStatus(_Node, frozen=True, kw_only=True):
    observed_generation: int = 0
    phase: Phase = Phase.PENDING
    message: str = ""
    """What is happening, in one sentence."""
    incarnation: Incarnation = Incarnation(0)
    step: Step = Step(0)
    steps_per_s: float | None = None
    loss: float | None = None
    coordinator: Coordinator | None = None
    slices: SliceCounts | None = None
    slice_statuses: tuple[SliceStatus, ...] = ()
    checkpoint: CheckpointStatus = CheckpointStatus()
    restarts: RestartCounts = RestartCounts()
    recoveries: tuple[Recovery, ...] = ()
    """Newest last, at most 64."""
    conditions: tuple[Condition, ...] = ()
    started_at_s: float | None = None
    finished_at_s: float | None = None
    wait_until_s: float | None = None
    """When what the job waits for is over at the latest: a pause, a backoff, a replacement. None
    when it waits for nothing, or for capacity or a person without an end."""
