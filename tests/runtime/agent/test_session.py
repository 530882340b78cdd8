"""The life of one host, event by event."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_values import directive, host, leave
from everstep.controller.api.ids import HostId, Incarnation, Rank, Step
from everstep.controller.api.wire import (
    Command,
    Directive,
    ExitCause,
    Held,
    HostPhase,
    RestoreFigures,
)
from everstep.runtime.agent import events
from everstep.runtime.agent import session as life
from everstep.runtime.agent.link import Assignment, Ending, EndKind, WorkerPhase
from everstep.runtime.agent.rendezvous import rank_of
from everstep.runtime.agent.session import Session
from everstep.runtime.agent.wire import Joined


def assignment(one: Directive, who: HostId, restore_step: int | None = None) -> Assignment:
    return Assignment(
        job=one.job,
        job_uid=one.job_uid,
        host=who,
        incarnation=one.incarnation,
        rank=rank_of(one, who) or Rank(0),
        process_count=len(one.members),
        members=one.members,
        coordinator_address="",
        local_address="10.0.0.0",
        token=one.token,
        settings=one.settings,
        restore_step=None if restore_step is None else Step(restore_step),
    )


class Host:
    """A session and what it asked for, in order."""

    def __init__(self, slice_id: int = 0) -> None:
        self.state = Session(host=host(slice_id), job_uid="uid-1")
        self.now_s = 100.0

    def feed(self, *happened: events.Event) -> list[events.Effect]:
        effects: list[events.Effect] = []
        for event in happened:
            self.state, found = life.step(self.state, event)
            effects += found
        return effects

    def see(self, one: Directive) -> list[events.Effect]:
        return self.feed(events.DirectiveSeen(directive=one, at_s=self.now_s))

    def run(self, one: Directive, restore_step: int | None = None) -> list[events.Effect]:
        """Come from anywhere to training in this directive's incarnation."""
        effects = self.see(one)
        n = one.incarnation
        joined = Joined(assignment=assignment(one, self.state.host, restore_step))
        figures = RestoreFigures(
            incarnation=n,
            step=Step(restore_step or 0),
            source="memory" if restore_step else "fresh",
        )
        return effects + self.feed(
            events.JoinAnswered(incarnation=n, joined=joined, at_s=self.now_s),
            events.WorkerStarted(incarnation=n, at_s=self.now_s),
            events.WorkerRestored(incarnation=n, figures=figures, at_s=self.now_s),
            events.WorkerFirstStep(incarnation=n, figures=figures, at_s=self.now_s),
        )

    def end(
        self,
        *,
        kind: EndKind | None = None,
        code: int | None = None,
        signal: int | None = None,
        step: int = 5,
        is_before_main: bool = False,
    ) -> list[events.Effect]:
        ending = None if kind is None else Ending(kind=kind, step=Step(step), message="words")
        return self.feed(
            events.WorkerEnded(
                incarnation=self.state.incarnation,
                ending=ending,
                code=code,
                signal=signal,
                step=Step(step),
                is_before_main=is_before_main,
                at_s=self.now_s,
            )
        )


def kinds(effects: list[events.Effect]) -> list[type[events.Effect]]:
    return [type(effect) for effect in effects if not isinstance(effect, events.Publish)]


def test_a_member_joins_restores_and_runs() -> None:
    one = Host()
    effects = one.run(directive(1, [0, 1]))
    assert kinds(effects) == [
        events.EndIncarnation,
        events.BeginJoin,
        events.LaunchWorker,
        events.KeepSpare,
    ]
    assert one.state.phase is HostPhase.RUNNING


@pytest.mark.parametrize("command", [Command.WAIT, Command.STOP])
def test_wait_and_stop_end_the_worker_at_once(command: Command) -> None:  # S2
    one = Host()
    one.run(directive(1, [0, 1]))
    effects = one.see(directive(1, [0, 1], sequence=101, command=command))
    assert kinds(effects)[0] is events.EndIncarnation
    assert one.state.worker is None
    saved = one.feed(events.HeldSaved(sequence=101, at_s=one.now_s))
    assert (events.Leave(code=0) in saved) == (command is Command.STOP)  # S3


def test_an_agent_leaves_after_what_it_holds_is_saved() -> None:  # S6
    one = Host()
    one.run(directive(1, [0, 1]))
    last = directive(1, [0, 1], sequence=101, command=Command.STOP)
    effects = one.see(last)
    assert events.SaveHeld(directive=last, is_leaving=True) in effects
    assert events.Leave not in kinds(effects)
    # What was begun on an earlier directive ends nothing.
    assert one.feed(events.HeldSaved(sequence=100, at_s=one.now_s)) == []
    assert events.Leave(code=0) in one.feed(events.HeldSaved(sequence=101, at_s=one.now_s))


def test_an_agent_that_saves_is_let_go_by_a_signal_and_by_a_fence() -> None:  # S6
    for event in (
        events.NoticeArrived(reason="SIGTERM", deadline_s=130.0, at_s=100.0),
        events.FenceSeen(newest=Incarnation(2), at_s=100.0),
    ):
        one = Host()
        one.run(directive(1, [0, 1]))
        one.see(directive(1, [0, 1], sequence=101, command=Command.STOP))
        assert kinds(one.feed(event))[-1] is events.Leave


def test_the_lead_of_a_waiting_job_saves_what_the_others_hold() -> None:
    lead, other = Host(0), Host(1)
    waiting = directive(1, [0, 1], sequence=101, command=Command.WAIT)
    for one in (lead, other):
        one.run(directive(1, [0, 1]))
    assert events.SaveHeld(directive=waiting, is_leaving=False) in lead.see(waiting)
    assert events.SaveHeld not in kinds(other.see(waiting))
    lead.feed(events.HeldSaved(sequence=100, at_s=lead.now_s))
    assert lead.state.save_settled is None
    lead.feed(events.HeldSaved(sequence=101, at_s=lead.now_s))
    assert lead.state.save_settled == 101


def test_a_worker_ended_because_of_a_wait_is_nobodys_news() -> None:  # S4
    one = Host()
    one.run(directive(1, [0, 1]))
    one.see(directive(1, [0, 1], sequence=101, command=Command.WAIT))
    assert one.end(signal=9) == []
    assert one.state.exit is None
    assert one.state.phase is HostPhase.WAITING


def test_a_newer_incarnation_ends_the_worker_and_joins() -> None:  # S2
    one = Host()
    one.run(directive(1, [0, 1]))
    effects = one.see(directive(2, [0, 1]))
    assert effects[0] == events.EndIncarnation(incarnation=Incarnation(1))
    assert kinds(effects) == [events.EndIncarnation, events.BeginJoin]
    # The end of the old worker is nobody's news.
    assert (
        one.feed(
            events.WorkerEnded(
                incarnation=Incarnation(1),
                ending=None,
                code=None,
                signal=9,
                step=Step(5),
                at_s=100.0,
            )
        )
        == []
    )  # S4
    assert one.state.exit is None


def test_an_older_or_foreign_directive_changes_nothing() -> None:  # S1
    one = Host()
    one.run(directive(3, [0, 1]))
    before = one.state
    foreign = msgspec.structs.replace(directive(9, [0]), job_uid="uid-2")
    for stale in (directive(2, [0, 1], sequence=999), directive(3, [0, 1], sequence=300), foreign):
        assert one.see(stale) == []
    assert one.state == before


def test_a_host_that_is_no_member_waits_and_leaves_only_after_a_notice() -> None:
    one = Host(slice_id=1)
    one.run(directive(1, [0, 1]))
    assert events.Leave not in kinds(one.see(directive(2, [0])))
    assert one.state.phase is HostPhase.WAITING
    two = Host(slice_id=1)
    two.run(directive(1, [0, 1]))
    two.feed(events.NoticeArrived(reason="SIGTERM", deadline_s=130.0, at_s=100.0))
    assert events.Leave(code=life.EXIT_RELEASED) in two.see(directive(2, [0]))


@pytest.mark.parametrize(
    ("end", "cause", "phase"),
    [
        pytest.param(
            {"kind": EndKind.DONE, "code": 0}, ExitCause.DONE, HostPhase.RUNNING, id="done"
        ),
        pytest.param({"kind": EndKind.LEFT, "code": 75}, ExitCause.LEFT, HostPhase.HELD, id="left"),
        pytest.param(
            {"kind": EndKind.USER_ERROR, "code": 1},
            ExitCause.USER_ERROR,
            HostPhase.ENDED,
            id="raised",
        ),
        pytest.param({"signal": 9}, ExitCause.SIGNALED, HostPhase.ENDED, id="killed"),
        pytest.param({"signal": 6}, ExitCause.CONSEQUENCE, HostPhase.ENDED, id="aborted by jax"),
        pytest.param({"code": 0}, ExitCause.EXITED_EARLY, HostPhase.ENDED, id="exit 0"),
        pytest.param({"code": 3}, ExitCause.EXITED_EARLY, HostPhase.ENDED, id="os._exit(3)"),
        pytest.param({"code": 1}, ExitCause.USER_ERROR, HostPhase.ENDED, id="exit 1"),
        pytest.param(
            {"code": 2, "is_before_main": True},
            ExitCause.USER_ERROR,
            HostPhase.ENDED,
            id="no such script",
        ),
        pytest.param(
            {"kind": EndKind.COLLECTIVE_ERROR, "code": 80},
            ExitCause.CONSEQUENCE,
            HostPhase.ENDED,
            id="another member is gone",
        ),
    ],
)
def test_ends_are_told_apart(end: dict[str, object], cause: ExitCause, phase: HostPhase) -> None:
    one = Host()
    one.run(directive(1, [0, 1]), restore_step=3)
    one.end(**end)  # type: ignore[arg-type]
    assert one.state.exit is not None
    assert (one.state.exit.cause, one.state.phase) == (cause, phase)
    assert (one.state.exit.step, one.state.exit.restored_step) == (5, 3)


@pytest.mark.parametrize(
    ("reached", "said", "restored"),
    [
        (WorkerPhase.CONNECTING, None, None),
        (WorkerPhase.PREPARING, None, None),
        (WorkerPhase.RESTORING, None, 3),
        (WorkerPhase.COMPILING, None, 3),
        # Its last words tell where it was; by then the phase is another one.
        (WorkerPhase.ENDING, WorkerPhase.PREPARING, None),
        (WorkerPhase.ENDING, WorkerPhase.RESTORING, 3),
        (WorkerPhase.ENDING, None, None),
    ],
)
def test_a_step_counts_as_restored_once_the_worker_began_to_restore_it(
    reached: WorkerPhase, said: WorkerPhase | None, restored: int | None
) -> None:
    one, directed = Host(), directive(1, [0, 1])
    one.see(directed)
    joined = Joined(assignment=assignment(directed, one.state.host, 3))
    one.feed(events.JoinAnswered(incarnation=Incarnation(1), joined=joined, at_s=100.0))
    ending = None
    if reached is WorkerPhase.ENDING:
        ending = Ending(kind=EndKind.USER_ERROR, step=Step(0), message="words", phase=said)
    one.feed(
        events.WorkerEnded(
            incarnation=Incarnation(1),
            ending=ending,
            code=None if ending is None else 1,
            signal=11 if ending is None else None,
            step=Step(0),
            phase=reached,
            at_s=100.0,
        )
    )
    assert one.state.exit is not None
    assert one.state.exit.restored_step == restored


def test_an_abort_of_a_process_alone_is_its_own_doing() -> None:
    one = Host()
    one.run(directive(1, [0]))
    one.end(signal=6)
    assert one.state.exit is not None
    assert one.state.exit.cause is ExitCause.SIGNALED


def test_what_breaks_after_the_notice_is_its_consequence() -> None:  # S5, G10
    one = Host()
    one.run(directive(1, [0, 1]))
    one.feed(events.NoticeArrived(reason="SIGTERM", deadline_s=130.0, at_s=100.0))
    one.end(kind=EndKind.USER_ERROR, code=1)
    assert one.state.exit is not None
    assert one.state.exit.cause is ExitCause.CONSEQUENCE
    assert one.state.exit.message == "after the notice: words"


def test_done_is_reported_only_when_the_last_step_is_durable() -> None:
    lead = Host()
    lead.run(directive(1, [0, 1]))
    assert events.MakeFinal(step=Step(5)) in lead.end(kind=EndKind.DONE, code=0)
    phases: list[HostPhase] = [lead.state.phase]
    for step in (4, 5):
        lead.feed(events.StepCommitted(step=Step(step), at_s=101.0))
        phases.append(lead.state.phase)
    assert phases == [HostPhase.RUNNING, HostPhase.RUNNING, HostPhase.DONE]
    member = Host(slice_id=1)
    member.run(directive(1, [0, 1]))
    member.feed(events.StepCommitted(step=Step(5), at_s=101.0))
    assert events.MakeFinal not in kinds(member.end(kind=EndKind.DONE, code=0))
    assert member.state.phase is HostPhase.DONE


def test_only_the_lead_serves_a_request_and_serves_it_once() -> None:
    for slice_id, serves in ((0, True), (1, False)):
        one = Host(slice_id=slice_id)
        one.run(directive(1, [0, 1]))
        request = leave(doomed=[1])
        asked = directive(1, [0, 1], sequence=101, request=request)
        effects = one.see(asked)
        assert (events.ServeRequest(request=request) in effects) == serves
        assert one.state.phase is HostPhase.HOLDING
        again = directive(1, [0, 1], sequence=102, request=request)
        assert events.ServeRequest not in kinds(one.see(again))


def test_a_changed_request_replaces_the_one_that_is_served() -> None:
    one = Host()
    one.run(directive(1, [0, 1, 2]))
    one.see(directive(1, [0, 1, 2], sequence=101, request=leave(number=1, doomed=[1])))
    second = leave(number=2, doomed=[1, 2])
    effects = one.see(directive(1, [0, 1, 2], sequence=102, request=second))
    assert events.ServeRequest(request=second) in effects
    late = Held(
        request_id="1-1", step=Step(4), where=(), durable=False, bytes_moved=0, complete=True
    )
    one.feed(events.RequestServed(incarnation=Incarnation(1), held=late, at_s=100.0))
    assert one.state.held is None


def test_a_withdrawn_request_is_dropped_and_training_goes_on() -> None:
    one = Host()
    one.run(directive(1, [0, 1]))
    one.see(directive(1, [0, 1], sequence=101, request=leave(doomed=[1])))
    effects = one.see(directive(1, [0, 1], sequence=102))
    assert kinds(effects) == [events.DropRequest]
    assert one.state.phase is HostPhase.RUNNING


def test_a_request_that_came_during_the_join_is_served_after_it() -> None:
    one = Host()
    one.see(directive(1, [0, 1]))
    asked = directive(1, [0, 1], sequence=101, request=leave(doomed=[1]))
    assert events.ServeRequest not in kinds(one.see(asked))
    joined = Joined(assignment=assignment(asked, host(0)))
    effects = one.feed(events.JoinAnswered(incarnation=Incarnation(1), joined=joined, at_s=101.0))
    assert kinds(effects) == [events.LaunchWorker, events.ServeRequest]


def test_a_worker_without_progress_is_killed_and_called_hung() -> None:  # G7
    one = Host()
    one.run(directive(1, [0, 1]))
    for second in range(60):
        assert one.feed(events.TimePassed(at_s=100.0 + second)) == []
    effects = one.feed(events.TimePassed(at_s=160.0))
    assert kinds(effects) == [events.KillWorker]
    assert one.feed(events.TimePassed(at_s=161.0)) == []
    one.end(signal=9)
    assert one.state.exit is not None
    assert one.state.exit.cause is ExitCause.HUNG
    assert "progressSeconds" in one.state.exit.message


def test_the_first_step_has_its_own_longer_grace() -> None:
    one = Host()
    one.see(directive(1, [0, 1]))
    joined = Joined(assignment=assignment(directive(1, [0, 1]), host(0)))
    one.feed(events.JoinAnswered(incarnation=Incarnation(1), joined=joined, at_s=100.0))
    for second in range(120):
        assert one.feed(events.TimePassed(at_s=100.0 + second)) == []
    assert kinds(one.feed(events.TimePassed(at_s=220.0))) == [events.KillWorker]


def test_time_in_which_the_agent_itself_did_not_run_proves_nothing() -> None:
    one = Host()
    one.run(directive(1, [0, 1]))
    one.feed(events.TimePassed(at_s=101.0))
    assert one.feed(events.TimePassed(at_s=1000.0)) == []
    assert list(life.deadlines(one.state)) == [100.0 + 899.0 + 60.0]


def test_a_lead_that_never_answers_is_named_by_the_others() -> None:  # G7
    one = Host(slice_id=1)
    one.see(directive(1, [0, 1]))
    for second in range(92):
        one.feed(events.TimePassed(at_s=100.0 + second))
    assert one.state.missing == (host(0),)


def test_a_fenced_agent_stops_its_worker_and_says_by_whom() -> None:  # G6
    one = Host()
    one.run(directive(1, [0, 1]))
    effects = one.feed(events.FenceSeen(newest=Incarnation(7), at_s=101.0))
    assert kinds(effects) == [events.EndIncarnation]
    assert one.state.fenced_by == 7
    assert one.state.phase is HostPhase.ENDED


def test_a_lost_coordinator_is_a_consequence_and_ends_the_worker() -> None:
    one = Host()
    one.run(directive(1, [0, 1]))
    effects = one.feed(events.CoordinatorLost(incarnation=Incarnation(1), at_s=101.0))
    assert kinds(effects) == [events.KillWorker]
    assert one.state.exit is not None
    assert one.state.exit.cause is ExitCause.CONSEQUENCE
    assert one.state.coordinator_lost_at_s == 101.0
    one.see(directive(2, [0, 1]))
    assert one.state.coordinator_lost_at_s is None


def test_a_coordinator_whose_end_is_seen_after_its_workers_abort_is_told_of_at_once() -> None:
    one = Host()
    one.run(directive(1, [0, 1]))
    one.end(signal=6)
    effects = one.feed(events.CoordinatorLost(incarnation=Incarnation(1), at_s=101.0))
    assert effects == [events.Publish()]
    assert one.state.exit is not None
    assert one.state.exit.signal == 6
    assert one.state.coordinator_lost_at_s == 101.0


def test_a_coordinator_lost_before_the_answer_starts_no_worker() -> None:
    one, directed = Host(), directive(1, [0, 1])
    one.see(directed)
    one.feed(events.CoordinatorLost(incarnation=Incarnation(1), at_s=101.0))
    assert one.state.phase is HostPhase.ENDED
    joined = Joined(assignment=assignment(directed, one.state.host))
    answered = events.JoinAnswered(incarnation=Incarnation(1), joined=joined, at_s=102.0)
    assert one.feed(answered) == []


@pytest.mark.parametrize("command", [Command.WAIT, Command.STOP])
def test_a_coordinator_that_ends_when_no_worker_is_wanted_is_no_loss(command: Command) -> None:
    one = Host()
    one.run(directive(1, [0, 1]))
    one.see(directive(1, [0, 1], sequence=101, command=command))
    assert one.feed(events.CoordinatorLost(incarnation=Incarnation(1), at_s=101.0)) == []
    assert one.state.coordinator_lost_at_s is None


def test_a_repeated_notice_ends_the_agent_only_when_nothing_is_lost_by_it() -> None:
    one = Host()
    one.run(directive(1, [0, 1]))
    notice = events.NoticeArrived(reason="SIGTERM", deadline_s=130.0, at_s=100.0)
    assert kinds(one.feed(notice)) == [events.TellLead]
    assert one.feed(notice) == []
    one.see(directive(1, [0, 1], sequence=101, request=leave(doomed=[0])))
    one.end(kind=EndKind.LEFT, code=75)
    assert events.Leave(code=life.EXIT_RELEASED) in one.feed(notice)


# Any order of events.

times = st.floats(0.0, 200.0)
incarnations = st.integers(0, 3).map(Incarnation)
directives = st.builds(
    lambda n, extra, slices, command, asks: directive(
        n,
        slices,
        sequence=n * 100 + extra,
        command=command,
        request=leave(n, number=extra, doomed=[1]) if asks else None,
    ),
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from([[0], [0, 1], [1], [1, 2]]),
    st.sampled_from([Command.RUN, Command.RUN, Command.WAIT]),
    st.booleans(),
)
any_event = st.one_of(
    st.builds(events.DirectiveSeen, directive=directives, at_s=times),
    st.builds(
        events.JoinAnswered,
        incarnation=incarnations,
        joined=st.sampled_from(
            [
                Joined(missing=(host(1),)),
                Joined(failed="words"),
                Joined(assignment=assignment(directive(1, [0, 1]), host(0))),
                Joined(assignment=assignment(directive(2, [0, 1]), host(0), 4)),
            ]
        ),
        at_s=times,
    ),
    st.builds(events.WorkerStarted, incarnation=incarnations, at_s=times),
    st.builds(
        events.WorkerProgressed,
        incarnation=incarnations,
        step=st.integers(0, 9).map(Step),
        at_s=times,
    ),
    st.builds(
        events.WorkerEnded,
        incarnation=incarnations,
        ending=st.none() | st.builds(Ending, kind=st.sampled_from(EndKind), step=st.just(Step(5))),
        code=st.sampled_from([0, 1, 3]),
        signal=st.none(),
        step=st.integers(0, 9).map(Step),
        at_s=times,
    ),
    st.builds(events.CoordinatorLost, incarnation=incarnations, at_s=times),
    st.builds(events.NoticeArrived, reason=st.just("SIGTERM"), deadline_s=times, at_s=times),
    st.builds(events.StepCommitted, step=st.integers(0, 9).map(Step), at_s=times),
    st.builds(events.FenceSeen, newest=incarnations, at_s=times),
    st.builds(events.TimePassed, at_s=times),
)


@given(st.lists(any_event, max_size=25))
def test_whatever_happens_in_whatever_order_the_invariants_hold(
    history: list[events.Event],
) -> None:
    one = Host()
    launched: set[Incarnation] = set()
    for event in history:
        before = one.state
        effects = one.feed(event)
        after = one.state
        assert after.incarnation >= before.incarnation  # S1
        assert after.step >= before.step
        if after.incarnation > before.incarnation and before.worker is not None:
            assert events.EndIncarnation(incarnation=before.incarnation) in effects  # S2
        for effect in effects:
            if isinstance(effect, events.Leave):
                assert effect.code != 0  # S3: nobody said stop.
            if isinstance(effect, events.LaunchWorker):
                assert after.incarnation not in launched, "one worker an incarnation"
                launched.add(after.incarnation)
            if isinstance(effect, events.ServeRequest):
                assert after.is_lead
        if after.exit is not None:
            assert after.exit.incarnation <= after.incarnation  # S4
        if after.phase is HostPhase.DONE:
            assert after.step_committed is not None


@pytest.mark.parametrize("is_final", [True, False])
def test_a_join_that_would_fail_again_in_the_same_way_is_not_tried_again(is_final: bool) -> None:
    one = Host()
    one.see(directive(1, [0, 1]))
    joined = Joined(failed="spec.checkpoint.uri is refused: a file", is_final=is_final)
    one.feed(events.JoinAnswered(incarnation=Incarnation(1), joined=joined, at_s=101.0))
    assert one.state.exit is not None
    assert one.state.exit.cause is ExitCause.STARTUP_FAILED
    assert one.state.exit.is_retryable is not is_final
    assert "spec.checkpoint.uri" in one.state.exit.message
