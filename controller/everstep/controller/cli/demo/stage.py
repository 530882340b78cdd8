"""Plays a story: waits for a step, pulls the plug, waits until the job trains again."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from everstep.controller.api.ids import SliceId, Step
from everstep.controller.api.status import JobStatus, Phase, Recovery
from everstep.controller.cli.demo.program import Program, job_manifest
from everstep.controller.cli.demo.run import Run, StageError
from everstep.controller.cli.demo.story import Act, Deed, Story
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.guard import signal_controller

POLL_S = 0.02
STEP_TIMEOUT_S = 180.0
SETTLE_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """An act that is over, with what was true before it and what it cost."""

    act: Act
    step_seen: int
    """Newest finished step just before the deed."""
    step_committed: Step
    """Newest durable step just before the deed."""
    recoveries: tuple[Recovery, ...]
    took_s: float


@dataclass(slots=True)
class Stage:
    """One disturbed run. `tell` gets a sentence whenever something happens."""

    run: Run
    program: Program
    story: Story
    slice_count: int
    tell: Callable[[str], None]
    look: Callable[[JobStatus], None]
    """Called on each look at the job, for the live view."""
    _environment: dict[str, str] = field(default_factory=dict[str, str])

    def play(self) -> list[Played]:
        """Apply the job, play every act, wait for the end.

        Raises:
            StageError: the job did not get where the act must leave it, before the deadline.
        """
        played: list[Played] = []
        self._keep_pace(0)
        self._apply()
        for number, act in enumerate(self.story.acts):
            self._keep_pace(number)
            one = self._act(act)
            if one is None:
                break
            played.append(one)
        self._pace.unlink(missing_ok=True)
        if len(played) < self.story.acts_required:
            raise StageError(
                f"the training ended before act {len(played) + 1} was over: "
                f"{self.story.acts[len(played)].sentence}"
            )
        self._wait("the last step", lambda s: s.phase in (Phase.SUCCEEDED, Phase.FAILED))
        status = self.run.status()
        if status.phase is not Phase.SUCCEEDED:
            raise StageError(f"{self.run.name} ended {status.phase.value}: {status.message}")
        return played

    def _apply(self) -> None:
        path = self.run.folder / f"{self.run.name}.yaml"
        manifest = job_manifest(
            self.program,
            name=self.run.name,
            slice_count=self.slice_count,
            checkpoints=(self.run.folder / "checkpoints" / self.run.name).absolute(),
            environment=self._settings(),
            python=sys.executable,
        )
        path.write_text(yaml.safe_dump(manifest, sort_keys=False))
        self.run.verb("apply", "-f", str(path))

    def _settings(self) -> dict[str, str]:
        # Nobody watches the steps of a run to which nothing happens.
        pace = {"PACE": str(self._pace)} if self.story.acts else {"STEP_S": "0"}
        return {"STEPS": str(self.story.step_count)} | pace | self._environment

    @property
    def _pace(self) -> Path:
        return (self.run.folder / f"{self.run.name}.pace").absolute()

    def _keep_pace(self, number: int) -> None:
        """Tell the training how far it may go at its own pace during an act.

        Acts that the training's end may overtake do not hold it up.
        """
        if number >= self.story.acts_required:
            self._pace.unlink(missing_ok=True)
        else:
            draft = self._pace.with_suffix(".draft")
            draft.write_text(str(self.story.bound(number)))
            draft.replace(self._pace)

    def _act(self, act: Act) -> Played | None:
        """Play one act; None when the training ended before the act was over."""
        self._wait_for_step(act.after_step)
        if self.run.status().phase is Phase.SUCCEEDED:
            return None
        before = self.run.status()
        newest = self.run.read_metrics()
        committed = before.checkpoint.last_committed
        self.tell(act.sentence)
        started_s = time.monotonic()
        self._do(act, before)
        self._wait(
            f"training on slices {', '.join(map(str, act.left))} after: {act.sentence}",
            lambda status: status.phase is Phase.SUCCEEDED or self._is_settled(act, before, status),
        )
        after = self.run.status()
        if not self._is_settled(act, before, after):
            return None
        return Played(
            act=act,
            step_seen=newest.step if newest else 0,
            step_committed=committed.step if committed else Step(0),
            recoveries=tuple(r for r in after.recoveries if r.incarnation > before.incarnation),
            took_s=time.monotonic() - started_s,
        )

    def _do(self, act: Act, before: JobStatus) -> None:
        if act.environment:
            self._environment |= act.environment
        match act.deed:
            case Deed.NOTICE | Deed.WITHDRAW:
                for number in act.slices:
                    self._verb_on("preempt", number, "--notice", f"{act.notice_s:g}s")
                if act.deed is Deed.WITHDRAW:
                    for number in act.slices:
                        self._verb_on("return", number)
            case Deed.KILL:
                for number in act.slices:
                    self._verb_on("kill", number)
            case Deed.KILL_AND_CONTROLLER:
                for number in act.slices:
                    self._verb_on("kill", number)
                self._wait_for_decision(before)
                self._kill_controller()
                self._apply()
            case Deed.KILL_TWICE:
                self._verb_on("kill", act.slices[0])
                self._wait_for_decision(before)
                self._verb_on("kill", act.slices[1])
            case Deed.FREEZE:
                for number in act.slices:
                    self._verb_on("freeze", number)
            case Deed.RETURN:
                for number in act.slices:
                    self._verb_on("return", number)
            case Deed.KILL_ALL:
                self._kill_controller()
                self.run.verb("kill", "--all", "--job", self.run.name)
                for number in act.left:
                    self._verb_on("return", number)
                self._apply()

    def _verb_on(self, verb: str, number: SliceId, *more: str) -> None:
        self.run.verb(verb, str(number), *more, "--job", self.run.name)

    def _is_settled(self, act: Act, before: JobStatus, status: JobStatus) -> bool:
        if status.phase is Phase.FAILED:
            raise StageError(f"{self.run.name} failed: {status.message}")
        members = tuple(s.id for s in status.slice_statuses if s.rank is not None)
        newest = self.run.read_metrics()
        return (
            status.phase is Phase.RUNNING
            and members == act.left
            and (act.deed is Deed.WITHDRAW or status.incarnation > before.incarnation)
            and (not status.recoveries or status.recoveries[-1].first_step_s is not None)
            and newest is not None
            and newest.incarnation == status.incarnation
        )

    def _wait_for_decision(self, before: JobStatus) -> None:
        """Until the controller has persisted a newer incarnation (looked at often, and briefly)."""
        deadline_s = time.monotonic() + 30.0
        while (status := self.run.status()).incarnation <= before.incarnation:
            if status.phase is Phase.SUCCEEDED:
                return
            if time.monotonic() > deadline_s:
                raise StageError("the controller decided nothing within 30 s of a kill")
            time.sleep(0.003)

    def _kill_controller(self) -> None:
        # The function behind the verb: an interpreter start would come too late for a recovery.
        self.run.echo("$ everstep local kill --controller")
        folder = StateFolder(self.run.folder / "local")
        if (
            signal_controller(folder, signal.SIGKILL) is None
            and self.run.status().phase is not Phase.SUCCEEDED
        ):
            raise StageError("there was no controller to kill")

    def _wait_for_step(self, step: int) -> None:
        def reached(status: JobStatus) -> bool:
            newest = self.run.read_metrics()
            if status.phase is Phase.FAILED:
                raise StageError(f"the job failed before step {step}: {status.message}")
            return status.phase is Phase.SUCCEEDED or (newest is not None and newest.step >= step)

        self._wait(f"step {step}", reached, STEP_TIMEOUT_S)

    def _wait(
        self,
        what: str,
        condition: Callable[[JobStatus], bool],
        timeout_s: float = SETTLE_TIMEOUT_S,
    ) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            status = self.run.status()
            self.run.read_metrics()
            self.look(status)
            if condition(status):
                return
            if time.monotonic() > deadline_s:
                raise StageError(
                    f"waited {timeout_s:g} s for {what}; the job is {status.phase.value}, "
                    f"incarnation {status.incarnation}: {status.message}"
                )
            time.sleep(POLL_S)


@contextlib.contextmanager
def ended_afterwards(run: Run) -> Generator[None]:
    """End the job and its controller whatever happens inside: no process outlives the demo."""
    # SIGTERM would end this process without a word; as an exit it comes by the line below.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(StageError):
            run.verb("stop", "--all", quiet=True)


def fresh_folder(folder: Path, run: Run) -> None:
    """Make an empty folder; a run left over from an earlier demo is ended before it is removed."""
    if (folder / "local").exists():
        with contextlib.suppress(StageError):
            run.verb("stop", "--all", quiet=True)
    for stale in ("local", "checkpoints"):
        shutil.rmtree(folder / stale, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
