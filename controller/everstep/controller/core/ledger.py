"""What the core must remember because it cannot be observed. Stored in the job's status.

Steady state leaves it untouched: nothing in here changes while a job simply trains (invariant 7).
Reasons are stored by their public name, so that a ledger of an older version still reads.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from everstep.controller.api.ids import Incarnation, SliceId, Step
from everstep.controller.api.reasons import Reason


class Stage(Enum):
    """The one thing that is branched on. Everything finer is observed."""

    WAIT = "Wait"
    """No incarnation runs. `members` are the slices whose memory is kept meanwhile."""
    RUN = "Run"
    """`incarnation` is commanded to run on `members`."""
    FINISHED = "Finished"
    """Ended for ever (invariant 8); `finish` says how."""


class IncidentKind(Enum):
    """Why the members were asked to hold a step, in order of precedence."""

    DELETE = "Delete"
    DEADLINE = "Deadline"
    SUSPEND = "Suspend"
    NOTICE = "Notice"
    SCALE_DOWN = "ScaleDown"
    SCALE_UP = "ScaleUp"
    CHECKPOINT = "Checkpoint"


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """A planned change that is being drained: the request is out, the answer is not in."""

    kind: IncidentKind
    number: int
    """The request's id is `<incarnation>-<number>`."""
    doomed: tuple[SliceId, ...] = ()
    durable: bool = False
    slice: SliceId | None = None
    """The slice that began it."""
    cause_at_s: float
    decided_at_s: float
    deadline_s: float
    """Of the request: the margin is already taken off."""
    notices: tuple[str, ...] = ()


class Turnover(msgspec.Struct, frozen=True, kw_only=True):
    """The way from one incarnation to the next; kept until the next one finished a step."""

    reason: Reason
    """The first cause (invariant 4)."""
    slice: SliceId | None = None
    cause_at_s: float
    """First trace of the cause."""
    decided_at_s: float
    halted_at_s: float
    """When the members stopped training: at the decision, or at the end of the drain."""
    from_slices: int = 0
    count_wanted: int = 0
    """How many slices the replacement policy waits for."""
    lost: bool = False
    """Whether slices went with it: then the replacement policy applies."""
    wait_until_s: float | None = None
    """When the replacement policy stops waiting. None: it does not stop."""
    not_before_s: float = 0.0
    """Backoff after a failure."""
    step_before: Step = Step(0)
    step_left: Step | None = None
    """At which members left as agreed: later steps, which need all members, do not exist, although
    a host may have begun one."""
    drain_s: float | None = None
    started_at_s: float | None = None
    """When the next incarnation was persisted."""


class Standby(msgspec.Struct, frozen=True, kw_only=True):
    """A slice that is not a member and whose agents are up, or being brought up, to become one."""

    id: SliceId
    since_s: float
    """When its agents are started. In the future: after so many failed attempts it rests."""
    attempts: int = 0


class SliceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one slice, and why it left last."""

    id: SliceId
    restarts: int = 0
    disruptions: int = 0
    reason: Reason | None = None


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """The newest failure that was counted. Taken back when a disruption proves to be its cause."""

    slice: SliceId | None
    reason: Reason
    at_s: float
    crashed: Step | None = None
    """The restored step that was counted with it."""


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """Failures and disruptions, apart (G10)."""

    failures: int = 0
    disruptions: int = 0
    failed_at_s: tuple[float, ...] = ()
    """Counted failures that may still lie in the window, oldest first."""
    disrupted_at_s: tuple[float, ...] = ()
    """Disruptions of the last hour, oldest first, as the storm guard counts them: slices that go
    together are one."""
    failures_in_a_row: int = 0
    """Without progress between them; drives the backoff."""
    step_at_failure: Step = Step(0)
    charge: Charge | None = None


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """A restored step after which the worker ended by itself without finishing another one."""

    step: Step
    count: int


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """What ought to be on storage and is not, until a later commit proves otherwise."""

    reason: Reason
    message: str
    since_s: float
    committed_at_s: float | None = None
    """Time of the newest commit known then."""
    step: Step | None = None
    """The newest step whose failure was told."""


class BadStart(msgspec.Struct, frozen=True, kw_only=True):
    """An error that the program ended with before `es.main`, and how often in a row."""

    message: str
    count: int


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    succeeded: bool
    reason: Reason
    message: str
    at_s: float


class UntoldEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a persisted plan, which may not have been told yet."""

    id: str
    reason: Reason
    message: str
    slice: SliceId | None = None


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Everything has a default, so that an absent ledger is the ledger of a new job.

    Invariants: `incarnation` never falls; `members` is sorted; `turnover.started_at_s` is set
    exactly while `stage` is RUN and no step of the incarnation is known to be finished; `incident`
    is set only while `stage` is RUN.
    """

    incarnation: Incarnation = Incarnation(0)
    members: tuple[SliceId, ...] = ()
    """Slices of `incarnation`, in rank order."""
    stage: Stage = Stage.WAIT
    fresh: tuple[SliceId, ...] = ()
    """Members whose agents are started in the name of this incarnation: until they are, their
    absence is no loss."""
    incarnation_at_s: float = 0.0
    cause: Reason = Reason.FIRST_START
    """Why `incarnation` exists."""
    turnover: Turnover | None = None
    incident: Incident | None = None
    requests: int = 0
    """Requests made in this incarnation."""
    standby: tuple[Standby, ...] = ()
    slices: tuple[SliceMemory, ...] = ()
    budgets: Budgets = Budgets()
    crash: Crash | None = None
    bad_start: BadStart | None = None
    trouble: Trouble | None = None
    commit_told: Incarnation = Incarnation(0)
    """The newest incarnation whose first commit was told."""
    fork_told: bool = False
    restore_set_aside: tuple[Step, ...] = ()
    notices_served: tuple[str, ...] = ()
    """Notices answered by a checkpoint alone; they ask for nothing more."""
    desired: int = 0
    """`slices.desired` as last seen: raising it is asking to grow."""
    grow_asked: bool = False
    trained_since_s: float | None = None
    """When the first step of `incarnation` was finished."""
    disturbed_at_s: float | None = None
    """Last disruption or growth; the cooldown counts from here."""
    lineage: Incarnation = Incarnation(0)
    """The newest incarnation that finished a step. What older ones reached is past: it was lost
    then, or restored."""
    step_seen: Step = Step(0)
    """Newest finished step of the lineage known at the last change, also of hosts that are gone."""
    outage_since_s: float | None = None
    budget_learnt_s: float | None = None
    """How long drains took lately."""
    started_at_s: float | None = None
    finish: Finish | None = None
    untold: tuple[UntoldEvent, ...] = ()
    """Events of the newest plan that had any. Written by the reconciler and carried along by the
    core: a controller that starts tells them again under the same ids, for the one before it may
    have been killed between the decision and the telling."""
