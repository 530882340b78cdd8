"""The driver over the real local world: what wakes it, and what it survives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.wire import HostPhase
from everstep.controller.core.model import Action
from everstep.controller.core.plan import plan
from everstep.controller.local.watch import LocalWatch
from everstep.controller.local.world import LocalWorld
from everstep.controller.ops.clock import SystemClock, fresh_token
from everstep.controller.reconcile import driver
from everstep.controller.reconcile.driver import Driver
from everstep.controller.reconcile.reconciler import Reconciler
from local_rig import PATIENT, LocalRig, silent_log
from reports import write_report

pytestmark = pytest.mark.processes
PATIENCE_S = 30.0
PATIENT_TIMEOUTS = {
    "timeouts": {
        "reportIntervalSeconds": 1,
        "reportSeconds": 600,
        "progressSeconds": 700,
        "joinSeconds": 800,
        "startSeconds": 900,
    }
}
"""Nothing is decided on because somebody was silent."""


@pytest.fixture(autouse=True)
def without_backstop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens here was told by the world: the slow look at every job comes never."""
    monkeypatch.setattr(driver, "BACKSTOP_S", 3600.0)


@asynccontextmanager
async def _driven(rig: LocalRig, *, idle_s: float | None = None) -> AsyncGenerator[Driver]:
    clock = SystemClock()
    with LocalWatch(rig.world) as watch:
        reconciler = Reconciler(
            rig.world, plan, clock=clock, fresh_token=fresh_token, log=silent_log()
        )
        driver = Driver(rig.world, reconciler, watch, clock=clock, log=silent_log())
        running = asyncio.create_task(driver.run(idle_s=idle_s))
        try:
            yield driver
        finally:
            driver.stop()
            await asyncio.wait_for(running, PATIENCE_S)


async def _until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition without touching the world."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < PATIENCE_S, f"waited for {what}"
        await asyncio.sleep(0.002)


def _run(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await test()

    asyncio.run(run())


def _incarnation(rig: LocalRig) -> int:
    return rig.world.store.read("llm").ledger.incarnation


def _all_report(rig: LocalRig) -> None:
    for record in rig.world.living("llm"):
        write_report(rig.folder.job("llm"), record, now_s=rig.clock.unix_s())


@asynccontextmanager
async def _training(rig: LocalRig, root: Path) -> AsyncGenerator[Driver]:
    rig.add_job(root=root, slices=2, runtime=PATIENT_TIMEOUTS)
    async with _driven(rig) as driver:
        await _until(lambda: len(rig.agents()) == 2, "both agents")
        await _until(lambda: _incarnation(rig) == 1, "incarnation 1")
        _all_report(rig)
        yield driver


def test_a_job_that_is_applied_later_is_started_at_once(rig: LocalRig, tmp_path: Path) -> None:
    async def test() -> None:
        async with _driven(rig):
            rig.add_job(root=tmp_path, slices=2, runtime=PATIENT_TIMEOUTS)
            await _until(lambda: len(rig.agents()) == 2, "both agents")

    _run(test)


def test_an_agents_end_is_decided_on_long_before_any_backstop(
    rig: LocalRig, tmp_path: Path
) -> None:
    async def test() -> None:
        async with _training(rig, tmp_path):
            rig.kill_agent(HostId(SliceId(1), 0))
            await _until(lambda: _incarnation(rig) == 2, "the loss to be decided on")

    _run(test)


def test_the_end_of_an_agent_that_another_controller_started_is_seen_too(
    rig: LocalRig, tmp_path: Path
) -> None:
    async def test() -> None:
        async with _training(rig, tmp_path):
            pass
        rig.restart()
        async with _driven(rig):
            _all_report(rig)
            rig.kill_agent(HostId(SliceId(1), 0))
            await _until(lambda: _incarnation(rig) == 2, "the loss to be decided on")

    _run(test)


def test_a_report_is_answered_long_before_any_backstop(rig: LocalRig, tmp_path: Path) -> None:
    async def test() -> None:
        async with _training(rig, tmp_path):
            first = next(r for r in rig.world.living("llm") if r.host.slice == 0)
            write_report(
                rig.folder.job("llm"),
                first,
                now_s=rig.clock.unix_s(),
                phase=HostPhase.RUNNING,
                step=77,
            )
            await _until(
                lambda: rig.world.store.read("llm").status.step == 77, "the step to be published"
            )

    _run(test)


def test_a_job_that_cannot_be_looked_at_does_not_stop_the_others(
    rig: LocalRig, tmp_path: Path
) -> None:
    rig.add_job("broken", root=tmp_path)
    rig.folder.job("broken").record.write_text("{not json")
    rig.add_job("sound", root=tmp_path, slices=1)

    async def test() -> None:
        async with _driven(rig):
            await _until(lambda: len(rig.agents()) == 1, "the sound job's agent")

    _run(test)
    assert rig.folder.job("broken").record.read_text() == "{not json"


def test_a_failing_action_is_tried_again_until_it_succeeds(tmp_path: Path) -> None:
    failures = 4

    class Reluctant(LocalWorld):
        def perform(self, job: str, action: Action) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise OSError("the machine is out of processes, says the test")
            super().perform(job, action)

    rig = LocalRig(tmp_path, PATIENT, Reluctant)
    rig.add_job(root=tmp_path, slices=2, runtime=PATIENT_TIMEOUTS)

    async def test() -> None:
        async with _driven(rig):
            await _until(lambda: len(rig.agents()) == 2, "both agents")

    try:
        _run(test)
        assert failures == 0
        assert [len(pids) for pids in rig.agents().values()] == [1, 1]
    finally:
        rig.close()


def test_a_driver_that_nobody_needs_ends_by_itself(rig: LocalRig, tmp_path: Path) -> None:
    rig.add_job(root=tmp_path, slices=2, runtime=PATIENT_TIMEOUTS)
    rig.world.store.edit("llm", lambda spec: replace(spec, suspend=True))

    async def test() -> None:
        clock = SystemClock()
        with LocalWatch(rig.world) as watch:
            reconciler = Reconciler(
                rig.world, plan, clock=clock, fresh_token=fresh_token, log=silent_log()
            )
            driver = Driver(rig.world, reconciler, watch, clock=clock, log=silent_log())
            await asyncio.wait_for(driver.run(idle_s=0.05), PATIENCE_S)

    _run(test)
    assert rig.agents() == {}


def test_the_end_of_a_driver_ends_no_agent(rig: LocalRig, tmp_path: Path) -> None:
    async def test() -> None:
        async with _training(rig, tmp_path):
            pass

    _run(test)
    assert len(rig.agents()) == 2
