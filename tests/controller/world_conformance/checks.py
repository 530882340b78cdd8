"""The conformance suite of `core.model.World`.

A world's test module makes a fixture `rig` (a `Rig`) and says `from … .checks import *`.
"""

from __future__ import annotations

from typing import Protocol

import pytest
from msgspec.structs import replace

from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step
from everstep.controller.api.reasons import Reason
from everstep.controller.api.settings import resolve_settings
from everstep.controller.api.status import JobStatus
from everstep.controller.api.wire import Command, Directive, Member, MemberHost
from everstep.controller.core.ledger import Ledger
from everstep.controller.core.model import (
    Capacity,
    EmitEvent,
    Observation,
    ProcessState,
    RemoveJob,
    SliceView,
    StartSlice,
    StopSlice,
    World,
    WriteDirective,
)
from waiting import wait_for

__all__ = [
    "test_a_directive_that_is_not_newer_is_never_written",
    "test_a_host_of_another_incarnation_outlives_the_stop_of_an_older_one",
    "test_a_job_is_seen_with_all_its_slices_before_anything_was_started",
    "test_a_killed_agent_is_seen_as_exited_until_it_is_stopped",
    "test_a_precondition_is_good_for_one_write",
    "test_a_removed_job_is_gone_with_its_agents",
    "test_a_slice_that_is_gone_is_not_started",
    "test_a_stopped_slice_can_be_started_again",
    "test_an_event_shows_once_however_often_it_is_told",
    "test_an_unknown_job_is_not_there",
    "test_progress_is_observed_and_costs_no_precondition",
    "test_progress_of_an_overtaken_look_is_not_shown",
    "test_starting_twice_starts_once",
    "test_what_was_persisted_is_observed",
]

JOB = "llm"
FIRST, SECOND = Incarnation(1), Incarnation(2)


class Rig(Protocol):
    """What the suite needs of a world beside the seam itself."""

    world: World
    """Holds one job `llm`: 2 slices of 2 hosts, nothing started."""

    def settle(self) -> None:
        """Let the world finish what began (a driver's `tend`)."""
        ...

    def agents(self) -> dict[HostId, tuple[int, ...]]:
        """The agent processes that live now, found without asking the world."""
        ...

    def kill_agent(self, host: HostId) -> None:
        """End an agent from outside, at once."""
        ...

    def take_capacity(self, slice_id: SliceId) -> None:
        """Make a slice Gone."""
        ...

    def events(self) -> list[str]:
        """Ids of the events that people see."""
        ...


def _observe(rig: Rig) -> Observation:
    found = rig.world.observe(JOB)
    assert found is not None
    return found


def _slice(rig: Rig, number: int) -> SliceView:
    return next(one for one in _observe(rig).view.slices if one.id == number)


def _states(rig: Rig, number: int) -> set[ProcessState]:
    rig.settle()
    return {host.process for host in _slice(rig, number).hosts}


def _start(rig: Rig, number: int, incarnation: Incarnation = FIRST) -> None:
    rig.world.perform(JOB, StartSlice(slice=SliceId(number), incarnation=incarnation))


def _stop(rig: Rig, number: int, incarnation: Incarnation = FIRST, grace_s: float = 0.0) -> None:
    stop = StopSlice(
        slice=SliceId(number),
        incarnation=incarnation,
        reason=Reason.SLICE_LOST,
        grace_s=grace_s,
    )
    rig.world.perform(JOB, stop)


def _wait_for_states(rig: Rig, number: int, state: ProcessState) -> None:
    wait_for(lambda: _states(rig, number) == {state}, what=f"slice {number} to be {state.value}")


def _directive(rig: Rig, sequence: int) -> Directive:
    view = _observe(rig).view
    members = tuple(
        Member(
            slice=one.id,
            rank=Rank(rank),
            hosts=tuple(
                MemberHost(host=host.host, address=host.address, port=host.port)
                for host in one.hosts
            ),
        )
        for rank, one in enumerate(view.slices)
    )
    return Directive(
        job=view.job,
        job_uid=view.job_uid,
        sequence=sequence,
        incarnation=FIRST,
        command=Command.WAIT,
        members=members,
        lead=HostId(slice=SliceId(0), host=0),
        token="secret",
        settings=resolve_settings(view.spec),
    )


def test_a_job_is_seen_with_all_its_slices_before_anything_was_started(rig: Rig) -> None:
    assert rig.world.jobs() == (JOB,)
    seen = _observe(rig)
    assert seen.view.job == JOB
    assert not seen.view.is_deleting
    assert seen.view.directive is None
    assert [one.id for one in seen.view.slices] == [0, 1]
    for one in seen.view.slices:
        assert one.capacity is Capacity.AVAILABLE
        assert one.notice is None
        assert [host.host for host in one.hosts] == [0, 1]
        assert {host.process for host in one.hosts} == {ProcessState.ABSENT}
        assert all(host.started_for is None and host.report is None for host in one.hosts)
    addresses = {(h.address, h.port) for one in seen.view.slices for h in one.hosts}
    assert len(addresses) == 4


def test_an_unknown_job_is_not_there(rig: Rig) -> None:
    assert rig.world.observe("another") is None
    assert rig.world.persist("another", Ledger(), JobStatus(), "whatever") is None


def test_what_was_persisted_is_observed(rig: Rig) -> None:
    before = _observe(rig)
    ledger = Ledger(incarnation=Incarnation(3), members=(SliceId(1),))
    status = JobStatus(message="as the test wrote it")
    written = rig.world.persist(JOB, ledger, status, before.precondition)
    after = _observe(rig)
    assert written == after.precondition != before.precondition
    assert (after.ledger, after.status) == (ledger, status)
    assert after.view.generation == before.view.generation


def test_a_precondition_is_good_for_one_write(rig: Rig) -> None:
    before = _observe(rig)
    first, second = Ledger(incarnation=FIRST), Ledger(incarnation=SECOND)
    assert rig.world.persist(JOB, first, JobStatus(), before.precondition) is not None
    assert rig.world.persist(JOB, second, JobStatus(), before.precondition) is None
    assert _observe(rig).ledger == first


def test_progress_is_observed_and_costs_no_precondition(rig: Rig) -> None:
    before = _observe(rig)
    shown = replace(before.status, step=Step(7))
    assert rig.world.note_progress(JOB, shown, before.precondition)
    seen = _observe(rig)
    assert (seen.status, seen.ledger) == (shown, before.ledger)
    assert seen.precondition == before.precondition


def test_progress_of_an_overtaken_look_is_not_shown(rig: Rig) -> None:
    before = _observe(rig)
    shown = replace(before.status, step=Step(7))
    assert rig.world.note_progress(JOB, shown, before.precondition)
    newer = replace(before.status, step=Step(3))
    assert rig.world.persist(JOB, before.ledger, newer, before.precondition) is not None
    assert not rig.world.note_progress(JOB, shown, before.precondition)
    assert _observe(rig).status == newer


def test_starting_twice_starts_once(rig: Rig) -> None:
    _start(rig, 0)
    _wait_for_states(rig, 0, ProcessState.ALIVE)
    before = rig.agents()
    assert sorted(before) == [HostId(SliceId(0), 0), HostId(SliceId(0), 1)]
    _start(rig, 0)
    _start(rig, 0, SECOND)
    assert rig.agents() == before
    assert {host.started_for for host in _slice(rig, 0).hosts} == {FIRST}
    assert _states(rig, 1) == {ProcessState.ABSENT}


@pytest.mark.parametrize("grace_s", [0.0, 20.0], ids=["at once", "with grace"])
def test_a_stopped_slice_can_be_started_again(rig: Rig, grace_s: float) -> None:
    _start(rig, 0)
    _start(rig, 1)
    _wait_for_states(rig, 1, ProcessState.ALIVE)
    _stop(rig, 1, grace_s=grace_s)
    _stop(rig, 1, grace_s=0.0)
    _wait_for_states(rig, 1, ProcessState.ABSENT)
    assert {host.slice for host in rig.agents()} == {0}
    _start(rig, 1, SECOND)
    _wait_for_states(rig, 1, ProcessState.ALIVE)
    assert {host.started_for for host in _slice(rig, 1).hosts} == {SECOND}


def test_a_host_of_another_incarnation_outlives_the_stop_of_an_older_one(rig: Rig) -> None:
    _start(rig, 0, SECOND)
    _wait_for_states(rig, 0, ProcessState.ALIVE)
    before = rig.agents()
    _stop(rig, 0, FIRST)
    assert _states(rig, 0) == {ProcessState.ALIVE}
    assert rig.agents() == before


def test_a_killed_agent_is_seen_as_exited_until_it_is_stopped(rig: Rig) -> None:
    _start(rig, 0)
    _wait_for_states(rig, 0, ProcessState.ALIVE)
    lost = HostId(SliceId(0), 1)
    rig.kill_agent(lost)

    def states() -> list[ProcessState]:
        rig.settle()
        return [host.process for host in _slice(rig, 0).hosts]

    wait_for(
        lambda: states() == [ProcessState.ALIVE, ProcessState.EXITED],
        what="the killed agent to be seen",
    )
    _stop(rig, 0)
    _wait_for_states(rig, 0, ProcessState.ABSENT)
    assert rig.agents() == {}


def test_a_slice_that_is_gone_is_not_started(rig: Rig) -> None:
    rig.take_capacity(SliceId(1))
    assert _slice(rig, 1).capacity is Capacity.GONE
    _start(rig, 1)
    assert _states(rig, 1) == {ProcessState.ABSENT}
    assert rig.agents() == {}


def test_a_directive_that_is_not_newer_is_never_written(rig: Rig) -> None:
    second = _directive(rig, 2)
    rig.world.perform(JOB, WriteDirective(directive=second))
    assert _observe(rig).view.directive == second
    rig.world.perform(JOB, WriteDirective(directive=_directive(rig, 1)))
    assert _observe(rig).view.directive == second
    third = _directive(rig, 3)
    rig.world.perform(JOB, WriteDirective(directive=third))
    assert _observe(rig).view.directive == third


def test_an_event_shows_once_however_often_it_is_told(rig: Rig) -> None:
    told = EmitEvent(id="1-a", reason=Reason.FIRST_START, message="as the test told it")
    rig.world.perform(JOB, told)
    rig.world.perform(JOB, EmitEvent(id="1-b", reason=Reason.SCALE_UP, message="another"))
    rig.world.perform(JOB, told)
    assert rig.events() == ["1-a", "1-b"]


def test_a_removed_job_is_gone_with_its_agents(rig: Rig) -> None:
    _start(rig, 0)
    _wait_for_states(rig, 0, ProcessState.ALIVE)
    rig.world.perform(JOB, RemoveJob())
    assert rig.world.observe(JOB) is None
    assert rig.world.jobs() == ()
    assert rig.agents() == {}
    rig.world.perform(JOB, RemoveJob())
