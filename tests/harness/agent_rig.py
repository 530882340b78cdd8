"""Real agents on this machine, driven by hand-written directives through the local channel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from everstep.controller.api import codec
from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId
from everstep.controller.api.wire import (
    Command,
    Directive,
    HostPhase,
    Member,
    MemberHost,
    Report,
    Request,
    Settings,
)
from everstep.controller.local.addresses import choose_number
from everstep.runtime.agent.channel import MetricsLine
from everstep.runtime.agent.link import WORKER_NAME
from waiting import PATIENCE

JOB_UID = "uid-1"
PORT = 7070
COORDINATOR_PORT = 8482
PROGRAM = (sys.executable, str(Path(__file__).with_name("linked_program.py")))
AGENT = ("-m", "everstep.runtime.agent.main")
ODD_AGENT = (str(Path(__file__).with_name("odd_agent.py")),)
_MARK = "EVERSTEP_TEST_RIG"


def settings_of(folder: Path, **changes: object) -> Settings:
    base = Settings(
        checkpoint_uri=str(folder / "run"),
        checkpoint_every_steps=None,
        checkpoint_every_s=None,
        retention_latest=3,
        retention_every_steps=None,
        snapshot_every_steps=2,
        snapshot_slots=3,
        snapshot_bytes_max=None,
        snapshot_replicas=0,
        report_interval_s=0.2,
        report_timeout_s=2.0,
        progress_timeout_s=10.0,
        join_timeout_s=20.0,
        start_grace_s=30.0,
    )
    return msgspec.structs.replace(base, **changes)


def free_number(folder: Path) -> int:
    """A number whose addresses nobody uses, and that no job is given while this folder exists."""
    return choose_number(f"{folder.name}-{os.getpid()}", (), port=PORT, owner=folder)


@dataclass
class Rig:
    """Hosts of one job. Every agent that it started, and all below it, is gone after `close`."""

    folder: Path
    number: int
    settings: Settings
    environment: dict[str, str] = field(default_factory=dict[str, str])
    command: Sequence[str] = PROGRAM
    agent: Sequence[str] = AGENT
    grace_s: float = 5.0
    agents: dict[HostId, subprocess.Popen[bytes]] = field(
        default_factory=dict[HostId, "subprocess.Popen[bytes]"]
    )
    started: list[subprocess.Popen[bytes]] = field(default_factory=list["subprocess.Popen[bytes]"])
    directive: Directive | None = None
    sequence: int = 0

    @property
    def mark(self) -> str:
        return f"{self.folder}"

    def address(self, host: HostId) -> str:
        return f"127.{64 + self.number % 128}.{host.slice + 1}.{host.host + 1}"

    def start(self, *hosts: HostId) -> None:
        for host in hosts:
            log = (self.folder / f"{host.slice}-{host.host}.log").open("ab")
            command = [
                *(sys.executable, *self.agent),
                *("--channel", f"local:{self.folder}", "--job-uid", JOB_UID),
                *("--slice", str(host.slice), "--host", str(host.host)),
                *("--address", self.address(host), "--port", str(PORT)),
                *("--coordinator-port", str(COORDINATOR_PORT), "--grace-s", str(self.grace_s)),
                "--",
                *self.command,
            ]
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={
                    **os.environ,
                    "MEETING": str(self.folder / "meeting"),
                    **self.environment,
                    _MARK: self.mark,
                },
            )
            log.close()
            self.agents[host] = process
            self.started.append(process)

    def direct(
        self,
        incarnation: int,
        slices: dict[int, int],
        *,
        command: Command = Command.RUN,
        request: Request | None = None,
        **changes: object,
    ) -> Directive:
        """Write a directive; `slices` maps slice id to host count, in rank order."""
        self.sequence += 1
        members = tuple(
            Member(
                slice=SliceId(slice_id),
                rank=Rank(rank),
                hosts=tuple(
                    MemberHost(
                        host=number,
                        address=self.address(HostId(SliceId(slice_id), number)),
                        port=PORT,
                    )
                    for number in range(count)
                ),
            )
            for rank, (slice_id, count) in enumerate(slices.items())
        )
        lead = HostId(members[0].slice, 0) if members else None
        directive = Directive(
            job="job",
            job_uid=JOB_UID,
            sequence=self.sequence,
            incarnation=Incarnation(incarnation),
            command=command,
            members=members,
            lead=lead,
            request=request,
            token=f"token-{incarnation}",
            settings=self.settings,
        )
        directive = msgspec.structs.replace(directive, **changes)
        self.directive = directive
        path = self.folder / "directive.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(codec.encode(directive))
        temporary.replace(path)
        return directive

    def report(self, host: HostId) -> Report | None:
        path = self.folder / "reports" / f"{host.slice}-{host.host}.json"
        try:
            report = codec.decode_report(path.read_bytes())
        except FileNotFoundError:
            return None
        process = self.agents.get(host)
        return report if process is not None and report.pid == process.pid else None

    def wait(
        self, host: HostId, holds: Callable[[Report], bool], timeout_s: float = 20.0
    ) -> Report:
        """Wait until a host's report satisfies a condition."""
        deadline_s = time.monotonic() + PATIENCE * timeout_s
        report: Report | None = None
        while time.monotonic() < deadline_s:
            report = self.report(host)
            if report is not None and holds(report):
                return report
            time.sleep(0.005)
        raise AssertionError(f"host {host}: last report {report}\n{self.logs()}")

    def wait_phase(self, host: HostId, phase: HostPhase, timeout_s: float = 20.0) -> Report:
        return self.wait(host, lambda r: r.phase is phase, timeout_s)

    def wait_running(self, *hosts: HostId, incarnation: int, timeout_s: float = 20.0) -> None:
        for host in hosts:
            self.wait(
                host,
                lambda r: r.phase is HostPhase.RUNNING and r.incarnation == incarnation,
                timeout_s,
            )

    def metrics(self) -> list[MetricsLine]:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        return [
            msgspec.json.decode(line, type=MetricsLine) for line in path.read_bytes().splitlines()
        ]

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-4000:]}" for path in self.folder.glob("*.log")
        )

    def processes(self) -> list[psutil.Process]:
        """Every live process that an agent of this rig started, the agents included."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and (
                    process.environ().get(_MARK) == self.mark
                ):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def children(self, host: HostId) -> list[psutil.Process]:
        return psutil.Process(self.agents[host].pid).children(recursive=True)

    def worker(self, host: HostId) -> psutil.Process:
        """The worker: below the zygote, beside its spare, or the program itself."""
        agent = psutil.Process(self.agents[host].pid)
        for child in agent.children():
            if "coordinator" not in " ".join(child.cmdline()):
                below = child.children(recursive=True)
                named = [process for process in below if process.name() == WORKER_NAME]
                return (named or below or [child])[-1]
        raise AssertionError(f"host {host} has no worker")

    def zygote(self, host: HostId) -> psutil.Process:
        agent = psutil.Process(self.agents[host].pid)
        for child in agent.children():
            if "coordinator" not in " ".join(child.cmdline()):
                return child
        raise AssertionError(f"host {host} has no zygote")

    def coordinator(self, host: HostId) -> psutil.Process:
        agent = psutil.Process(self.agents[host].pid)
        for child in agent.children():
            if "coordinator" in " ".join(child.cmdline()):
                return child.children()[0]
        raise AssertionError(f"host {host} has no coordinator")

    def stop(self) -> dict[HostId, int]:
        """Tell all to stop; returns their exit codes."""
        self.stop_all()
        return {host: process.wait(10) for host, process in self.agents.items()}

    def stop_all(self) -> None:
        """Tell all that still live to stop."""
        self.direct(
            self.directive.incarnation if self.directive is not None else 1,
            {},
            command=Command.STOP,
        )
        for process in self.agents.values():
            process.wait(PATIENCE * 10)

    def assert_nothing_left(self, timeout_s: float = 5.0) -> None:
        deadline_s = time.monotonic() + PATIENCE * timeout_s
        while (left := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not left, [process.cmdline() for process in left]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for left in self.processes():
            left.kill()


def host(slice_id: int, number: int = 0) -> HostId:
    return HostId(SliceId(slice_id), number)
