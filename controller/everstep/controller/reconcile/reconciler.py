"""One pass over one job: observe → plan → persist → act.

The contract, which makes a crash between any two lines harmless:

1. *Observe.* The view is rebuilt from scratch; nothing is remembered from an earlier pass.
2. *Plan.* Pure. It sees view, ledger, status, the time and a fresh token, and nothing else.
3. *Persist* `Plan.ledger` and `Plan.status` with the precondition of the observation that they
   were computed from. On conflict the whole plan is dropped: somebody knows better by now.
4. *Act*, only then, in order. Every action is idempotent under its key (job uid, incarnation,
   kind, target).

A crash before 3 leaves the world as it was. A crash after 3 leaves a ledger that says what was
decided; the next pass sees that the world does not look like it yet, and plans the same actions.
An action that fails ends the pass, for later actions may depend on it; the events of the plan are
told all the same, because what they tell of is decided. The pass is tried again with a growing
delay (`queue`), and plans anew.

Events are the one kind of action that cannot be seen to be missing. So they are persisted with the
plan (`Ledger.untold`), and the first pass that a process runs over a job tells them again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from everstep.controller.api.status import JobStatus, Phase
from everstep.controller.core.ledger import Ledger, UntoldEvent
from everstep.controller.core.model import Action, EmitEvent, Observation, Plan, View, World
from everstep.controller.ops.clock import Clock

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

PROGRESS_EVERY_S = 1.0
"""Progress alone (step, loss, speed) is shown this often. It is not waited for on the disk."""

SETTLED = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.SUSPENDED})


class Planner(Protocol):
    """The signature of `core.plan.plan`."""

    def __call__(
        self,
        view: View,
        ledger: Ledger,
        status: JobStatus,
        now_s: float,
        *,
        fresh_token: str,
    ) -> Plan: ...


class Result(Enum):
    GONE = "gone"
    """The job does not exist."""
    QUIET = "quiet"
    """Nothing to write and nothing to do."""
    DONE = "done"
    """Written, and every action performed."""
    CONFLICT = "conflict"
    """Somebody wrote in between; the plan was dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one pass came to."""

    result: Result
    requeue_after_s: float | None = None
    is_settled: bool = False
    """Nothing will happen to the job until a person does something."""


class ActionFailed(Exception):
    """The world could not do an action; the cause is what it raised. The pass is tried again."""

    def __init__(self, key: str, why: str) -> None:
        self.key, self.why = key, why
        super().__init__(f"{key}: {why}")


class Reconciler:
    """Runs passes over the jobs of one world. One thread; one pass at a time."""

    def __init__(
        self,
        world: World,
        plan: Planner,
        *,
        clock: Clock,
        fresh_token: Callable[[], str],
        log: FilteringBoundLogger,
    ) -> None:
        self._world = world
        self._plan = plan
        self._clock = clock
        self._fresh_token = fresh_token
        self._log = log
        self._progress_at_s: dict[str, float] = {}
        self._retold: set[str] = set()

    def reconcile(self, job: str) -> Pass:
        """Run one pass over a job.

        Raises:
            ActionFailed: an action could not be done. What was persisted stays.
            Exception: whatever else the world raised. The caller tries again in both cases.

        Durability: see the module. Blocking: for the writes that the plan needs.
        """
        began_s = self._clock.monotonic_s()
        observation = self._world.observe(job)
        if observation is None:
            self._progress_at_s.pop(job, None)
            self._retold.discard(job)
            return Pass(result=Result.GONE)
        self._tell_again(job, observation.ledger)
        now_s = self._clock.unix_s()
        plan = self._plan(
            observation.view,
            observation.ledger,
            observation.status,
            now_s,
            fresh_token=self._fresh_token(),
        )
        ledger = _with_events(plan)
        wait_s = self._wait_before_writing(job, observation, plan)
        is_changed = ledger != observation.ledger or plan.status != observation.status
        if is_changed and wait_s == 0.0:
            if not self._write(job, observation, plan, ledger):
                self._tell(job, plan, Result.CONFLICT, began_s)
                return Pass(result=Result.CONFLICT, requeue_after_s=0.0)
            self._progress_at_s[job] = self._clock.monotonic_s()
        self._act(job, plan.actions)
        wrote = is_changed and wait_s == 0.0
        result = Result.DONE if wrote or plan.actions else Result.QUIET
        self._tell(job, plan, result, began_s)
        return Pass(
            result=result,
            requeue_after_s=_earlier(plan.requeue_after_s, wait_s or None),
            is_settled=plan.status.phase in SETTLED
            and not plan.actions
            and not observation.view.is_deleting,
        )

    def _write(self, job: str, seen: Observation, plan: Plan, ledger: Ledger) -> bool:
        if _is_progress(seen, plan):
            return self._world.note_progress(job, plan.status, seen.precondition)
        return self._world.persist(job, ledger, plan.status, seen.precondition) is not None

    def _tell_again(self, job: str, ledger: Ledger) -> None:
        if job in self._retold:
            return
        for event in ledger.untold:
            told = EmitEvent(
                id=event.id, reason=event.reason, message=event.message, slice=event.slice
            )
            self._world.perform(job, told)
        self._retold.add(job)

    def _act(self, job: str, actions: tuple[Action, ...]) -> None:
        for index, action in enumerate(actions):
            try:
                self._world.perform(job, action)
            except Exception as error:
                for later in actions[index + 1 :]:
                    if isinstance(later, EmitEvent):
                        self._world.perform(job, later)
                raise ActionFailed(action.key, str(error)) from error

    def _wait_before_writing(self, job: str, observation: Observation, plan: Plan) -> float:
        """Return how long the write of this plan may wait: 0 unless only progress changed."""
        if not _is_progress(observation, plan) or plan.status == observation.status:
            return 0.0
        last_s = self._progress_at_s.get(job)
        if last_s is None:
            return 0.0
        return max(0.0, last_s + PROGRESS_EVERY_S - self._clock.monotonic_s())

    def _tell(self, job: str, plan: Plan, result: Result, began_s: float) -> None:
        # The story is told at `info`; passes that only copied progress are for debugging.
        say = self._log.info if plan.actions or result is Result.CONFLICT else self._log.debug
        say(
            "reconciled",
            job=job,
            result=result.value,
            phase=plan.status.phase.value,
            incarnation=plan.ledger.incarnation,
            step=plan.status.step,
            actions=[action.key for action in plan.actions],
            took_s=round(self._clock.monotonic_s() - began_s, 6),
        )


def _is_progress(seen: Observation, plan: Plan) -> bool:
    """Whether at most figures for the eye changed: nothing depends on whether they are written."""
    return not plan.must_persist and not plan.actions and plan.ledger == seen.ledger


def _with_events(plan: Plan) -> Ledger:
    events = tuple(
        UntoldEvent(id=one.id, reason=one.reason, message=one.message, slice=one.slice)
        for one in plan.actions
        if isinstance(one, EmitEvent)
    )
    return replace(plan.ledger, untold=events) if events else plan.ledger


def _earlier(one_s: float | None, other_s: float | None) -> float | None:
    given = [value for value in (one_s, other_s) if value is not None]
    return min(given, default=None)
