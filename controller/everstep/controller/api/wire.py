"""What crosses between controller and agents: the directive and the report.

A directive is the whole truth about one job at one moment: who is a member, in which incarnation,
and what is asked of them. It is never a difference to an earlier one, so a reader who missed ten
of them needs the last one only. A report is the same in the other direction, one per host.

Times that cross a process border are Unix seconds; their names end in `_at_s` or `deadline_s`.
Both are encoded as JSON by `codec`.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step

WIRE_VERSION = 1


class Command(Enum):
    """What the members of a directive do now."""

    RUN = "Run"
    """Join the incarnation and train."""
    WAIT = "Wait"
    """Hold what you have and run no worker: a change is being decided, or the job is suspended."""
    STOP = "Stop"
    """End: leave nothing behind. The job is finished, failed or deleted."""


class RequestKind(Enum):
    CHECKPOINT = "Checkpoint"
    """Hold the agreed step (snapshot, and durable when asked) and go on training."""
    LEAVE = "Leave"
    """Hold the agreed step outside the doomed slices, then stop the workers."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing asked of the members of an incarnation. Idempotent under its id."""

    id: str
    """`<incarnation>-<n>`, for example `5-1`."""
    kind: RequestKind
    doomed: tuple[SliceId, ...] = ()
    """Slices whose memory will vanish. Empty for a grow, a scale, or a checkpoint."""
    durable: bool = False
    """Also commit the agreed step to storage before the acknowledgement (suspend, end of all)."""
    deadline_s: float
    """Unix seconds, safety margin already subtracted."""


class MemberHost(msgspec.Struct, frozen=True, kw_only=True):
    host: int
    address: str
    """IP of the agent. Never a name: DNS may still cache a dead one."""
    port: int
    """The agent's peer server."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A member slice of one incarnation."""

    slice: SliceId
    rank: Rank
    hosts: tuple[MemberHost, ...]
    """In host order: `hosts[i].host == i`."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the spec that agents need, resolved by the controller."""

    checkpoint_uri: str
    checkpoint_every_steps: int | None
    checkpoint_every_s: float | None
    retention_latest: int
    retention_every_steps: int | None
    snapshot_every_steps: int | None
    """None means `auto`: chosen from measured copy and step times."""
    snapshot_slots: int
    snapshot_bytes_max: int | None
    """Bound of snapshot memory per host; None means what the machine has."""
    snapshot_replicas: int
    report_interval_s: float
    report_timeout_s: float
    progress_timeout_s: float
    join_timeout_s: float
    start_grace_s: float
    """How long a worker may take to its first finished step (compile included) before the
    progress timeout applies to it."""
    local_path: str | None = None
    """Folder of the local tier on each host's own disk; None means none."""
    local_every_steps: int | None = None
    """None means each snapshot."""
    local_latest: int = 2
    restart_fresh: bool = False
    """Start over an existing run at step 0: an explicit switch, never a consequence of an error."""


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """Controller → agents, one per job."""

    version: int = WIRE_VERSION
    job: str
    job_uid: str
    sequence: int
    """Grows with every directive written; a reader ignores one that is not newer."""
    incarnation: Incarnation
    command: Command
    members: tuple[Member, ...]
    """In rank order."""
    lead: HostId | None
    """Host that runs the join, the agreement and the commits. None when there is no member."""
    request: Request | None = None
    token: str
    """Bearer token of the peer servers, new at each incarnation."""
    settings: Settings
    restore_set_aside: tuple[Step, ...] = ()
    """Steps that crashed the worker right after their restore; chosen again only where there is no
    other one."""


class HostPhase(Enum):
    """Where a host stands. For people and for deadlines; the core decides on facts beside it."""

    STARTING = "Starting"
    WAITING = "Waiting"
    JOINING = "Joining"
    RESTORING = "Restoring"
    RUNNING = "Running"
    HOLDING = "Holding"
    """A request is being served: agreed step, snapshot, evacuation."""
    HELD = "Held"
    """The request is served and the worker has left."""
    ENDED = "Ended"
    """The worker ended (see `exit`)."""
    DONE = "Done"
    """`train` returned: all steps are finished and durable."""


class ExitCause(Enum):
    DONE = "Done"
    LEFT = "Left"
    """Left at the agreed step, as asked."""
    USER_ERROR = "UserError"
    """The user's program raised, at import or in a step."""
    EXITED_EARLY = "ExitedEarly"
    """The user's program ended without finishing `train` (exit 0, `os._exit`, no `es.main`)."""
    SIGNALED = "Signaled"
    HUNG = "Hung"
    """No progress within the progress timeout; the agent ended it."""
    STATE_REFUSED = "StateRefused"
    """The state cannot be stored or restored; the message names the leaf."""
    STARTUP_FAILED = "StartupFailed"
    """The worker could not be started or could not reach the coordinator or the devices."""
    CONSEQUENCE = "Consequence"
    """Ended because another member did: collective error, coordinator lost, ended by its agent."""


class WorkerExit(msgspec.Struct, frozen=True, kw_only=True):
    """How the worker of one incarnation ended. Reported once, by the agent of its host."""

    incarnation: Incarnation
    cause: ExitCause
    rank: Rank
    code: int | None = None
    signal: int | None = None
    message: str = ""
    """One line for people; a traceback goes to the log, whole and once."""
    at_s: float
    step: Step
    """Last step that this worker finished."""
    restored_step: Step | None = None
    """The step that it restored, or was restoring; None where it ended before that."""
    is_retryable: bool = True
    is_before_main: bool = False
    """The program ended before it called `es.main`: no step was tried."""
    stage: int = 0
    """How far on its way to the first step it was; greater is further, and training the furthest.
    Of several that hung together, the one that was behind is what the others waited for."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Acknowledgement of a request, sent by the lead when it is complete or has failed."""

    request_id: str
    step: Step
    where: tuple[HostId, ...]
    """Hosts whose memory holds the step, after the evacuation."""
    durable: bool
    bytes_moved: int
    complete: bool
    """Every region of every leaf is held outside the doomed slices."""
    message: str = ""
    drain_s: float = 0.0


class NoticeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A notice that the agent itself received (SIGTERM, metadata server)."""

    reason: str
    deadline_s: float
    at_s: float


class RestoreFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one host's restore cost, for the recovery table."""

    incarnation: Incarnation
    step: Step
    source: str
    """`fresh`, `memory`, `local`, `storage` or `mixed`."""
    own_bytes: int = 0
    peer_bytes: int = 0
    storage_bytes: int = 0
    local_bytes: int = 0
    """From disks of hosts."""
    rejected: tuple[str, ...] = ()
    """Sources that failed their checksum or could not be read, in words."""
    join_s: float = 0.0
    start_s: float = 0.0
    """Join answered → worker has its devices."""
    restore_s: float = 0.0
    first_step_s: float | None = None
    first_step_at_s: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Agent → controller, one per host; replaced as a whole, renewed every report interval."""

    version: int = WIRE_VERSION
    job_uid: str
    host: HostId
    address: str
    port: int
    pid: int
    sequence: int
    renewed_at_s: float
    directive_seen: int
    """`sequence` of the newest directive this agent acts on."""
    incarnation: Incarnation
    """Incarnation this agent is in; 0 before the first directive."""
    phase: HostPhase
    phase_since_s: float
    step: Step
    """Last step the worker is known to have finished."""
    step_snapshot: Step | None = None
    """Newest complete snapshot held in this host's memory."""
    step_replicated: Step | None = None
    """Newest step of this incarnation of which this host also holds its share of the partners'."""
    step_committed: Step | None = None
    """Newest commit known (the lead reads it from the ledger)."""
    committed_at_s: float | None = None
    steps_per_s: float | None = None
    loss: float | None = None
    exit: WorkerExit | None = None
    held: Held | None = None
    missing: tuple[HostId, ...] = ()
    """Lead only: hosts that did not join before the join deadline."""
    coordinator_lost_at_s: float | None = None
    """Lead only: when its coordination service of this incarnation was seen to have ended, untold.
    Every worker ends for it."""
    notice: NoticeReport | None = None
    restore: RestoreFigures | None = None
    fenced_by: Incarnation | None = None
    """A newer incarnation was seen in storage; this agent has stopped its worker."""
    save_settled: int | None = None
    """Lead only: the sequence of the directive to wait for which what the members hold is on
    storage, or cannot be brought there. More waiting for it changes nothing."""
    program_ready: bool = True
    """Whether a worker could be started at once. False while the program is still being imported;
    the members of a growing job train on meanwhile."""
    fork_refused: str | None = None
    """Why the user's program cannot be forked; a fresh interpreter is started instead."""
    storage_error: str | None = None
    """The last failed background write, in words; None once a later one succeeded."""
    storage_error_step: Step | None = None
    """The step that it was of; None where storage failed before any step was tried."""
    snapshot_refused: str | None = None
    address_refused: str | None = None
    """Why this agent cannot be reached at its address; it has ended with this as its last word."""
