"""A real job of the tiny program: started, caught in a stage, disturbed, and looked at afterwards.

Stages are reached by reading what the processes themselves write: the words that a worker shares
with its agent, the reports, and the folder of checkpoints. A process that is caught is frozen
first and looked at once more, so that it *is* in the stage when the deed is done.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import yaml

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.status import JobStatus, Phase, Recovery
from everstep.controller.api.wire import HostPhase, Report
from everstep.controller.cli.demo.run import Run
from everstep.controller.core.model import NoticeClass
from everstep.controller.local import capacity, identity
from everstep.controller.local.addresses import host_address
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.guard import controller_pid, signal_controller
from everstep.controller.ops.clock import SystemClock
from everstep.runtime.agent.control import ControlBlock
from everstep.runtime.agent.link import WORKER_NAME, Word, WorkerPhase
from everstep.runtime.agent.process import children_of
from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.storage.open import open_store
from waiting import PATIENCE, wait_for

NAME = "matrix"
PROGRAM = "everstep.runtime.examples.tiny"
COORDINATOR = "everstep.runtime.agent.coordinator"
STEPS = 160
STEPS_UNHURRIED = 60
PAUSE_S = 2.0
"""After so many steps each waits so long: no disturbance takes longer than what is left then."""
SNAPSHOT_EVERY = 2
CHECKPOINT_EVERY = 8
SETTLE_TIMEOUT_S = 90.0
WIDTH = 9600
"""Divides by every product of slices and devices here; about a megabyte of state."""
STATE_BYTES = 2 * 4 * (16 + 1) * WIDTH + 4
"""Parameters and momenta of 16 features, in float32, and a count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a job is made of."""

    slices: int
    hosts: int = 1
    reduction: str = "ordered"
    is_forked: bool = True
    is_spread: bool = False
    """The state is sharded across slices, not replicated."""
    replicas: int = 0
    on_loss: str = "WaitForReplacement"
    devices: int = 1


class At(Enum):
    """A stage of a worker, as its shared words tell it."""

    CONNECTING = "connecting"
    RESTORING = "restoring"
    COMPILING = "compiling"
    STEPPING = "in a step"
    COPYING = "copying a snapshot"

    def holds(self, words: ControlBlock) -> bool:
        phase = words.read(Word.PHASE)
        match self:
            case At.CONNECTING:
                return phase == WorkerPhase.CONNECTING
            case At.RESTORING:
                return phase == WorkerPhase.RESTORING
            case At.COMPILING:
                return phase == WorkerPhase.COMPILING
            case At.STEPPING:
                is_training = phase == WorkerPhase.TRAINING
                return is_training and words.read(Word.STEP_STARTED) > words.read(Word.STEP_DONE)
            case At.COPYING:
                return words.read(Word.SLOT_WRITING) >= 0


class Missed(Exception):
    """The stage was over before the process stood still."""


@dataclass(slots=True)
class TrainedJob:
    """One job in a state folder of its own."""

    folder: Path
    shape: Shape
    compiled: Path
    environment: dict[str, str] = field(default_factory=dict[str, str])
    run: Run = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = Run(NAME, self.folder, lambda _: None)

    @property
    def state(self) -> StateFolder:
        return StateFolder(self.folder / "local")

    @property
    def haste(self) -> Path:
        return self.folder / "haste"

    @property
    def pace(self) -> Path:
        return self.folder / "pace"

    @property
    def uri(self) -> str:
        return (self.folder / "checkpoints").as_uri()

    @property
    def all_hosts(self) -> list[HostId]:
        slices, hosts = range(self.shape.slices), range(self.shape.hosts)
        return [HostId(SliceId(number), host) for number in slices for host in hosts]

    # What it is told.

    def apply(self) -> None:
        if not self.haste.exists():
            self.pace.write_text(str(STEPS_UNHURRIED))
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(self._manifest()))
        self.run.verb("apply", "-f", str(path))

    def kill_slices(self, *slice_ids: int) -> None:
        """Take slices away; they are gone until they are given back."""
        if len(slice_ids) == self.shape.slices:
            capacity.take_all_away(self.state, NAME, slice_ids, clock=SystemClock())
            return
        for slice_id in slice_ids:
            capacity.take_away(self.state, NAME, SliceId(slice_id), clock=SystemClock())

    @contextmanager
    def unseen(self) -> Generator[None]:
        """What happens inside is seen by the controller together, afterwards."""
        assert signal_controller(self.state, signal.SIGSTOP) is not None
        try:
            yield
        finally:
            signal_controller(self.state, signal.SIGCONT)

    def give_back(self, *slice_ids: int) -> None:
        for slice_id in slice_ids:
            capacity.give_back(self.state, NAME, SliceId(slice_id), now_s=time.time())

    def give_notice(self, slice_id: int, notice_s: float) -> float:
        """Announce a loss; returns its deadline."""
        given = capacity.give_notice(
            self.state,
            NAME,
            SliceId(slice_id),
            notice_s=notice_s,
            notice_class=NoticeClass.IMMINENT,
            now_s=time.time(),
        )
        return given.deadline_s

    def freeze_slice(self, slice_id: int) -> None:
        place = capacity.place_of(self.state.job(NAME), slice_id)
        assert capacity.freeze(place, clock=SystemClock()) > 0

    def slow_down(self) -> None:
        """Let every step from now on take its time."""
        self.pace.write_text(str(self.status().step))

    def hurry(self) -> None:
        """Let the rest of the steps take no longer than they need."""
        self.haste.touch()
        self.pace.unlink(missing_ok=True)

    # What is seen.

    def status(self) -> JobStatus:
        return self.run.status()

    def report(self, host: HostId) -> Report | None:
        path = self.state.job(NAME).report(host)
        try:
            return msgspec.json.decode(path.read_bytes(), type=Report)
        except FileNotFoundError:
            return None

    def reported(self, host: HostId) -> Report:
        report = self.report(host)
        assert report is not None, f"host {host} has not reported yet"
        return report

    def events(self) -> list[dict[str, Any]]:
        text = self.state.job(NAME).events.read_text()
        return [msgspec.json.decode(line) for line in text.splitlines()]

    def logs(self) -> str:
        found = sorted(self.state.job(NAME).logs.glob("*.log"))
        return "\n".join(path.read_text(errors="replace") for path in found)

    def agent(self, host: HostId) -> int | None:
        try:
            record = msgspec.json.decode(self.state.job(NAME).host(host).read_bytes())
        except FileNotFoundError:
            return None
        pid: int = record["pid"]
        return pid

    def zygote(self, host: HostId) -> int | None:
        """The direct child of an agent that runs the user's program."""
        return next((pid for pid in self._below(host) if _runs(pid, PROGRAM)), None)

    def coordinator(self, host: HostId) -> int | None:
        """The coordination service that this host holds."""
        forkers = [pid for pid in self._below(host) if _runs(pid, COORDINATOR)]
        services = [service for pid in forkers for service in children_of(pid)]
        return max(services, default=None)

    def worker(self, host: HostId) -> int | None:
        """The process that trains. Beside it a spare may wait, which shares words too."""
        program = [pid for pid in self._below(host) if _runs(pid, PROGRAM)]
        forked = [pid for parent in program for pid in children_of(parent)]
        named = [pid for pid in forked if _name_of(pid) == WORKER_NAME]
        found = [pid for pid in (*named, *program) if _control_of(pid) is not None]
        return found[0] if found else None

    def _below(self, host: HostId) -> Sequence[int]:
        agent = self.agent(host)
        return () if agent is None else sorted(children_of(agent))

    # Catching.

    @contextmanager
    def caught(
        self, host: HostId, stage: At, *, other_than: int | None = None, timeout_s: float = 40.0
    ) -> Generator[int]:
        """Freeze a worker in a stage; inside, it stands still there. It goes on afterwards.

        Args:
            host: whose worker.
            stage: where it must be.
            other_than: a worker of before, which is not meant.
            timeout_s: until when it must be there.

        Raises:
            Missed: it never stood still in that stage.
        """
        deadline_s = time.monotonic() + PATIENCE * timeout_s
        while time.monotonic() < deadline_s:
            pid = self.worker(host)
            words = None if pid in (None, other_than) else _control_of(pid)
            if pid is None or words is None:
                time.sleep(0.001)
                continue
            try:
                is_caught = _freeze_at(pid, words, stage, min(deadline_s, time.monotonic() + 0.5))
            finally:
                words.close()
            if is_caught:
                with thawed_afterwards(pid):
                    yield pid
                return
        raise Missed(f"no worker of host {host} stood still while {stage.value}")

    @contextmanager
    def caught_importing(self, host: HostId) -> Generator[int]:
        """Freeze a program while it is being imported."""

        def reported_after(at_s: float) -> bool:
            report = self.report(host)
            return report is not None and report.renewed_at_s > at_s and not report.program_ready

        pid = wait_for(lambda: self.zygote(host), what=f"the program of {host}", timeout_s=40)
        os.kill(pid, signal.SIGSTOP)
        at_s = time.time()
        with thawed_afterwards(pid):
            wait_for(
                lambda: reported_after(at_s),
                what=f"host {host} to say that its program is not ready",
                timeout_s=40,
            )
            yield pid

    @contextmanager
    def caught_joining(self, host: HostId, *, held_up_by: HostId) -> Generator[int]:
        """Kill a worker, and freeze an agent in the join of the incarnation that follows.

        A join takes milliseconds, so another agent stands still first: nobody's join is over before
        that one's, and it goes on once the one that is meant stands still.
        """
        frozen, agent = self.agent(held_up_by), self.agent(host)
        assert frozen is not None
        assert agent is not None
        before = self.reported(host).incarnation
        os.kill(frozen, signal.SIGSTOP)
        with thawed_afterwards(frozen):
            victim = self.worker(HostId(SliceId(0), 0))
            assert victim is not None
            os.kill(victim, signal.SIGKILL)

            def joins() -> bool:
                report = self.reported(host)
                return report.incarnation > before and report.phase is HostPhase.JOINING

            wait_for(joins, what=f"host {host} to join", timeout_s=20, look_every_s=0.005)
            os.kill(agent, signal.SIGSTOP)
        with thawed_afterwards(agent):
            yield agent

    @contextmanager
    def caught_writing(self) -> Generator[str]:
        """Freeze all agents while a checkpoint is being written; its draft's folder is given."""
        store = open_store(self.uri)
        folder = self.folder / "checkpoints"
        pids = [pid for host in self.all_hosts if (pid := self.agent(host)) is not None]
        seen = set(os.listdir(folder))
        deadline_s = time.monotonic() + PATIENCE * 40.0
        while time.monotonic() < deadline_s:
            new = {name for name in os.listdir(folder) if name.startswith("step-")} - seen
            if not new:
                continue
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            committed = {commit.folder for commit in list_commits(store)}
            drafts = sorted(new - committed)
            if drafts:
                yield drafts[0]
            for pid in pids:
                _send(pid, signal.SIGCONT)
            if drafts:
                return
            seen |= new
        raise Missed("no checkpoint was caught while it was being written")

    def wait_collective(self, host: HostId, frozen: HostId) -> int:
        """Wait until a worker is in the step after that in which another one was frozen.

        That step sums over both, so it cannot be finished while the other stands still.
        """
        frozen_pid, pid = self.worker(frozen), self.worker(host)
        assert frozen_pid is not None
        assert pid is not None
        theirs, words = _control_of(frozen_pid), _control_of(pid)
        assert theirs is not None
        assert words is not None
        step = theirs.read(Word.STEP_DONE)
        wait_for(
            lambda: words.read(Word.STEP_STARTED) > step,
            what=f"{host} to be in a step that needs {frozen}",
            timeout_s=20,
        )
        return pid

    # Waiting.

    def wait_trained(self, members: Sequence[int], incarnation: int) -> JobStatus:
        """Until an incarnation or a newer one has finished its first step on these slices."""

        def trained() -> JobStatus | None:
            status, newest = self.status(), self.run.read_metrics()
            now = tuple(one.id for one in status.slice_statuses if one.rank is not None)
            assert status.phase is not Phase.FAILED, f"{status.message}\n{self.logs()[-4000:]}"
            assert status.phase is not Phase.SUCCEEDED, "the training ended before the fault"
            is_trained = (
                status.phase is Phase.RUNNING
                and now == tuple(members)
                and status.incarnation >= incarnation
                and newest is not None
                and newest.incarnation == status.incarnation
                # A first start is not a recovery.
                and all(one.first_step_s is not None for one in status.recoveries[-1:])
            )
            return status if is_trained else None

        try:
            return wait_for(
                trained,
                what=f"training on {members}",
                timeout_s=SETTLE_TIMEOUT_S,
                look_every_s=0.05,
            )
        except AssertionError as error:
            status = self.status()
            raise AssertionError(
                f"{error}: {status.phase.value}, incarnation {status.incarnation}: "
                f"{status.message}; {status.recoveries[-2:]}\n{self.logs()[-4000:]}"
            ) from error

    def wait_decided(self, incarnation: int) -> None:
        """Until the controller has persisted an incarnation, whose recovery then runs."""
        wait_for(
            lambda: self.status().incarnation >= incarnation,
            what=f"incarnation {incarnation} to be decided",
            look_every_s=0.002,
            timeout_s=40,
        )
        recovery = self.status().recoveries[-1]
        assert recovery.first_step_s is None, "the recovery was over already"

    def wait_snapshot(self, host: HostId, step: int) -> None:
        def held() -> bool:
            report = self.report(host)
            return report is not None and (report.step_snapshot or 0) >= step

        wait_for(held, what=f"a snapshot of step {step} on {host}", timeout_s=40)

    def wait_replicated(self, hosts: Sequence[HostId], after: int) -> int:
        """Until these hosts have their share of a newer step that their partners hold: which?"""

        def replicated() -> int | None:
            found = [self.report(host) for host in hosts]
            step = min((r.step_replicated if r else None) or 0 for r in found)
            return step if step > after else None

        return wait_for(replicated, what=f"replicas after step {after}", timeout_s=60)

    def wait_committed(self) -> None:
        wait_for(
            lambda: self.status().checkpoint.last_committed,
            what="a durable step",
            timeout_s=60,
        )

    def recoveries_after(self, incarnation: int) -> list[Recovery]:
        return [one for one in self.status().recoveries if one.incarnation > incarnation]

    def finish(self) -> None:
        """Let it train to its last step without any pause."""
        self.hurry()

        def ended() -> JobStatus | None:
            status = self.status()
            return status if status.phase in (Phase.SUCCEEDED, Phase.FAILED) else None

        status = wait_for(
            ended, what="the last step", timeout_s=SETTLE_TIMEOUT_S, look_every_s=0.05
        )
        assert status.phase is Phase.SUCCEEDED, status.message

    # What is left.

    def assert_nothing_left(self) -> None:
        """No process, no listener, no socket file, no shared-memory file of ours."""
        record = msgspec.json.decode(self.state.job(NAME).record.read_bytes())
        # All hosts of a job share the first two numbers of their addresses.
        number: int = record["metadata"]["number"]
        network = host_address(number, self.all_hosts[0]).rsplit(".", 2)[0] + "."
        wait_for(lambda: not self.processes(), what="every process of the job to be gone")
        self.run.verb("stop", "--all")
        assert controller_pid(self.state) is None
        assert not [one for one in _listeners() if one.startswith(network)]
        assert not [path for path in self.folder.rglob("*") if path.is_socket()]
        assert not [name for name in os.listdir("/dev/shm") if "everstep" in name]

    def processes(self) -> list[int]:
        """All that was started from this state folder."""
        wanted = str(self.state.root)
        marked = identity.find_marked("")
        return [who.pid for who, mark in marked if mark.split(":", 3)[3] == wanted]

    def close(self) -> None:
        """End everything, whatever state the test left."""
        self.run.verb("stop", "--all")

    def _manifest(self) -> dict[str, Any]:
        shape = self.shape
        variables = {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(shape.devices),
            "JAX_COMPILATION_CACHE_DIR": str(self.compiled),
            "STEPS": str(STEPS),
            "STEP_S": "0.15",
            "HASTE": str(self.haste),
            "PACE": str(self.pace),
            "PACE_S_MAX": str(PAUSE_S),
            "WIDTH": str(WIDTH),
            "REDUCTION": shape.reduction,
            "SPREAD": str(int(shape.is_spread)),
            "LOGICAL_SHARDS": "24",
            "FAULT": "none" if shape.is_forked else "thread-at-import",
        } | self.environment
        container = {
            "name": "trainer",
            "command": [sys.executable, "-m", PROGRAM],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
        }
        return {
            "apiVersion": "everstep.dev/v1alpha1",
            "kind": "MultiSliceJob",
            "metadata": {"name": NAME},
            "spec": {
                "slices": {
                    "desired": shape.slices,
                    "min": 1,
                    "max": shape.slices,
                    "hostsPerSlice": shape.hosts,
                },
                "template": {
                    "spec": {"containers": [container], "terminationGracePeriodSeconds": 5}
                },
                "runtime": {
                    "timeouts": {
                        "reportIntervalSeconds": 0.25,
                        "reportSeconds": 5,
                        "progressSeconds": 8,
                        "joinSeconds": 60,
                        "startSeconds": 120,
                    }
                },
                "checkpoint": {
                    "uri": self.uri,
                    "everySteps": CHECKPOINT_EVERY,
                    "emergency": {"budgetSeconds": 5, "safetyMarginSeconds": 1},
                    "snapshot": {"everySteps": SNAPSHOT_EVERY, "replicas": shape.replicas},
                },
                "elasticity": {
                    "onLoss": shape.on_loss,
                    "scaleUp": {
                        "minUptimeSeconds": 0,
                        "cooldownSeconds": 0,
                        "stabilizationSeconds": 0,
                    },
                },
                "restart": {
                    "maxRestarts": 100,
                    "maxDisruptionsPerHour": 100,
                    "backoff": {"initialSeconds": 0.05, "maxSeconds": 0.1},
                },
            },
        }


@contextmanager
def thawed_afterwards(pid: int) -> Generator[None]:
    try:
        yield
    finally:
        _send(pid, signal.SIGCONT)


def _send(pid: int, number: int) -> None:
    who = identity.identify(pid)
    if who is not None:
        identity.send(who, number)


def _freeze_at(pid: int, words: ControlBlock, stage: At, until_s: float) -> bool:
    """Freeze a process that is in a stage; False when it is not until then, or not any more."""
    # Without a pause: a stage may be over in a tenth of a millisecond.
    holds: Callable[[ControlBlock], bool] = stage.holds
    while not holds(words):
        if time.monotonic() > until_s or not Path(f"/proc/{pid}").exists():
            return False
    _send(pid, signal.SIGSTOP)
    wait_for(lambda: _state_of(pid) in "TZX", what=f"process {pid} to stand still")
    if _state_of(pid) == "T" and holds(words):
        return True
    _send(pid, signal.SIGCONT)
    return False


def _name_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text().removesuffix("\n")
    except OSError:
        return None


def _state_of(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    return text[text.rindex(")") + 2]


def _runs(pid: int, module: str) -> bool:
    """Whether a process runs a module. Before its `exec` it still looks like its agent."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[1:3] == [b"-m", module.encode()]


def _control_of(pid: int) -> ControlBlock | None:
    """Map the words that a worker shares with its agent; None when it is no worker yet."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return None
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        try:
            if "memfd:everstep-control" not in os.readlink(path):
                continue
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue
        try:
            return ControlBlock(fd)
        finally:
            os.close(fd)
    return None


def _listeners() -> set[str]:
    """Addresses at which any process of this machine listens."""
    found: set[str] = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            raw = bytes.fromhex(fields[1].split(":")[0])
            found.add(".".join(str(byte) for byte in reversed(raw)))
    return found
