"""What agents must not believe or assume: clocks, ranks, addresses, speeds.

Clocks that differ, ranks that change from one incarnation to the next, an address that an earlier
incarnation used, storage that is slower than the notice is long, one restore that stalls.
"""

from __future__ import annotations

import itertools
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from agent_rig import COORDINATOR_PORT, ODD_AGENT, Rig, free_number, host, settings_of
from everstep.controller.api.ids import SliceId
from everstep.controller.api.wire import ExitCause, HostPhase, Report, Request, RequestKind
from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.reader import CheckpointReader, read_leaf
from waiting import wait_for

pytestmark = pytest.mark.processes

SLICES = {0: 1, 1: 1, 2: 1}
HOSTS = (host(0), host(1), host(2))
PAIR = {0: 1, 1: 1}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(folder=tmp_path, number=free_number(tmp_path), settings=settings_of(tmp_path))
    rig.environment = {"STEPS": "100000", "STEP_S": "0.05"}
    yield rig
    rig.close()


def durable_steps(rig: Rig) -> list[int]:
    """Every step on storage, each of which must be that step in every element."""
    store = open_store(rig.settings.checkpoint_uri)
    commits = list_commits(store)
    for commit in commits:
        assert np.all(read_leaf(CheckpointReader(store, commit), 0) == commit.step)
    return [commit.step for commit in commits]


def test_hosts_whose_clocks_differ_make_the_same_steps_durable(rig: Rig) -> None:
    rig.settings = settings_of(rig.folder, checkpoint_every_s=0.5, retention_latest=50)
    rig.agent = ODD_AGENT
    rig.environment |= {"SHARDED": "1", "CLOCK_AHEAD_S": "1:3,2:-3"}
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    wait_for(lambda: len(durable_steps(rig)) >= 5, what="five commits", timeout_s=40)
    rig.wait(host(0), lambda r: r.storage_error is None)
    commits = list_commits(open_store(rig.settings.checkpoint_uri))
    gaps_s = [b.committed_at_s - a.committed_at_s for a, b in itertools.pairwise(commits)]
    # By the one clock that decides; the time of a write may come on top of an interval.
    assert min(gaps_s) >= 0.4


def test_a_notice_that_is_shorter_than_the_write_is_given_up_and_harms_no_older_step(
    rig: Rig,
) -> None:
    flag = rig.folder / "slow"
    rig.settings = settings_of(rig.folder, checkpoint_every_steps=10)
    rig.agent = ODD_AGENT
    rig.environment |= {"SLOW_STORAGE": str(flag), "STORAGE_BYTES_PER_S": "4096"}
    rig.start(*HOSTS[:2])
    rig.direct(1, PAIR)
    for one in HOSTS[:2]:
        rig.wait(one, lambda r: (r.step_committed or 0) >= 10)
    # From here on one write of the state takes longer than the whole notice.
    flag.touch()
    before = durable_steps(rig)
    request = Request(
        id="1-1",
        kind=RequestKind.LEAVE,
        doomed=tuple(SliceId(id_) for id_ in PAIR),
        durable=True,
        deadline_s=time.time() + 2.0,
    )
    rig.direct(1, PAIR, request=request)
    report = rig.wait(host(0), lambda r: r.held is not None)
    assert report.held is not None
    assert not report.held.complete
    assert not report.held.durable
    assert "in time" in report.held.message or "deadline" in report.held.message
    assert report.renewed_at_s < request.deadline_s + 1.0
    for one in HOSTS[:2]:
        rig.agents[one].kill()
        rig.agents[one].wait()
    # Whole, and the newest that was there: nothing of the write that was given up is a step.
    assert durable_steps(rig)[-1] >= before[-1]
    flag.unlink()
    rig.start(*HOSTS[:2])
    rig.direct(2, PAIR)
    restored = rig.wait(host(0), lambda r: r.incarnation == 2 and r.restore is not None).restore
    assert restored is not None
    assert (restored.source, restored.step) == ("storage", durable_steps(rig)[-1])


def has_gone_on(report: Report) -> bool:
    restored = report.restore
    return restored is not None and (report.step_snapshot or 0) > restored.step > 0


def test_ranks_that_change_do_not_change_what_is_restored_from_memory(rig: Rig) -> None:
    rig.environment |= {"SHARDED": "1", "MARKED": "1"}
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    for one in HOSTS:
        rig.wait(one, lambda r: (r.step_snapshot or 0) >= 4)
    # Every order of three: who held which rows was another rank then. The program checks each row.
    for incarnation, order in enumerate([(2, 0, 1), (1, 2, 0), (0, 2, 1), (2, 1, 0)], start=2):
        slices = dict.fromkeys(order, 1)
        rig.direct(incarnation, slices)
        rig.wait_running(*HOSTS, incarnation=incarnation)
        steps: set[int] = set()
        for one in HOSTS:
            # It has made a snapshot of its own since, from rows that it checked.
            report = rig.wait(one, has_gone_on)
            assert report.restore is not None
            assert report.restore.source == "memory"
            assert report.restore.storage_bytes == 0
            steps.add(report.restore.step)
        assert len(steps) == 1


def test_nobody_talks_to_the_coordinator_address_of_an_earlier_incarnation(rig: Rig) -> None:
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    rig.wait_running(*HOSTS, incarnation=1)
    rig.coordinator(host(0)).kill()
    rig.wait(host(0), lambda r: r.exit is not None)
    with listening(rig.address(host(0)), COORDINATOR_PORT) as stranger:
        # The lead is late: the others have nothing but what they remember.
        lead = [psutil.Process(rig.agents[host(0)].pid), *rig.children(host(0))]
        for process in lead:
            process.send_signal(signal.SIGSTOP)
        rig.direct(2, SLICES)
        for one in HOSTS[1:]:
            rig.wait(one, lambda r: r.incarnation == 2 and r.phase is HostPhase.JOINING)
        for process in lead:
            process.send_signal(signal.SIGCONT)
        rig.wait_running(*HOSTS, incarnation=2)
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()


def listening(address: str, port: int) -> socket.socket:
    def bind() -> socket.socket | None:
        try:
            return socket.create_server((address, port))
        except OSError:
            return None

    return wait_for(bind, what="the port of the dead service to be free")


def test_a_restore_that_stalls_is_ended_at_the_start_deadline_and_named(rig: Rig) -> None:
    rig.settings = settings_of(rig.folder, start_grace_s=4.0)
    rig.environment |= {"STALL_RANK": "2", "STALL_S": "60"}
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    ended = {one: rig.wait(one, lambda r: r.exit is not None).exit for one in HOSTS}
    stages: dict[object, int] = {}
    for one, exit_ in ended.items():
        assert exit_ is not None
        assert exit_.cause is ExitCause.HUNG
        assert "no first step within 4 s (spec.runtime.timeouts.startSeconds)" in exit_.message
        stages[one] = exit_.stage
    behind = ended[host(2)]
    assert behind is not None
    assert behind.message.endswith("it was restoring")
    assert stages[host(2)] < min(stages[host(0)], stages[host(1)])


def test_a_slow_restore_within_the_deadline_is_waited_for(rig: Rig) -> None:
    rig.environment |= {"STALL_RANK": "2", "STALL_S": "3"}
    rig.start(*HOSTS)
    rig.direct(1, SLICES)
    waiting = rig.wait(host(0), lambda r: r.phase is HostPhase.RESTORING)
    rig.wait_running(*HOSTS, incarnation=1)
    running = rig.wait(host(0), lambda r: r.exit is None)
    assert running.phase_since_s - waiting.phase_since_s >= 2.0


def is_between_two_that_are_due(report: Report) -> bool:
    return report.step > 10 and report.step % 10 in (4, 5, 6)


def test_after_a_resume_the_next_checkpoint_is_the_next_that_is_due(rig: Rig) -> None:
    rig.settings = settings_of(rig.folder, checkpoint_every_steps=10, retention_latest=50)
    rig.start(*HOSTS[:2])
    rig.direct(1, PAIR)
    restored: set[int] = set()
    for incarnation in (2, 3):
        rig.wait(host(0), is_between_two_that_are_due)
        rig.worker(host(1)).kill()
        rig.wait(host(1), lambda r: r.exit is not None)
        rig.direct(incarnation, PAIR)
        rig.wait_running(*HOSTS[:2], incarnation=incarnation)
        # Running in this incarnation, it has said from what.
        said = rig.report(host(0))
        assert said is not None
        assert said.restore is not None
        restored.add(said.restore.step)
    enough = rig.wait(host(0), lambda r: r.incarnation == 3).step + 20
    rig.wait(host(0), lambda r: (r.step_committed or 0) >= enough - 10)
    # One that was due when the worker was killed is made up for by the next that is held.
    assert all(step % 10 == 0 or step - step % 10 in restored for step in durable_steps(rig))


def test_orders_and_reports_of_another_job_in_the_same_folder_are_not_believed(rig: Rig) -> None:
    rig.start(host(0))
    # Of an earlier tenant: more members, another rank for this host, a greater incarnation.
    rig.direct(7, {3: 1, 2: 1, 1: 1, 0: 1}, job_uid="uid-of-another-job")
    stale = rig.folder / "reports" / "1-0.json"
    stale.parent.mkdir(exist_ok=True)
    stale.write_text('{"jobUid": "uid-of-another-job"}')
    rig.start(host(1))
    rig.direct(1, PAIR)
    rig.wait_running(*HOSTS[:2], incarnation=1)
    for rank, one in enumerate(HOSTS[:2]):
        rig.worker(one).kill()
        ended = rig.wait(one, lambda r: r.exit is not None).exit
        assert ended is not None
        assert (ended.rank, ended.incarnation) == (rank, 1)
