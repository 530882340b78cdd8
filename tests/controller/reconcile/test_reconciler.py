"""The reconciler's contract, over the real local world and plans made for the purpose."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from everstep.controller.api.ids import Incarnation, SliceId, Step
from everstep.controller.api.reasons import Reason
from everstep.controller.api.status import JobStatus, Phase
from everstep.controller.core.ledger import Ledger
from everstep.controller.core.model import Action, EmitEvent, Plan, StartSlice, View
from everstep.controller.local.processes import SpawnFailed
from everstep.controller.local.store import Store
from everstep.controller.local.world import LocalWorld
from everstep.controller.ops.clock import SystemClock
from everstep.controller.ops.logs import open_log
from everstep.controller.reconcile.reconciler import ActionFailed, Planner, Reconciler, Result
from local_rig import PATIENT, LocalRig, silent_log

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

EVENT = EmitEvent(id="1-a", reason=Reason.FIRST_START, message="as decided")


@pytest.fixture(autouse=True)
def _job(rig: LocalRig, tmp_path: Path) -> None:
    rig.add_job(root=tmp_path, slices=2)


class ScriptedPlan:
    """Raises the incarnation by one in each pass, with the actions it was given."""

    def __init__(self, *actions: Action) -> None:
        self.actions = actions
        self.tokens: list[str] = []
        self.between: Callable[[], None] = lambda: None

    def __call__(
        self,
        view: View,  # noqa: ARG002
        ledger: Ledger,
        status: JobStatus,
        now_s: float,  # noqa: ARG002
        *,
        fresh_token: str,
    ) -> Plan:
        self.tokens.append(fresh_token)
        self.between()
        return Plan(
            ledger=replace(ledger, incarnation=Incarnation(ledger.incarnation + 1)),
            status=status,
            actions=self.actions,
            requeue_after_s=None,
        )


def _reconciler(
    rig: LocalRig, plan: Planner, log: FilteringBoundLogger | None = None
) -> Reconciler:
    tokens = iter(f"token-{n}" for n in range(100))
    return Reconciler(
        rig.world,
        plan,
        clock=SystemClock(),
        fresh_token=lambda: next(tokens),
        log=log or silent_log(),
    )


def _ledger(rig: LocalRig) -> Ledger:
    seen = rig.world.observe("llm")
    assert seen is not None
    return seen.ledger


def test_a_job_that_does_not_exist_is_gone(rig: LocalRig) -> None:
    assert _reconciler(rig, ScriptedPlan()).reconcile("another").result is Result.GONE


def test_the_ledger_is_on_disk_before_the_first_action(rig: LocalRig) -> None:
    seen: list[Incarnation] = []

    class Watched(LocalWorld):
        def perform(self, job: str, action: Action) -> None:
            seen.append(Store(rig.folder).read(job).ledger.incarnation)
            super().perform(job, action)

    rig.world_type = Watched
    rig.restart()
    start = StartSlice(slice=SliceId(0), incarnation=Incarnation(1))
    _reconciler(rig, ScriptedPlan(start, EVENT)).reconcile("llm")
    assert seen == [1, 1]


def test_on_conflict_the_whole_plan_is_dropped(rig: LocalRig) -> None:
    plan = ScriptedPlan(StartSlice(slice=SliceId(0), incarnation=Incarnation(1)), EVENT)

    def somebody_scales() -> None:
        rig.world.store.edit("llm", lambda spec: replace(spec, suspend=not spec.suspend))

    plan.between = somebody_scales
    outcome = _reconciler(rig, plan).reconcile("llm")
    assert outcome.result is Result.CONFLICT
    assert _ledger(rig).incarnation == 0
    assert rig.agents() == {}
    assert rig.events() == []


def test_each_pass_offers_a_token_that_no_pass_had_before(rig: LocalRig) -> None:
    plan = ScriptedPlan()
    reconciler = _reconciler(rig, plan)
    reconciler.reconcile("llm")
    reconciler.reconcile("llm")
    assert plan.tokens == ["token-0", "token-1"]


def test_a_failing_action_ends_the_pass_and_its_events_are_told_all_the_same(
    rig: LocalRig,
) -> None:
    rig.agent_command = PATIENT
    folder = rig.folder.job("llm")
    folder.logs.rmdir()
    folder.logs.write_text("in the way of the logs")
    first, second = (StartSlice(slice=SliceId(n), incarnation=Incarnation(1)) for n in (0, 1))
    said = StringIO()
    reconciler = _reconciler(rig, ScriptedPlan(first, EVENT, second), open_log(stream=said))
    with pytest.raises(ActionFailed, match=r"^start/1/0: ") as failed:
        reconciler.reconcile("llm")
    assert failed.value.key == first.key
    assert isinstance(failed.value.__cause__, SpawnFailed)
    assert said.getvalue() == "", "what is raised is said by whoever handles it"
    assert _ledger(rig).incarnation == 1
    assert rig.events() == ["1-a"]
    assert rig.agents() == {}


def test_events_of_a_controller_that_was_killed_are_told_by_the_next_one(rig: LocalRig) -> None:
    before = rig.world.observe("llm")
    assert before is not None

    class Killed(BaseException):
        pass

    class Dying(LocalWorld):
        def perform(self, job: str, action: Action) -> None:  # noqa: ARG002
            raise Killed

    rig.world_type = Dying
    rig.restart()
    with pytest.raises(Killed):
        _reconciler(rig, ScriptedPlan(EVENT)).reconcile("llm")
    assert rig.events() == []
    rig.world_type = LocalWorld
    rig.restart()
    _reconciler(rig, ScriptedPlan()).reconcile("llm")
    assert rig.events() == ["1-a"]


def test_progress_alone_is_written_once_a_second_and_never_needs_a_write(rig: LocalRig) -> None:
    def plan(
        view: View,  # noqa: ARG001
        ledger: Ledger,
        status: JobStatus,
        now_s: float,  # noqa: ARG001
        *,
        fresh_token: str,  # noqa: ARG001
    ) -> Plan:
        return Plan(
            ledger=ledger,
            status=replace(status, step=Step(status.step + 1), phase=Phase.RUNNING),
            actions=(),
            requeue_after_s=None,
            must_persist=False,
        )

    reconciler = _reconciler(rig, plan)
    durable = rig.folder.job("llm").record.read_bytes()
    first, second = reconciler.reconcile("llm"), reconciler.reconcile("llm")
    assert rig.folder.job("llm").record.read_bytes() == durable, "no write that waits for the disk"
    assert (first.result, second.result) == (Result.DONE, Result.QUIET)
    assert second.requeue_after_s is not None
    assert 0 < second.requeue_after_s <= 1.0
    seen = rig.world.observe("llm")
    assert seen is not None
    assert seen.status.step == 1
    seen = rig.restart().observe("llm")
    assert seen is not None
    assert seen.status.step == 1


def test_a_quiet_pass_writes_nothing(rig: LocalRig) -> None:
    def plan(
        view: View,  # noqa: ARG001
        ledger: Ledger,
        status: JobStatus,
        now_s: float,  # noqa: ARG001
        *,
        fresh_token: str,  # noqa: ARG001
    ) -> Plan:
        return Plan(ledger=ledger, status=status, actions=(), requeue_after_s=3.0)

    record = rig.folder.job("llm").record
    before = record.stat().st_ino
    outcome = _reconciler(rig, plan).reconcile("llm")
    assert (outcome.result, outcome.requeue_after_s) == (Result.QUIET, 3.0)
    assert record.stat().st_ino == before
