"""Notices, slices that go, capacity that comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from everstep.controller.api.ids import HostId, Incarnation, SliceId
from everstep.controller.core.model import Capacity, NoticeClass, SliceView, StartSlice
from everstep.controller.local import identity
from everstep.controller.local.capacity import (
    freeze,
    give_back,
    give_notice,
    kill,
    place_of,
    take_all_away,
    take_away,
    thaw,
)
from everstep.controller.local.errors import LocalError
from everstep.controller.local.records import NoticeRecord, ReclaimerRecord, load
from local_rig import LocalRig
from waiting import wait_for

pytestmark = pytest.mark.processes

ONE = SliceId(1)


def _slice(rig: LocalRig, number: int = 1) -> SliceView:
    seen = rig.world.observe("llm")
    assert seen is not None
    return seen.view.slices[number]


def _start(rig: LocalRig, *numbers: int) -> None:
    for number in numbers:
        rig.world.perform("llm", StartSlice(slice=SliceId(number), incarnation=Incarnation(1)))


def _notice(rig: LocalRig, notice_s: float) -> NoticeRecord:
    return give_notice(
        rig.folder,
        "llm",
        ONE,
        notice_s=notice_s,
        notice_class=NoticeClass.IMMINENT,
        now_s=rig.clock.unix_s(),
    )


def _reclaimer(rig: LocalRig) -> ReclaimerRecord | None:
    return load(rig.folder.job("llm").reclaimer(ONE), ReclaimerRecord)


def _registered(rig: LocalRig) -> ReclaimerRecord:
    return wait_for(lambda: _reclaimer(rig), what="the reclaimer to register")


def test_a_slice_goes_at_its_deadline_although_no_controller_runs(rig: LocalRig) -> None:
    _start(rig, 0, 1)
    given = _notice(rig, 1.0)
    seen = _slice(rig).notice
    assert seen is not None
    assert (seen.id, seen.deadline_s) == (given.id, given.deadline_s)
    assert _slice(rig).capacity is Capacity.AVAILABLE
    wait_for(lambda: _slice(rig).capacity is Capacity.GONE, what="the slice to be taken away")
    assert rig.clock.unix_s() >= given.deadline_s
    wait_for(lambda: {h.slice for h in rig.agents()} == {0}, what="its processes to end")
    assert _slice(rig).notice is None
    wait_for(lambda: _reclaimer(rig) is None, what="the reclaimer to end")


def test_a_withdrawn_notice_takes_nothing_and_leaves_no_process(rig: LocalRig) -> None:
    _start(rig, 1)
    _notice(rig, 30.0)
    reclaimer = _registered(rig)
    before = rig.agents()
    assert give_back(rig.folder, "llm", ONE, now_s=rig.clock.unix_s()) == "withdrawn"
    wait_for(lambda: not identity.is_running(reclaimer.identity), what="the reclaimer to end")
    assert _slice(rig).notice is None
    assert rig.agents() == before


def test_a_repeated_notice_keeps_its_id_and_its_earlier_deadline(rig: LocalRig) -> None:
    first = _notice(rig, 30.0)
    again = _notice(rig, 60.0)
    assert again == first
    sooner = _notice(rig, 20.0)
    assert (sooner.id, sooner.first_seen_s) == (first.id, first.first_seen_s)
    assert sooner.deadline_s < first.deadline_s
    # The record may be the first one's for a moment; in the end there is one, and it lives.
    wait_for(
        lambda: (found := _reclaimer(rig)) is not None and identity.is_running(found.identity),
        what="one reclaimer",
    )
    give_back(rig.folder, "llm", ONE, now_s=rig.clock.unix_s())


def test_the_controller_takes_over_from_a_reclaimer_that_was_killed(rig: LocalRig) -> None:
    _start(rig, 1)
    _notice(rig, 1.0)
    os.kill(_registered(rig).pid, signal.SIGKILL)

    def is_taken() -> bool:
        rig.settle()
        return _slice(rig).capacity is Capacity.GONE

    wait_for(is_taken, what="the controller to take the slice")
    assert rig.agents() == {}


def test_a_slice_that_is_gone_gets_no_notice(rig: LocalRig) -> None:
    take_away(rig.folder, "llm", ONE, clock=rig.clock)
    with pytest.raises(LocalError, match="gone already"):
        _notice(rig, 5.0)


def test_a_returned_slice_is_available_since_now(rig: LocalRig) -> None:
    take_away(rig.folder, "llm", ONE, clock=rig.clock)
    assert _slice(rig).available_since_s is None
    now_s = rig.clock.unix_s()
    assert give_back(rig.folder, "llm", ONE, now_s=now_s) == "returned"
    assert _slice(rig).available_since_s == now_s
    assert give_back(rig.folder, "llm", ONE, now_s=now_s + 9) == "unchanged"
    assert _slice(rig).available_since_s == now_s


def test_a_notice_of_another_time_takes_nothing(rig: LocalRig) -> None:
    _start(rig, 1)
    _notice(rig, 30.0)
    assert not take_away(rig.folder, "llm", ONE, clock=rig.clock, notice_id="an older one")
    assert _slice(rig).capacity is Capacity.AVAILABLE
    give_back(rig.folder, "llm", ONE, now_s=rig.clock.unix_s())


def test_everything_goes_at_the_same_moment(rig: LocalRig) -> None:
    _start(rig, 0, 1)
    take_all_away(rig.folder, "llm", range(2), clock=rig.clock)
    assert rig.agents() == {}
    assert {_slice(rig, n).capacity for n in (0, 1)} == {Capacity.GONE}


def test_a_killed_host_leaves_its_slice_available(rig: LocalRig) -> None:
    _start(rig, 1)
    where = place_of(rig.folder.job("llm"), 1, 0)
    assert kill(where, clock=rig.clock) == 1
    assert sorted(rig.agents()) == [HostId(ONE, 1)]
    assert _slice(rig).capacity is Capacity.AVAILABLE


def test_a_frozen_slice_stands_still_until_it_is_thawed(rig: LocalRig) -> None:
    _start(rig, 1)
    where = place_of(rig.folder.job("llm"), 1)
    assert freeze(where, clock=rig.clock) == 2

    def states() -> set[str]:
        pids = [pid for pids in rig.agents().values() for pid in pids]
        texts = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
        return {text.rsplit(")", 1)[1].split()[0] for text in texts}

    wait_for(lambda: states() == {"T"}, what="all processes to be stopped")
    assert thaw(where) == 2
    wait_for(lambda: "T" not in states(), what="all processes to go on")
