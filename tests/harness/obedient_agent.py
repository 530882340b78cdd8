"""An agent that trains nothing: it obeys directives through the files of the local world.

It takes the arguments of the real one. What follows `--` is a program of words for it:
`steps=N` (default: for ever), `step_s=F`, `raise_at=N`, `silent` (never reports), `deaf` (ignores
SIGTERM), `daemon` (leaves a process in a session of its own behind).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec

from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step
from everstep.controller.api.wire import (
    Command,
    Directive,
    ExitCause,
    Held,
    HostPhase,
    NoticeReport,
    Report,
    Request,
    RequestKind,
    RestoreFigures,
    WorkerExit,
)

LOOK_S = 0.005
MARGIN_STEPS = 10


class ObedientAgent:
    """One host: reads the directive, pretends to train, writes the report."""

    def __init__(self, arguments: argparse.Namespace, program: dict[str, str]) -> None:
        self.folder = Path(arguments.channel.removeprefix("local:"))
        self.host = HostId(slice=SliceId(arguments.slice), host=arguments.host)
        self.arguments = arguments
        self.steps = int(program["steps"]) if "steps" in program else None
        self.step_s = float(program.get("step_s", "0.02"))
        self.raise_at = int(program["raise_at"]) if "raise_at" in program else None
        self.is_silent = "silent" in program
        self.directive: Directive | None = None
        self.phase = HostPhase.STARTING
        self.phase_since_s = time.time()
        self.step = 0
        self.committed: int | None = None
        self.sequence = 0
        self.began_s = 0.0
        self.began_step = 0
        self.held: Held | None = None
        self.exit: WorkerExit | None = None
        self.notice: NoticeReport | None = None
        self.restore: RestoreFigures | None = None
        self.published_s = 0.0
        self.is_ending = False

    def run(self) -> None:
        while not self.is_ending:
            changed = self.read_directive()
            changed |= self.train()
            changed |= self.serve_request()
            if changed or time.time() - self.published_s > 0.5:
                self.publish()
            time.sleep(LOOK_S)

    def read_directive(self) -> bool:
        try:
            found = msgspec.json.decode(
                (self.folder / "directive.json").read_bytes(), type=Directive
            )
        except (FileNotFoundError, msgspec.DecodeError):
            return False
        if self.directive is not None and found.sequence <= self.directive.sequence:
            return False
        earlier, self.directive = self.directive, found
        if found.command is Command.STOP:
            self.is_ending = True
        elif found.command is Command.WAIT or self.rank() is None:
            self.turn(HostPhase.WAITING)
        elif earlier is None or earlier.incarnation != found.incarnation or self.rank() is None:
            self.start(found)
        return True

    def start(self, directive: Directive) -> None:
        """Restore the newest step that anybody of the job reports, and train on."""
        self.held, self.exit = None, None
        steps = [report.step_snapshot or 0 for report in self.reports()]
        newest = max([*steps, self.step, self.committed_step() or 0])
        # The first one decides for all, as a join would.
        path = self.folder / f"obedient-restore-{directive.incarnation}"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(str(newest))
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(temporary)
        temporary.unlink()
        self.step = int(path.read_text())
        self.began_s, self.began_step = time.time(), self.step
        self.restore = RestoreFigures(
            incarnation=directive.incarnation,
            step=Step(self.step),
            source="memory" if self.step else "fresh",
        )
        self.turn(HostPhase.RUNNING)

    def train(self) -> bool:
        if self.phase is not HostPhase.RUNNING or self.directive is None:
            return False
        step = self.began_step + int((time.time() - self.began_s) / self.step_s)
        step = step if self.steps is None else min(step, self.steps)
        request = self.directive.request
        if request is not None and request.kind is RequestKind.LEAVE:
            # Not past the step at which all leave.
            step = min(step, self.agree(self.directive, request) or self.step)
        if step == self.step:
            return False
        for done in range(self.step + 1, step + 1):
            self.record(done)
        self.step = step
        if self.restore is not None and self.restore.first_step_at_s is None:
            now_s = time.time()
            self.restore = msgspec.structs.replace(
                self.restore, first_step_s=now_s - self.began_s, first_step_at_s=now_s
            )
        if self.raise_at is not None and self.step >= self.raise_at:
            self.end_worker(ExitCause.USER_ERROR, code=1, message="ValueError: as the test asked")
        elif self.step == self.steps:
            self.commit(self.step)
            self.end_worker(ExitCause.DONE, code=0)
            self.turn(HostPhase.DONE)
        # One report a step is more than the real agent sends, and makes the tests quick.
        return True

    def record(self, step: int) -> None:
        if self.rank() != 0 or self.host.host != 0 or self.directive is None:
            return
        line = {
            "step": step,
            "incarnation": self.directive.incarnation,
            "at_s": time.time(),
            "values": {"loss": 1.0 / step},
        }
        with (self.folder / "metrics.jsonl").open("ab") as out:
            out.write(msgspec.json.encode(line) + b"\n")

    def serve_request(self) -> bool:
        directive = self.directive
        request = directive.request if directive is not None else None
        if directive is None or request is None:
            return False
        if self.held is not None and self.held.request_id == request.id:
            return False
        agreed = self.agree(directive, request)
        if agreed is None or self.step < agreed:
            return False
        if request.kind is RequestKind.LEAVE and self.phase is HostPhase.RUNNING:
            self.turn(HostPhase.HELD)
            self.exit = self.worker_exit(ExitCause.LEFT, code=75)
            return True
        members = {member.slice for member in directive.members}
        others = [r for r in self.reports() if r.host.slice in members and r.host != self.host]
        if directive.lead != self.host or any(report.step < agreed for report in others):
            return False
        if request.durable:
            self.commit(agreed)
        self.held = Held(
            request_id=request.id,
            step=Step(agreed),
            where=tuple(sorted(r.host for r in others if r.host.slice not in request.doomed)),
            durable=request.durable,
            bytes_moved=0,
            complete=True,
        )
        return True

    def agree(self, directive: Directive, request: Request) -> int | None:
        """Return the step at which all members hold; the lead proposes it, once."""
        path = self.folder / f"obedient-hold-{request.id}"
        if not path.exists():
            if directive.lead != self.host:
                return None
            members = {member.slice for member in directive.members}
            steps = [report.step for report in self.reports() if report.host.slice in members]
            proposed = max([self.step, *steps]) + MARGIN_STEPS
            if self.steps is not None:
                proposed = min(proposed, self.steps)
            write_whole(path, str(proposed))
        return int(path.read_text())

    def commit(self, step: int) -> None:
        write_whole(self.folder / "obedient-commit", str(max(step, self.committed_step() or 0)))
        self.committed = self.committed_step()

    def committed_step(self) -> int | None:
        try:
            return int((self.folder / "obedient-commit").read_text())
        except FileNotFoundError:
            return None

    def end_worker(self, cause: ExitCause, *, code: int, message: str = "") -> None:
        self.exit = self.worker_exit(cause, code=code, message=message)
        self.turn(HostPhase.ENDED)

    def worker_exit(self, cause: ExitCause, *, code: int, message: str = "") -> WorkerExit:
        incarnation = self.directive.incarnation if self.directive else Incarnation(0)
        return WorkerExit(
            incarnation=incarnation,
            cause=cause,
            rank=Rank(self.rank() or 0),
            code=code,
            message=message,
            at_s=time.time(),
            step=Step(self.step),
        )

    def rank(self) -> int | None:
        members = self.directive.members if self.directive else ()
        return next((m.rank for m in members if m.slice == self.host.slice), None)

    def reports(self) -> list[Report]:
        found: list[Report] = []
        for path in sorted((self.folder / "reports").glob("*.json")):
            try:
                report = msgspec.json.decode(path.read_bytes(), type=Report)
            except (FileNotFoundError, msgspec.DecodeError):
                continue
            if report.job_uid == self.arguments.job_uid:
                found.append(report)
        return found

    def turn(self, phase: HostPhase) -> None:
        if phase is not self.phase:
            self.phase, self.phase_since_s = phase, time.time()

    def on_sigterm(self, signum: int, _frame: FrameType | None) -> None:
        now_s = time.time()
        self.notice = NoticeReport(
            reason=signal.Signals(signum).name,
            deadline_s=now_s + self.arguments.grace_s,
            at_s=now_s,
        )
        self.publish()

    def publish(self) -> None:
        self.published_s = time.time()
        if self.is_silent:
            return
        self.sequence += 1
        directive = self.directive
        is_known = directive is not None and self.rank() is not None
        report = Report(
            job_uid=self.arguments.job_uid,
            host=self.host,
            address=self.arguments.address,
            port=self.arguments.port,
            pid=os.getpid(),
            sequence=self.sequence,
            renewed_at_s=time.time(),
            directive_seen=directive.sequence if directive else 0,
            incarnation=directive.incarnation if directive and is_known else Incarnation(0),
            phase=self.phase,
            phase_since_s=self.phase_since_s,
            step=Step(self.step),
            step_snapshot=Step(self.step) if self.step else None,
            step_committed=None if self.committed is None else Step(self.committed),
            committed_at_s=None if self.committed is None else time.time(),
            loss=1.0 / self.step if self.step else None,
            exit=self.exit,
            held=self.held,
            notice=self.notice,
            restore=self.restore,
        )
        path = self.folder / "reports" / f"{self.host.slice}-{self.host.host}.json"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_bytes(msgspec.json.encode(report))
            temporary.replace(path)
        except FileNotFoundError:
            # The job was removed under a process that is about to be killed.
            self.is_ending = True


def write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.rename(path)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", required=True)
    parser.add_argument("--job-uid", required=True)
    parser.add_argument("--slice", type=int, required=True)
    parser.add_argument("--host", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--coordinator-port", type=int, required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    split = sys.argv.index("--")
    arguments = parser.parse_args(sys.argv[1:split])
    program = {word.partition("=")[0]: word.partition("=")[2] for word in sys.argv[split + 1 :]}
    agent = ObedientAgent(arguments, program)
    if "deaf" in program:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, agent.on_sigterm)
    if "daemon" in program and os.fork() == 0:
        os.setsid()
        while True:
            signal.pause()
    print(f"obedient agent of {agent.host}", flush=True)
    agent.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
