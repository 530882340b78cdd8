"""What happens to a host, and what its session wants done about it. Pure.

`session` turns the first into the second; the supervisor feeds and performs. Both unions are
closed.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.controller.api.ids import Incarnation, Step
from everstep.controller.api.wire import Directive, Held, NoticeReport, Request, RestoreFigures
from everstep.runtime.agent.link import Assignment, Ending, WorkerPhase
from everstep.runtime.agent.wire import Joined

# What happens.


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectiveSeen:
    directive: Directive
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswered:
    incarnation: Incarnation
    joined: Joined
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted:
    """The process exists; it has its assignment."""

    incarnation: Incarnation
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRestored:
    incarnation: Incarnation
    figures: RestoreFigures
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFirstStep:
    incarnation: Incarnation
    figures: RestoreFigures | None
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgressed:
    incarnation: Incarnation
    step: Step
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded:
    """The worker, or the program before it could be one, has ended. `step` as the words say."""

    incarnation: Incarnation
    ending: Ending | None
    code: int | None
    signal: int | None
    step: Step
    message: str = ""
    is_before_main: bool = False
    phase: WorkerPhase = WorkerPhase.IMPORTING
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLost:
    incarnation: Incarnation
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestServed:
    """Lead only: the request is complete, or has failed."""

    incarnation: Incarnation
    held: Held
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeArrived:
    """SIGTERM, or the metadata server. `deadline_s` is Unix time."""

    reason: str
    deadline_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    step: Step
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSaved:
    """What this host held is on storage, or cannot be brought there in time."""

    sequence: int
    """Of the directive on which it was begun."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceSeen:
    """Storage is at a newer incarnation, or at another job's."""

    newest: Incarnation
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    at_s: float


Event = (
    DirectiveSeen
    | JoinAnswered
    | WorkerStarted
    | WorkerRestored
    | WorkerFirstStep
    | WorkerProgressed
    | WorkerEnded
    | CoordinatorLost
    | RequestServed
    | NoticeArrived
    | StepCommitted
    | HeldSaved
    | FenceSeen
    | TimePassed
)


# What to do.


@dataclass(frozen=True, slots=True, kw_only=True)
class EndIncarnation:
    """End the worker, the coordinator and everything that was begun in this incarnation's name."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginJoin:
    directive: Directive


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchWorker:
    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSpare:
    """Fork the next worker ahead of time: this one trains, and a loss may come any moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    incarnation: Incarnation
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """Lead only: agree, hold, evacuate, and report `RequestServed`."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRequest:
    """The request is withdrawn: go on as if it had never been."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TellLead:
    """Hand this host's notice to the lead, in case the controller is away."""

    notice: NoticeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeFinal:
    """Lead only: make the last step durable, then report `StepCommitted` to all."""

    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHeld:
    """No worker runs any more: what only memory holds goes to storage, then `HeldSaved`."""

    directive: Directive
    is_leaving: bool
    """The job has ended: this memory is given up right afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Something that the controller waits for has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """End this agent and all its processes."""

    code: int


Effect = (
    EndIncarnation
    | BeginJoin
    | LaunchWorker
    | KillWorker
    | KeepSpare
    | ServeRequest
    | DropRequest
    | TellLead
    | MakeFinal
    | SaveHeld
    | Publish
    | Leave
)
