"""The life of one host, decided: `step(state, event)` gives the new state and what to do. Pure.

The supervisor feeds it everything that happens and performs the effects; deadlines are events too.
Numbered invariants: (S1) the incarnation only grows, and a directive or message of an older one
changes nothing; (S2) a worker belongs to the newest incarnation known: on a newer one, on `Wait`
and on `Stop` it is ended at once; (S3) the agent leaves with code 0 only after `Stop`; (S4) an exit
of a worker that the agent itself ended for the next incarnation is not reported; (S5) what follows
from this host's own notice is a consequence of it, whatever the program said; (S6) on `Stop` the
agent leaves after what only memory holds was brought to storage, or could not be in time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from everstep.controller.api.ids import HostId, Incarnation, Rank, Step
from everstep.controller.api.wire import (
    Command,
    Directive,
    ExitCause,
    Held,
    HostPhase,
    NoticeReport,
    Request,
    RequestKind,
    RestoreFigures,
    WorkerExit,
)
from everstep.runtime.agent.endings import NOT_RETRYABLE, classify
from everstep.runtime.agent.events import (
    BeginJoin,
    CoordinatorLost,
    DirectiveSeen,
    DropRequest,
    Effect,
    EndIncarnation,
    Event,
    FenceSeen,
    HeldSaved,
    JoinAnswered,
    KeepSpare,
    KillWorker,
    LaunchWorker,
    Leave,
    MakeFinal,
    NoticeArrived,
    Publish,
    RequestServed,
    SaveHeld,
    ServeRequest,
    StepCommitted,
    TellLead,
    TimePassed,
    WorkerEnded,
    WorkerFirstStep,
    WorkerProgressed,
    WorkerRestored,
    WorkerStarted,
)
from everstep.runtime.agent.link import EndKind, WorkerPhase
from everstep.runtime.agent.rendezvous import rank_of

NO_STEP = Step(0)
NO_INCARNATION = Incarnation(0)
EXIT_STOPPED = 0
EXIT_RELEASED = 143
"""Left after a notice, with nothing of the training finished: never 0, which a cluster would take
for success."""

_STAGES = {
    WorkerPhase.IMPORTING: "importing the program",
    WorkerPhase.CONNECTING: "connecting to the others",
    WorkerPhase.PREPARING: "in train, before run.restore",
    WorkerPhase.RESTORING: "restoring",
    WorkerPhase.COMPILING: "compiling, or in its first step",
    WorkerPhase.TRAINING: "training",
    WorkerPhase.ENDING: "ending",
}

BLIND_S = 5.0
"""A longer gap between two looks at the time means that this process itself did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What the agent knows of its worker, from assignment to end."""

    rank: Rank
    started_at_s: float
    step: Step = NO_STEP
    restored_step: Step | None = None
    is_training: bool = False
    """The first step of this incarnation is done."""
    progress_at_s: float
    hung: str = ""
    """Why the agent is ending it; empty while it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    host: HostId
    job_uid: str
    phase: HostPhase = HostPhase.STARTING
    phase_since_s: float = 0.0
    looked_at_s: float = 0.0
    directive: Directive | None = None
    incarnation: Incarnation = NO_INCARNATION
    join_by_s: float | None = None
    worker: WorkerView | None = None
    step: Step = NO_STEP
    """Newest step that a worker of this host finished, in any incarnation."""
    step_committed: Step | None = None
    step_final: Step | None = None
    """The worker is done at this step; it is durable when `step_committed` reaches it."""
    serving: str | None = None
    """Id of the request that the lead serves or has served."""
    exit: WorkerExit | None = None
    held: Held | None = None
    missing: tuple[HostId, ...] = ()
    coordinator_lost_at_s: float | None = None
    notice: NoticeReport | None = None
    restore: RestoreFigures | None = None
    fenced_by: Incarnation | None = None
    save_settled: int | None = None
    """Sequence of the newest directive to wait for which the save of what is held is over."""

    @property
    def is_lead(self) -> bool:
        return self.directive is not None and self.directive.lead == self.host

    @property
    def is_member(self) -> bool:
        return self.directive is not None and rank_of(self.directive, self.host) is not None

    @property
    def request(self) -> Request | None:
        return None if self.directive is None else self.directive.request


Result = tuple[Session, tuple[Effect, ...]]


def step(state: Session, event: Event) -> Result:
    """Take in one event."""
    match event:
        case DirectiveSeen():
            return _take_directive(state, event)
        case JoinAnswered():
            return _take_answer(state, event)
        case WorkerStarted():
            return _if_current(
                state, event.incarnation, _enter(state, HostPhase.RESTORING, event.at_s)
            )
        case WorkerRestored():
            return _take_restored(state, event)
        case WorkerFirstStep():
            return _take_first_step(state, event)
        case WorkerProgressed():
            return _take_progress(state, event), ()
        case WorkerEnded():
            return _take_end(state, event)
        case CoordinatorLost():
            return _take_coordinator_lost(state, event)
        case RequestServed():
            return _take_served(state, event)
        case NoticeArrived():
            return _take_notice(state, event)
        case StepCommitted():
            return _take_commit(state, event)
        case HeldSaved():
            return _take_saved(state, event)
        case FenceSeen():
            return _take_fence(state, event)
        case TimePassed():
            return _take_time(state, event.at_s)
        case _:
            assert_never(event)


def deadlines(state: Session) -> Iterator[float]:
    """Moments at which a `TimePassed` may change something."""
    if state.phase is HostPhase.JOINING and state.join_by_s is not None:
        yield state.join_by_s
    if state.worker is not None and state.directive is not None and not state.worker.hung:
        yield _hang_at_s(state.worker, state.directive)


def _enter(state: Session, phase: HostPhase, at_s: float) -> Session:
    if state.phase is phase:
        return state
    return replace(state, phase=phase, phase_since_s=at_s)


def _if_current(state: Session, incarnation: Incarnation, then: Session) -> Result:
    """S1: what happened in the name of another incarnation is past."""
    if incarnation != state.incarnation or state.worker is None:
        return state, ()
    return then, (Publish(),)


def _is_newer(state: Session, directive: Directive) -> bool:
    if directive.job_uid != state.job_uid or directive.incarnation < state.incarnation:
        return False
    return state.directive is None or directive.sequence > state.directive.sequence


def _take_directive(state: Session, event: DirectiveSeen) -> Result:
    directive = event.directive
    if not _is_newer(state, directive):
        return state, ()
    is_new_incarnation = directive.incarnation > state.incarnation
    previous = state.incarnation
    state = replace(state, directive=directive)
    match directive.command:
        case Command.STOP:
            # S6: it leaves when nothing that it holds is newer than what storage has.
            return replace(state, worker=None, join_by_s=None), (
                EndIncarnation(incarnation=previous),
                SaveHeld(directive=directive, is_leaving=True),
                Publish(),
            )
        case Command.WAIT:
            return _stand_by(state, event.at_s, previous)
        case Command.RUN if not state.is_member:
            state, effects = _stand_by(state, event.at_s, previous)
            # The slice was told that it must go, and nobody counts on it any more.
            leave = (Leave(code=EXIT_RELEASED),) if state.notice is not None else ()
            return state, (*effects, *leave)
        case Command.RUN if is_new_incarnation:
            return _join(state, directive, event.at_s, previous)
        case Command.RUN:
            return _heed_request(state, event.at_s)
        case _:
            assert_never(directive.command)


def _stand_by(state: Session, at_s: float, previous: Incarnation) -> Result:
    """Run no worker. How the last one ended stays in the report until the incarnation changes."""
    newest = state.directive.incarnation if state.directive is not None else previous
    if newest > previous:
        state = _forget_incarnation(state)
    state = replace(state, incarnation=newest, worker=None, join_by_s=None)
    effects: tuple[Effect, ...] = (EndIncarnation(incarnation=previous), Publish())
    if state.is_lead and state.directive is not None and state.directive.command is Command.WAIT:
        effects = (*effects, SaveHeld(directive=state.directive, is_leaving=False))
    return _enter(state, HostPhase.WAITING, at_s), effects


def _forget_incarnation(state: Session) -> Session:
    return replace(
        state,
        join_by_s=None,
        worker=None,
        step_final=None,
        serving=None,
        exit=None,
        held=None,
        missing=(),
        coordinator_lost_at_s=None,
        restore=None,
    )


def _join(state: Session, directive: Directive, at_s: float, previous: Incarnation) -> Result:
    state = _enter(_forget_incarnation(state), HostPhase.JOINING, at_s)
    state = replace(
        state,
        phase_since_s=at_s,
        incarnation=directive.incarnation,
        join_by_s=at_s + directive.settings.join_timeout_s,
        fenced_by=None,
    )
    return state, (
        EndIncarnation(incarnation=previous),
        BeginJoin(directive=directive),
        Publish(),
    )


def _heed_request(state: Session, at_s: float) -> Result:
    """A later directive of the same incarnation: a request came, changed, or was withdrawn."""
    request = state.request
    if request is None:
        if state.serving is None and state.phase is not HostPhase.HOLDING:
            return state, (Publish(),)
        if state.phase is HostPhase.HOLDING:
            state = _enter(state, HostPhase.RUNNING, at_s)
        state = replace(state, serving=None, held=None)
        return state, (DropRequest(), Publish())
    effects: tuple[Effect, ...] = (Publish(),)
    if request.kind is RequestKind.LEAVE and state.phase is HostPhase.RUNNING:
        state = _enter(state, HostPhase.HOLDING, at_s)
    if state.is_lead and state.serving != request.id and state.phase is not HostPhase.JOINING:
        state = replace(state, serving=request.id, held=None)
        effects = (ServeRequest(request=request), *effects)
    return state, effects


def _take_answer(state: Session, event: JoinAnswered) -> Result:
    if event.incarnation != state.incarnation or state.phase is not HostPhase.JOINING:
        return state, ()
    joined = event.joined
    if joined.assignment is not None:
        assignment = joined.assignment
        step_at_start = assignment.restore_step or Step(0)
        worker = WorkerView(
            rank=assignment.rank,
            started_at_s=event.at_s,
            step=step_at_start,
            restored_step=assignment.restore_step,
            progress_at_s=event.at_s,
        )
        state = replace(state, worker=worker, join_by_s=None, missing=())
        state = _enter(state, HostPhase.RESTORING, event.at_s)
        # A request may have come while the join was under way.
        state, effects = _heed_request(state, event.at_s) if state.request else (state, ())
        return state, (LaunchWorker(assignment=assignment), Publish(), *effects)
    if joined.missing:
        return replace(state, missing=joined.missing, join_by_s=None), (Publish(),)
    return _end(
        state,
        _exit(
            state,
            ExitCause.STARTUP_FAILED,
            message=joined.failed or "the lead gave no answer",
            at_s=event.at_s,
            is_retryable=not joined.is_final,
        ),
        event.at_s,
    )


def _take_restored(state: Session, event: WorkerRestored) -> Result:
    if event.incarnation != state.incarnation or state.worker is None:
        return state, ()
    step_restored = event.figures.step
    worker = replace(state.worker, step=step_restored, progress_at_s=event.at_s)
    return replace(state, worker=worker, restore=event.figures), (Publish(),)


def _take_first_step(state: Session, event: WorkerFirstStep) -> Result:
    if event.incarnation != state.incarnation or state.worker is None:
        return state, ()
    worker = replace(state.worker, is_training=True, progress_at_s=event.at_s)
    state = replace(state, worker=worker, restore=event.figures or state.restore)
    if state.phase is HostPhase.RESTORING:
        is_leaving = state.request is not None and state.request.kind is RequestKind.LEAVE
        state = _enter(state, HostPhase.HOLDING if is_leaving else HostPhase.RUNNING, event.at_s)
    return state, (Publish(), KeepSpare())


def _take_progress(state: Session, event: WorkerProgressed) -> Session:
    if event.incarnation != state.incarnation or state.worker is None:
        return state
    if event.step <= state.worker.step:
        return state
    worker = replace(state.worker, step=event.step, progress_at_s=event.at_s)
    return replace(state, worker=worker, step=max(state.step, event.step))


def _take_end(state: Session, event: WorkerEnded) -> Result:
    if event.incarnation != state.incarnation or state.exit is not None:
        return state, ()  # S4
    directive = state.directive
    if directive is None or not state.is_member or directive.command is not Command.RUN:
        # Told to run no worker, the agent ended it itself: that is no exit to report.
        return state, ()
    process_count = sum(len(member.hosts) for member in directive.members)
    cause, message = classify(event, process_count=process_count)
    if state.worker is not None and state.worker.hung and cause is not ExitCause.DONE:
        cause, message = ExitCause.HUNG, state.worker.hung
        if not state.worker.is_training:
            message += f"; it was {_STAGES[event.phase]}"
    is_own_doing = cause in (ExitCause.DONE, ExitCause.LEFT, ExitCause.HUNG)
    if state.notice is not None and not is_own_doing and cause is not ExitCause.CONSEQUENCE:
        cause, message = ExitCause.CONSEQUENCE, f"after the notice: {message}"  # S5
    last = max(event.step, state.worker.step if state.worker is not None else Step(0))
    if event.ending is not None and event.ending.kind in (EndKind.DONE, EndKind.LEFT):
        last = max(last, event.ending.step)
    state = replace(state, step=max(state.step, last))
    ended = WorkerExit(
        incarnation=event.incarnation,
        cause=cause,
        rank=_own_rank(state),
        code=event.code,
        signal=event.signal,
        message=message,
        at_s=event.at_s,
        step=last,
        restored_step=_restored_step(state, event),
        is_before_main=event.is_before_main,
        stage=event.phase,
        is_retryable=cause not in NOT_RETRYABLE
        and not (event.is_before_main and event.code not in (None, 1)),
    )
    return _end(state, ended, event.at_s)


def _restored_step(state: Session, event: WorkerEnded) -> Step | None:
    """The assigned step, if the worker came so far as to restore it."""
    if state.worker is None:
        return None
    reached = event.phase
    if event.ending is not None and event.ending.phase is not None:
        reached = event.ending.phase
    has_begun = WorkerPhase.RESTORING <= reached < WorkerPhase.ENDING
    return state.worker.restored_step if has_begun or state.restore is not None else None


def _own_rank(state: Session) -> Rank:
    rank = rank_of(state.directive, state.host) if state.directive is not None else None
    return Rank(0) if rank is None else rank


def _exit(
    state: Session, cause: ExitCause, *, message: str, at_s: float, is_retryable: bool = True
) -> WorkerExit:
    return WorkerExit(
        incarnation=state.incarnation,
        cause=cause,
        rank=_own_rank(state),
        message=message,
        at_s=at_s,
        step=state.step,
        restored_step=state.worker.restored_step if state.worker is not None else None,
        is_retryable=is_retryable,
    )


def _end(state: Session, ended: WorkerExit, at_s: float) -> Result:
    state = replace(state, exit=ended, worker=None, join_by_s=None)
    match ended.cause:
        case ExitCause.DONE:
            # The phase stays until the last step is durable.
            state = replace(state, step_final=ended.step)
            return _finish_if_durable(state, at_s, (Publish(),))
        case ExitCause.LEFT:
            return _enter(state, HostPhase.HELD, at_s), (Publish(),)
        case _:
            return _enter(state, HostPhase.ENDED, at_s), (Publish(),)


def _finish_if_durable(state: Session, at_s: float, effects: tuple[Effect, ...]) -> Result:
    if state.step_final is None:
        return state, effects
    if state.step_committed is not None and state.step_committed >= state.step_final:
        return _enter(state, HostPhase.DONE, at_s), (Publish(), *effects)
    if state.is_lead:
        return state, (MakeFinal(step=state.step_final), *effects)
    return state, effects


def _take_coordinator_lost(state: Session, event: CoordinatorLost) -> Result:
    is_wanted = state.directive is not None and state.directive.command is Command.RUN
    if event.incarnation != state.incarnation or not is_wanted:
        return state, ()
    state = replace(state, coordinator_lost_at_s=event.at_s)
    if state.exit is not None:
        # The worker was the first to notice.
        return state, (Publish(),)
    message = "the coordination service ended; every member has lost its connection"
    ended = _exit(state, ExitCause.CONSEQUENCE, message=message, at_s=event.at_s)
    state, effects = _end(replace(state, exit=None), ended, event.at_s)
    return state, (KillWorker(incarnation=event.incarnation, why=message), *effects)


def _take_served(state: Session, event: RequestServed) -> Result:
    if event.incarnation != state.incarnation or event.held.request_id != state.serving:
        return state, ()
    return replace(state, held=event.held), (Publish(),)


def _take_notice(state: Session, event: NoticeArrived) -> Result:
    if state.directive is None or not state.is_member or state.directive.command is Command.STOP:
        return state, (EndIncarnation(incarnation=state.incarnation), Leave(code=EXIT_RELEASED))
    if state.notice is not None:
        # Repeated: somebody wants this process gone. It goes when nothing is lost by it.
        if state.phase in (HostPhase.HELD, HostPhase.WAITING, HostPhase.ENDED, HostPhase.DONE):
            return state, (
                EndIncarnation(incarnation=state.incarnation),
                Leave(code=EXIT_RELEASED),
            )
        return state, ()
    notice = NoticeReport(reason=event.reason, deadline_s=event.deadline_s, at_s=event.at_s)
    return replace(state, notice=notice), (Publish(), TellLead(notice=notice))


def _take_commit(state: Session, event: StepCommitted) -> Result:
    if state.step_committed is not None and event.step <= state.step_committed:
        return state, ()
    state = replace(state, step_committed=event.step)
    if state.step_final is None or event.step < state.step_final:
        return state, ()
    return _enter(state, HostPhase.DONE, event.at_s), (Publish(),)


def _take_saved(state: Session, event: HeldSaved) -> Result:
    directive = state.directive
    if directive is None or directive.sequence != event.sequence:
        return state, ()
    if directive.command is not Command.STOP:
        return replace(state, save_settled=event.sequence), (Publish(),)
    return state, (Publish(), Leave(code=EXIT_STOPPED))


def _take_fence(state: Session, event: FenceSeen) -> Result:
    if state.fenced_by is not None:
        return state, ()
    message = f"incarnation {event.newest} has the run's storage"
    ended = _exit(state, ExitCause.CONSEQUENCE, message=message, at_s=event.at_s)
    state = replace(state, fenced_by=event.newest, worker=None, exit=ended, join_by_s=None)
    state = _enter(state, HostPhase.ENDED, event.at_s)
    effects: tuple[Effect, ...] = (EndIncarnation(incarnation=state.incarnation), Publish())
    if state.directive is not None and state.directive.command is Command.STOP:
        effects = (*effects, Leave(code=EXIT_STOPPED))  # S6: what is held here is past.
    return state, effects


def _hang_at_s(worker: WorkerView, directive: Directive) -> float:
    settings = directive.settings
    if worker.is_training:
        return worker.progress_at_s + settings.progress_timeout_s
    return worker.started_at_s + settings.start_grace_s


def _take_time(state: Session, at_s: float) -> Result:
    gap_s = at_s - state.looked_at_s
    is_blind = state.looked_at_s > 0 and gap_s > BLIND_S
    state = replace(state, looked_at_s=at_s)
    worker, directive = state.worker, state.directive
    if is_blind and worker is not None:
        # This process was stopped (or the machine was); the time in between proves nothing.
        worker = replace(
            worker,
            started_at_s=worker.started_at_s + gap_s,
            progress_at_s=worker.progress_at_s + gap_s,
        )
        state = replace(state, worker=worker)
    if worker is not None and directive is not None and not worker.hung:
        if at_s >= _hang_at_s(worker, directive):
            why = _describe_hang(worker, directive)
            state = replace(state, worker=replace(worker, hung=why))
            return state, (KillWorker(incarnation=state.incarnation, why=why),)
    if state.phase is HostPhase.JOINING and state.join_by_s is not None and not state.is_lead:
        # The lead itself answers with who is missing; a lead that does not answer is missing.
        lead = directive.lead if directive is not None else None
        if at_s >= state.join_by_s + 1.0 and lead is not None:
            return replace(state, missing=(lead,), join_by_s=None), (Publish(),)
    return state, ()


def _describe_hang(worker: WorkerView, directive: Directive) -> str:
    settings = directive.settings
    if worker.is_training:
        return (
            f"no step after step {worker.step} for {settings.progress_timeout_s:g} s "
            "(spec.runtime.timeouts.progressSeconds)"
        )
    return f"no first step within {settings.start_grace_s:g} s (spec.runtime.timeouts.startSeconds)"
