"""Every small situation: what is seen × where the job is × what the spec says.

The space is small enough to be enumerated: up to four slices, each in one of a handful of states,
every stage of the ledger, every policy. Whatever it is, the plan keeps the invariants, is pure,
says the same again once it is carried out, and never leaves the job waiting for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import product

import pytest
from msgspec.structs import replace

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step
from everstep.controller.api.reasons import Reason
from everstep.controller.api.spec import JobSpec
from everstep.controller.api.status import JobStatus
from everstep.controller.api.wire import (
    Command,
    ExitCause,
    HostPhase,
    Report,
    RestoreFigures,
    WorkerExit,
)
from everstep.controller.core.invariants import find_violations
from everstep.controller.core.ledger import (
    Budgets,
    Finish,
    Incident,
    IncidentKind,
    Ledger,
    Stage,
    Standby,
    Turnover,
)
from everstep.controller.core.model import (
    Capacity,
    HostView,
    Notice,
    NoticeClass,
    Plan,
    ProcessState,
    SliceView,
    StartSlice,
    View,
    WriteDirective,
)
from everstep.controller.core.plan import plan

NOW_S = 5_000.0
UID = "uid"


class Seen(Enum):
    """What is seen of one slice."""

    TRAINING = "training"
    SILENT = "silent"
    EXITED = "exited"
    GONE = "gone"
    DOOMED = "doomed"
    KILLED = "worker killed"
    SIBLING = "worker ended as a consequence"
    DONE = "done"
    WAITING = "waiting"


def report(id_: SliceId, seen: Seen, incarnation: Incarnation) -> Report:
    age_s = 10.0 if seen is Seen.SILENT else 0.1
    phases = {
        Seen.WAITING: HostPhase.WAITING,
        Seen.DONE: HostPhase.DONE,
        Seen.KILLED: HostPhase.ENDED,
        Seen.SIBLING: HostPhase.ENDED,
    }
    causes = {Seen.KILLED: ExitCause.SIGNALED, Seen.SIBLING: ExitCause.CONSEQUENCE}
    ended = None
    if seen in causes:
        ended = WorkerExit(
            incarnation=incarnation,
            cause=causes[seen],
            rank=Rank(0),
            signal=9 if seen is Seen.KILLED else None,
            at_s=NOW_S - 2,
            step=Step(40),
            restored_step=Step(30),
        )
    return Report(
        job_uid=UID,
        host=HostId(id_, 0),
        address=f"127.64.{id_ + 1}.1",
        port=7070,
        pid=10 + id_,
        sequence=9,
        renewed_at_s=NOW_S - age_s,
        directive_seen=1,
        incarnation=incarnation,
        phase=phases.get(seen, HostPhase.RUNNING),
        phase_since_s=NOW_S - 20,
        step=Step(40),
        step_snapshot=Step(40),
        exit=ended,
        restore=RestoreFigures(
            incarnation=incarnation,
            step=Step(30),
            source="memory",
            first_step_s=0.1,
            first_step_at_s=NOW_S - 30,
        ),
    )


@cache
def slice_view(id_: SliceId, seen: Seen, incarnation: Incarnation) -> SliceView:
    gone = seen in (Seen.EXITED, Seen.GONE)
    host = HostView(
        host=0,
        process=ProcessState.EXITED if gone else ProcessState.ALIVE,
        started_for=Incarnation(1),
        address=f"127.64.{id_ + 1}.1",
        port=7070,
        exited_at_s=NOW_S - 0.5 if gone else None,
        report=report(id_, seen, incarnation),
    )
    notice = None
    if seen is Seen.DOOMED:
        notice = Notice(
            id=f"n{id_}",
            slice=id_,
            notice_class=NoticeClass.IMMINENT,
            deadline_s=NOW_S + 15,
            first_seen_s=NOW_S - 1,
        )
    return SliceView(
        id=id_,
        capacity=Capacity.GONE if seen is Seen.GONE else Capacity.AVAILABLE,
        notice=notice,
        hosts=(host,),
        available_since_s=NOW_S - 1000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the job is, as far as the ledger says."""

    name: str
    ledger: Ledger


def turnover(reason: Reason, *, started: bool, lost: bool) -> Turnover:
    return Turnover(
        reason=reason,
        slice=SliceId(0),
        cause_at_s=NOW_S - 40,
        decided_at_s=NOW_S - 39,
        halted_at_s=NOW_S - 39,
        from_slices=4,
        count_wanted=4,
        lost=lost,
        wait_until_s=NOW_S + 3,
        started_at_s=NOW_S - 38 if started else None,
    )


def standings(count: int) -> Iterator[Standing]:
    """Every stage, with its variants."""
    members = tuple(SliceId(id_) for id_ in range(count))
    running = Ledger(
        incarnation=Incarnation(3),
        members=members,
        stage=Stage.RUN,
        incarnation_at_s=NOW_S - 100,
        trained_since_s=NOW_S - 90,
        lineage=Incarnation(3),
        desired=count,
        started_at_s=NOW_S - 500,
        requests=1,
    )
    waiting = replace(
        running,
        stage=Stage.WAIT,
        trained_since_s=None,
        turnover=turnover(Reason.SLICE_LOST, started=False, lost=True),
    )
    yield Standing(name="new", ledger=Ledger())
    yield Standing(name="running", ledger=running)
    yield Standing(
        name="joining",
        ledger=replace(
            running,
            trained_since_s=None,
            fresh=members[:1],
            turnover=turnover(Reason.HOST_LOST, started=True, lost=True),
        ),
    )
    for kind in IncidentKind:
        yield Standing(
            name=f"draining {kind.value}",
            ledger=replace(
                running,
                incident=Incident(
                    kind=kind,
                    number=1,
                    doomed=members[-1:] if kind is IncidentKind.NOTICE else (),
                    cause_at_s=NOW_S - 2,
                    decided_at_s=NOW_S - 1,
                    deadline_s=NOW_S + 5,
                ),
            ),
        )
    yield Standing(name="waiting", ledger=waiting)
    yield Standing(name="waiting for nobody", ledger=replace(waiting, members=()))
    yield Standing(
        name="backing off",
        ledger=replace(
            waiting,
            turnover=replace(
                turnover(Reason.USER_ERROR, started=False, lost=False), not_before_s=NOW_S + 4
            ),
        ),
    )
    storm = Budgets(
        disruptions=20, disrupted_at_s=tuple(NOW_S - 1200 + 60 * minute for minute in range(20))
    )
    yield Standing(name="running in a storm", ledger=replace(running, budgets=storm))
    yield Standing(name="waiting in a storm", ledger=replace(waiting, budgets=storm))
    yield Standing(
        name="nobody left in a storm", ledger=replace(waiting, budgets=storm, members=())
    )
    if count > 1:
        yield Standing(
            name="growing",
            ledger=replace(
                running,
                members=members[:-1],
                standby=(Standby(id=members[-1], since_s=NOW_S - 5),),
            ),
        )
    finish = Finish(succeeded=True, reason=Reason.COMPLETED, message="done", at_s=NOW_S - 60)
    yield Standing(name="finished", ledger=replace(running, stage=Stage.FINISHED, finish=finish))


POLICIES = ("WaitForReplacement", "WaitThenShrink", "ShrinkImmediately", "Fail")


def specs(count: int) -> Iterator[JobSpec]:
    for policy in POLICIES:
        yield make_spec(desired=count, on_loss=policy, slices={"min": max(1, count - 2)})


def situation(seen: tuple[Seen, ...], spec: JobSpec, *, suspend: bool, deleting: bool) -> View:
    return View(
        job="job",
        job_uid=UID,
        generation=1,
        spec=replace(spec, suspend=suspend),
        is_deleting=deleting,
        slices=tuple(slice_view(SliceId(id_), one, Incarnation(3)) for id_, one in enumerate(seen)),
        directive=None,
        created_at_s=0.0,
    )


def decide(view: View, ledger: Ledger, status: JobStatus | None = None) -> Plan:
    return plan(view, ledger, status or JobStatus(), NOW_S, fresh_token="fresh")


EVERY = tuple(Seen)
RARE = ("new", "finished", "draining Checkpoint", "draining Deadline", "draining ScaleDown")
"""Standings whose answer does not depend on how many slices there are."""
DECISIVE = (Seen.TRAINING, Seen.SILENT, Seen.EXITED, Seen.DOOMED, Seen.KILLED)


@pytest.mark.parametrize(("count", "states"), [(1, EVERY), (2, EVERY), (3, DECISIVE)])
def test_every_small_situation_keeps_the_invariants(count: int, states: tuple[Seen, ...]) -> None:
    """All slice states × all standings × all policies."""
    judged = 0
    where = [one for one in standings(count) if count < 3 or one.name not in RARE]
    for seen, standing, spec in product(product(states, repeat=count), where, tuple(specs(count))):
        view = situation(seen, spec, suspend=False, deleting=False)
        _judge(view, standing, seen)
        judged += 1
    assert judged == len(states) ** count * len(where) * len(POLICIES)


def test_four_slices_under_every_policy_keep_the_invariants() -> None:
    """Four slices in the states that matter for choosing members."""
    states = (Seen.TRAINING, Seen.EXITED, Seen.GONE, Seen.DOOMED)
    chosen = ("running", "waiting", "joining", "draining Notice")
    for seen, standing, spec in product(
        product(states, repeat=4),
        tuple(one for one in standings(4) if one.name in chosen),
        (make_spec(desired=4, slices={"min": 1, "allowedCounts": [1, 2, 4]}), *specs(4)),
    ):
        _judge(situation(seen, spec, suspend=False, deleting=False), standing, seen)


def test_equal_arguments_give_equal_plans() -> None:
    for seen, standing in product(product(Seen, repeat=2), tuple(standings(2))):
        view = situation(seen, make_spec(desired=2), suspend=False, deleting=False)
        assert decide(view, standing.ledger) == decide(view, standing.ledger)


@pytest.mark.parametrize(
    ("suspend", "deleting"), [(True, False), (False, True), (True, True)], ids=str
)
def test_suspension_and_deletion_are_sound_in_every_situation(
    *, suspend: bool, deleting: bool
) -> None:
    for seen, standing in product(product(Seen, repeat=2), tuple(standings(2))):
        view = situation(seen, make_spec(desired=2), suspend=suspend, deleting=deleting)
        made = _judge(view, standing, seen)
        began = made.ledger.incarnation > standing.ledger.incarnation
        # A worker that was killed meanwhile is no reason to start what is to end.
        assert not (began and made.ledger.stage is Stage.RUN), (standing.name, seen)


def _judge(view: View, standing: Standing, seen: tuple[Seen, ...]) -> Plan:
    where = f"{standing.name} {[one.value for one in seen]} {view.spec.elasticity.on_loss.value}"
    made = decide(view, standing.ledger)
    assert find_violations(view, standing.ledger, made) == (), where
    again = decide(view, made.ledger, made.status)
    # (7): once persisted, and with nothing new seen, a plan decides nothing further, but for what
    # has to be seen twice: a stopped slice that may now be started.
    if again.ledger != made.ledger:
        third = decide(view, again.ledger, again.status)
        assert third.ledger == again.ledger, f"does not settle: {where}"
    _judge_liveness(made, where)
    _judge_storm(standing, made, where)
    _judge_verdict(view, standing, made, seen, where)
    return made


def _judge_liveness(made: Plan, where: str) -> None:
    """(5): nothing is waited for without a deadline, unless it is capacity or a person."""
    if made.ledger.incident is not None:
        assert made.requeue_after_s is not None, where
    turnover_ = made.ledger.turnover
    if made.ledger.stage is Stage.WAIT and turnover_ is not None:
        if turnover_.not_before_s > NOW_S:
            assert made.requeue_after_s is not None, where


def _judge_storm(standing: Standing, made: Plan, where: str) -> None:
    """(9): in a storm nothing is started, and what is waited for has an end."""
    if not standing.name.endswith("in a storm"):
        return
    assert not [one for one in made.actions if isinstance(one, StartSlice)], where
    assert set(made.ledger.members) <= set(standing.ledger.members), where
    ready = next((one for one in made.status.conditions if one.type == "Ready"), None)
    if made.ledger.stage is Stage.WAIT and ready is not None:
        if ready.reason == Reason.DISRUPTION_STORM.value:
            assert made.requeue_after_s is not None, where
            assert made.status.wait_until_s is not None, where
            assert NOW_S < made.status.wait_until_s <= NOW_S + 3600, where


def _judge_verdict(
    view: View, standing: Standing, made: Plan, seen: tuple[Seen, ...], where: str
) -> None:
    """The decision itself, told again in the plainest words for the simplest standing."""
    if standing.name != "running" or made.ledger.finish is not None:
        return
    if view.spec.suspend or view.is_deleting:
        return
    silent = [one for one in seen if one is Seen.SILENT]
    is_outage = len(silent) >= 2 and 2 * len(silent) > len(seen)
    lost = {
        id_
        for id_, one in enumerate(seen)
        if one in (Seen.EXITED, Seen.GONE) or (one is Seen.SILENT and not is_outage)
    }
    if is_outage:
        assert made.ledger.members == standing.ledger.members, where
        return
    if all(one in (Seen.TRAINING, Seen.DONE, Seen.WAITING) for one in seen):
        assert made.ledger.incarnation == 3, where
        assert made.ledger.stage is Stage.RUN, where
    if lost:
        assert lost.isdisjoint(made.ledger.members) or made.ledger.incarnation > 3, where
        assert made.ledger.budgets.disruptions >= len(lost), where
        if Seen.KILLED not in seen:
            # A worker that was killed first is a failure of its own.
            assert made.ledger.budgets.failures == 0, where
    directives = [one.directive for one in made.actions if isinstance(one, WriteDirective)]
    for directive in directives:
        if directive.command is Command.RUN:
            assert {member.slice for member in directive.members} == set(made.ledger.members)
