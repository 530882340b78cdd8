"""The one table of reasons: condition reason, event reason, metric label and anchor in the docs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """Who must look: nobody (info), a human this week (warning), a human now (error)."""

    INFO = "Normal"
    WARNING = "Warning"
    ERROR = "Error"


class Budget(Enum):
    """What a cause is charged to (G10)."""

    NONE = "None"
    DISRUPTION = "Disruption"
    FAILURE = "Failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonEntry:
    severity: Severity
    sentence: str
    budget: Budget = Budget.NONE


class Reason(Enum):
    """Names are CamelCase as Kubernetes demands; each has an entry in `TABLE`."""

    # How a job stands.
    ACCEPTED = "Accepted"
    ALL_SLICES_RUNNING = "AllSlicesRunning"
    RUNNING_DEGRADED = "RunningDegraded"
    NOT_SCHEDULED = "NotScheduled"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    COMPLETED = "Completed"
    DELETED = "Deleted"
    # Why an incarnation changed.
    FIRST_START = "FirstStart"
    PREEMPTION_NOTICE = "PreemptionNotice"
    NOTICE_WITHDRAWN = "NoticeWithdrawn"
    SLICE_LOST = "SliceLost"
    HOST_LOST = "HostLost"
    WORKER_KILLED = "WorkerKilled"
    WORKER_HUNG = "WorkerHung"
    AGENT_SILENT = "AgentSilent"
    COORDINATOR_LOST = "CoordinatorLost"
    COLLECTIVE_ERROR = "CollectiveError"
    JOIN_TIMED_OUT = "JoinTimedOut"
    SCALE_UP = "ScaleUp"
    SCALE_DOWN = "ScaleDown"
    RESUMED = "Resumed"
    USER_ERROR = "UserError"
    EXITED_EARLY = "ExitedEarly"
    STARTUP_FAILED = "StartupFailed"
    # Why it waits or ended.
    WAITING_FOR_REPLACEMENT = "WaitingForReplacement"
    BELOW_MINIMUM_SLICES = "BelowMinimumSlices"
    DISRUPTION_STORM = "DisruptionStorm"
    CONTROL_PLANE_OUTAGE = "ControlPlaneOutage"
    BACKING_OFF = "BackingOff"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    LOSS_FORBIDDEN = "LossForbidden"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    STATE_REFUSED = "StateRefused"
    FENCED = "Fenced"
    STORAGE_REFUSED = "StorageRefused"
    # Holding and restoring.
    STEP_HELD = "StepHeld"
    DEADLINE_MISSED = "DeadlineMissed"
    NOT_COMMITTED_YET = "NotCommittedYet"
    STEP_COMMITTED = "StepCommitted"
    STORAGE_WRITE_FAILED = "StorageWriteFailed"
    RESTORED_FROM_MEMORY = "RestoredFromMemory"
    RESTORED_FROM_DISKS = "RestoredFromDisks"
    RESTORED_FROM_STORAGE = "RestoredFromStorage"
    SOURCE_REJECTED = "SourceRejected"
    STEP_SET_ASIDE = "StepSetAside"
    FORK_REFUSED = "ForkRefused"
    SNAPSHOT_REFUSED = "SnapshotRefused"
    CONFIGURATION_SUSPECT = "ConfigurationSuspect"


_I, _W, _E = Severity.INFO, Severity.WARNING, Severity.ERROR
_D, _F = Budget.DISRUPTION, Budget.FAILURE


def _entry(severity: Severity, sentence: str, budget: Budget = Budget.NONE) -> ReasonEntry:
    return ReasonEntry(severity=severity, sentence=sentence, budget=budget)


TABLE: dict[Reason, ReasonEntry] = {
    Reason.ACCEPTED: _entry(_I, "The job was accepted."),
    Reason.ALL_SLICES_RUNNING: _entry(_I, "Every desired slice is training."),
    Reason.RUNNING_DEGRADED: _entry(_W, "The job trains on fewer slices than desired."),
    Reason.NOT_SCHEDULED: _entry(_I, "The slices have not all been granted yet."),
    Reason.RECOVERING: _entry(_I, "A new incarnation is being brought up."),
    Reason.SUSPENDED: _entry(_I, "The job is suspended; its newest step is durable."),
    Reason.COMPLETED: _entry(_I, "All steps are finished and the last one is durable."),
    Reason.DELETED: _entry(_I, "The job was deleted."),
    Reason.FIRST_START: _entry(_I, "The job starts for the first time."),
    Reason.PREEMPTION_NOTICE: _entry(_W, "A slice is about to be preempted.", _D),
    Reason.NOTICE_WITHDRAWN: _entry(_I, "A notice was withdrawn before its deadline."),
    Reason.SLICE_LOST: _entry(_W, "All hosts of a slice vanished without notice.", _D),
    Reason.HOST_LOST: _entry(_W, "A host vanished without notice; its slice goes with it.", _D),
    Reason.WORKER_KILLED: _entry(_W, "A worker was killed by a signal.", _F),
    Reason.WORKER_HUNG: _entry(_W, "A worker made no progress within the progress timeout.", _F),
    Reason.AGENT_SILENT: _entry(_W, "An agent sent no report within the report timeout.", _D),
    Reason.COORDINATOR_LOST: _entry(
        _W, "The coordination service ended without having been told to.", _D
    ),
    Reason.COLLECTIVE_ERROR: _entry(
        _W, "The workers lost each other and no first cause was found.", _F
    ),
    Reason.JOIN_TIMED_OUT: _entry(_W, "Hosts did not join before the join deadline.", _F),
    Reason.SCALE_UP: _entry(_I, "Capacity is back or more slices are desired."),
    Reason.SCALE_DOWN: _entry(_I, "Fewer slices are desired."),
    Reason.RESUMED: _entry(_I, "A suspended job was resumed."),
    Reason.USER_ERROR: _entry(_E, "The user's program raised.", _F),
    Reason.EXITED_EARLY: _entry(_E, "The user's program ended before its last step.", _F),
    Reason.STARTUP_FAILED: _entry(_W, "A worker could not be started.", _F),
    Reason.WAITING_FOR_REPLACEMENT: _entry(_I, "Waiting for a lost slice to be replaced."),
    Reason.BELOW_MINIMUM_SLICES: _entry(_W, "Fewer slices than the minimum are granted."),
    Reason.DISRUPTION_STORM: _entry(
        _W, "Too many disruptions in an hour; until there are fewer, no slice is started."
    ),
    Reason.CONTROL_PLANE_OUTAGE: _entry(_W, "Most hosts went silent at once; handling pauses."),
    Reason.BACKING_OFF: _entry(_I, "Waiting before the next restart after a failure."),
    Reason.RESTART_BUDGET_EXHAUSTED: _entry(_E, "Too many failures within the window."),
    Reason.LOSS_FORBIDDEN: _entry(_E, "A slice was lost and the policy is to fail."),
    Reason.DEADLINE_EXCEEDED: _entry(_E, "The job ran longer than its active deadline."),
    Reason.STATE_REFUSED: _entry(_E, "The training state cannot be stored or restored."),
    Reason.FENCED: _entry(_E, "Another run owns the checkpoint folder with a newer incarnation."),
    Reason.STORAGE_REFUSED: _entry(_E, "The checkpoint folder cannot be used."),
    Reason.STEP_HELD: _entry(_I, "The agreed step is held outside the doomed slices."),
    Reason.DEADLINE_MISSED: _entry(_W, "The agreed step was not held before the deadline."),
    Reason.NOT_COMMITTED_YET: _entry(_I, "No step is on durable storage yet."),
    Reason.STEP_COMMITTED: _entry(_I, "A step was committed to durable storage."),
    Reason.STORAGE_WRITE_FAILED: _entry(_W, "A background write failed; that step does not exist."),
    Reason.RESTORED_FROM_MEMORY: _entry(_I, "The state came from host memory."),
    Reason.RESTORED_FROM_DISKS: _entry(_I, "The state came from the hosts' own disks."),
    Reason.RESTORED_FROM_STORAGE: _entry(_I, "The state came from durable storage."),
    Reason.SOURCE_REJECTED: _entry(_W, "A source failed its checksum or could not be read."),
    Reason.STEP_SET_ASIDE: _entry(_W, "A step crashed the worker twice right after its restore."),
    Reason.FORK_REFUSED: _entry(_W, "The program cannot be forked; fresh interpreters are used."),
    Reason.SNAPSHOT_REFUSED: _entry(_E, "The snapshot memory does not suffice."),
    Reason.CONFIGURATION_SUSPECT: _entry(_W, "The configuration is legal but probably not meant."),
}
