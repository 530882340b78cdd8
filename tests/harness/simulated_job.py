"""One job in virtual time: hosts that obey directives, and everything that can befall them.

The real core decides; the world, the agents and the clock are simulated, in one thread and from one
seed. Agents do what the runtime's agents do as far as the controller can see it: they join, restore
the newest step that their memories and the storage cover, train, hold when asked, report. They do
not compute anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

from msgspec.structs import replace

from everstep.controller.api.codec import decode, encode
from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step
from everstep.controller.api.spec import JobSpec
from everstep.controller.api.status import JobStatus
from everstep.controller.api.wire import (
    Command,
    Directive,
    ExitCause,
    Held,
    HostPhase,
    NoticeReport,
    Report,
    RequestKind,
    RestoreFigures,
    WorkerExit,
)
from everstep.controller.core.invariants import find_violations
from everstep.controller.core.ledger import Ledger
from everstep.controller.core.model import (
    Action,
    Capacity,
    EmitEvent,
    HostView,
    Notice,
    NoticeClass,
    Observation,
    Plan,
    ProcessState,
    RemoveJob,
    SliceView,
    StartSlice,
    StopSlice,
    View,
    WriteDirective,
)
from everstep.controller.core.plan import plan

UID = "uid-1"
START_S = 1_000_000.0
NO_INCARNATION = Incarnation(0)


class Worker(Enum):
    NONE = "none"
    JOINING = "joining"
    RESTORING = "restoring"
    TRAINING = "training"
    LEFT = "left"
    ENDED = "ended"
    DONE = "done"


@dataclass(slots=True)
class Agent:
    """One agent process and its worker."""

    host: HostId
    pid: int
    started_for: Incarnation
    born_s: float
    is_alive: bool = True
    is_frozen: bool = False
    exited_at_s: float | None = None
    exit_code: int | None = None
    """None where a signal ended it, or nobody saw how it ended."""
    kill_at_s: float | None = None
    sequence_seen: int = 0
    incarnation: Incarnation = NO_INCARNATION
    worker: Worker = Worker.NONE
    phase_since_s: float = 0.0
    worker_since_s: float = 0.0
    step: int = 0
    memory: set[int] = field(default_factory=set[int])
    exit: WorkerExit | None = None
    held: Held | None = None
    restore: RestoreFigures | None = None
    missing: tuple[HostId, ...] = ()
    coordinator_lost_at_s: float | None = None
    notice: NoticeReport | None = None
    report: Report | None = None
    is_deaf: bool = False
    """Alive and reporting, but it follows no directive."""
    save_settled: int | None = None
    fork_refused: str | None = None
    rejects: tuple[str, ...] = ()
    """Sources that its next restore finds bad."""
    crashes_at: int | None = None
    """The worker raises when it reaches this step."""
    begins_ahead: bool = False
    """It has begun the step after the one at which the others leave, and says that it is past it;
    its own agent ends it there."""


@dataclass(slots=True, kw_only=True)
class Timing:
    start_s: float = 0.4
    import_s: float = 0.0
    """From the first report until the program is imported."""
    join_s: float = 0.1
    restore_s: float = 0.2
    step_s: float = 0.1
    hold_s: float = 0.15


SAVE_AFTER_S = 1.2
"""How long a job waits before its lead brings to storage what the members hold."""


class SimulatedJob:
    """The world of one job. `World` for the code that wants one; time moves by `advance`."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        steps_total: int = 10_000,
        commit_every: int = 20,
        timing: Timing | None = None,
    ) -> None:
        self.spec = spec
        self.now_s = START_S
        self.timing = timing or Timing()
        self.steps_total = steps_total
        self.commit_every = commit_every
        self.capacity = {SliceId(i): Capacity.AVAILABLE for i in range(spec.slices.count_max)}
        self.since_s = dict.fromkeys(self.capacity, self.now_s)
        self.notices: dict[SliceId, Notice] = {}
        self.agents: dict[HostId, Agent] = {}
        self.directive: Directive | None = None
        self._committed = 0
        self._committed_at_s: float | None = None
        self.storage_error: str | None = None
        """What the lead says of its last write; nothing is committed meanwhile."""
        self.is_deleting = False
        self.is_removed = False
        self.generation = 1
        self.events: dict[str, EmitEvent] = {}
        self.performed: list[Action] = []
        self.writes = 0
        self.cut_reports = False
        """The way to the controller is cut: agents live, their reports do not arrive."""
        self._stored: tuple[bytes, bytes] = (encode(Ledger()), encode(JobStatus()))
        self._version = 0
        self.refuses_saves = False
        """What members hold is not enough for a checkpoint, or storage does not take it."""
        self._pid = 100
        self._lineage_step = 0
        self.restores: dict[int, tuple[int, int]] = {}
        """By incarnation: the newest step that was really finished before, and the restored one."""

    # The controller's side.

    @property
    def ledger(self) -> Ledger:
        return decode(self._stored[0], Ledger)

    @property
    def status(self) -> JobStatus:
        return decode(self._stored[1], JobStatus)

    @property
    def committed(self) -> int:
        return self._committed

    @committed.setter
    def committed(self, step: int) -> None:
        if step > self._committed and self.storage_error is None:
            self._committed, self._committed_at_s = step, self.now_s

    def jobs(self) -> tuple[str, ...]:
        return () if self.is_removed else ("job",)

    def view(self) -> View:
        ids = sorted({*self.capacity, *(host.slice for host in self.agents)})
        return View(
            job="job",
            job_uid=UID,
            generation=self.generation,
            spec=self.spec,
            is_deleting=self.is_deleting,
            slices=tuple(self._slice_view(SliceId(id_)) for id_ in ids),
            directive=self.directive,
            created_at_s=START_S,
        )

    def _slice_view(self, id_: SliceId) -> SliceView:
        available = self.capacity.get(id_) is Capacity.AVAILABLE
        return SliceView(
            id=id_,
            capacity=Capacity.AVAILABLE if available else Capacity.GONE,
            notice=self.notices.get(id_),
            hosts=tuple(
                self._host_view(HostId(id_, host))
                for host in range(self.spec.slices.hosts_per_slice)
            ),
            available_since_s=self.since_s.get(id_) if available else None,
        )

    def _host_view(self, host: HostId) -> HostView:
        agent = self.agents.get(host)
        address = f"127.64.{host.slice + 1}.{host.host + 1}"
        if agent is None:
            return HostView(
                host=host.host,
                process=ProcessState.ABSENT,
                started_for=None,
                address=address,
                port=7070,
            )
        return HostView(
            host=host.host,
            process=ProcessState.ALIVE if agent.is_alive else ProcessState.EXITED,
            started_for=agent.started_for,
            address=address,
            port=7070,
            exited_at_s=agent.exited_at_s,
            exit_code=agent.exit_code,
            report=agent.report,
        )

    def observe(self, job: str) -> Observation | None:
        if self.is_removed or job != "job":
            return None
        return Observation(
            view=self.view(),
            ledger=self.ledger,
            status=self.status,
            precondition=str(self._version),
        )

    def persist(self, job: str, ledger: Ledger, status: JobStatus, precondition: str) -> str | None:
        assert job == "job"
        if precondition != str(self._version):
            return None
        self._stored = (encode(ledger), encode(status))
        self._version += 1
        self.writes += 1
        return str(self._version)

    def note_progress(self, job: str, status: JobStatus, precondition: str) -> bool:
        assert job == "job"
        if precondition != str(self._version):
            return False
        self._stored = (self._stored[0], encode(status))
        return True

    def perform(self, job: str, action: Action) -> None:
        assert job == "job"
        self.performed.append(action)
        match action:
            case StartSlice():
                for index in range(self.spec.slices.hosts_per_slice):
                    self._start(HostId(action.slice, index), action.incarnation)
            case StopSlice():
                for agent in self._of(action.slice):
                    if agent.is_alive and agent.started_for <= action.incarnation:
                        self._stop(agent, action.grace_s)
            case WriteDirective():
                old = self.directive
                if old is None or action.directive.sequence > old.sequence:
                    self.directive = action.directive
            case EmitEvent():
                self.events.setdefault(action.key, action)
            case RemoveJob():
                self.is_removed = True

    def run_pass(self, *, crash_after: int | None = None, conflict: bool = False) -> Plan | None:
        """Observe, plan, persist, act. Crash after so many writes and actions, if told."""
        seen = self.observe("job")
        if seen is None:
            return None
        token = f"token-{self._version}"
        made = plan(seen.view, seen.ledger, seen.status, self.now_s, fresh_token=token)
        assert find_violations(seen.view, seen.ledger, made) == ()
        if crash_after == 0:
            return made
        if conflict:
            return made
        if made.must_persist:
            written = self.persist("job", made.ledger, made.status, seen.precondition)
            assert written is not None
        for count, action in enumerate(made.actions, start=1):
            if crash_after is not None and count >= crash_after:
                return made
            self.perform("job", action)
        return made

    # What befalls.

    def kill_worker(self, host: HostId) -> None:
        agent = self.agents[host]
        if agent.is_alive and agent.worker in (
            Worker.JOINING,
            Worker.RESTORING,
            Worker.TRAINING,
        ):
            self.end_worker(agent, ExitCause.SIGNALED, signal=9)

    def raise_in_worker(self, host: HostId, message: str = "ValueError: no") -> None:
        agent = self.agents[host]
        if agent.is_alive and agent.worker is Worker.TRAINING:
            self.end_worker(agent, ExitCause.USER_ERROR, message=message)

    def kill_coordinator(self, *, aborts: bool = True) -> None:
        """End the coordination service. Its agent ends its worker; the others end as they like."""
        members = [one for one in self._members() if one is not None]
        lead = next((one for one in members if one.host == members[0].host), None)
        running = (Worker.RESTORING, Worker.TRAINING)
        if lead is None or not lead.is_alive or lead.is_frozen or lead.worker not in running:
            return
        lead.coordinator_lost_at_s = self.now_s
        for one in members:
            if one.is_alive and one.incarnation == lead.incarnation and one.worker in running:
                signal = 6 if aborts and one is not lead else None
                self.end_worker(one, ExitCause.CONSEQUENCE, signal=signal, alone=True)

    def kill_slice(self, id_: SliceId, *, capacity_gone: bool = False) -> None:
        for agent in self._of(id_):
            self._exit(agent)
        if capacity_gone:
            self.take(id_)

    def kill_agent(self, host: HostId, *, exit_code: int | None = None) -> None:
        """End an agent; with an exit code, by its own doing."""
        if host in self.agents:
            self.agents[host].exit_code = exit_code
            self._exit(self.agents[host])

    def freeze(self, id_: SliceId) -> None:
        for agent in self._of(id_):
            agent.is_frozen = True

    def thaw(self, id_: SliceId) -> None:
        for agent in self._of(id_):
            agent.is_frozen = False

    def take(self, id_: SliceId) -> None:
        """Capacity goes away, and with it whatever runs there."""
        self.notices.pop(id_, None)
        self.capacity[id_] = Capacity.GONE
        self.since_s[id_] = self.now_s
        for agent in self._of(id_):
            self._exit(agent)

    def give(self, id_: SliceId) -> None:
        self.notices.pop(id_, None)
        if self.capacity[id_] is Capacity.GONE:
            self.capacity[id_] = Capacity.AVAILABLE
            self.since_s[id_] = self.now_s

    def notify(
        self,
        id_: SliceId,
        notice_s: float,
        notice_class: NoticeClass = NoticeClass.IMMINENT,
    ) -> None:
        if self.capacity[id_] is Capacity.AVAILABLE and id_ not in self.notices:
            self.notices[id_] = Notice(
                id=f"n-{id_}-{self.now_s:.3f}",
                slice=id_,
                notice_class=notice_class,
                deadline_s=self.now_s + notice_s,
                first_seen_s=self.now_s,
            )

    def withdraw(self, id_: SliceId) -> None:
        self.notices.pop(id_, None)

    def terminate(self, host: HostId, grace_s: float) -> None:
        """SIGTERM to an agent by somebody else: the agent takes it as a notice."""
        agent = self.agents[host]
        if agent.notice is None:
            deadline_s = self.now_s + grace_s
            agent.notice = NoticeReport(reason="SIGTERM", deadline_s=deadline_s, at_s=self.now_s)
            agent.kill_at_s = deadline_s

    def respec(self, spec: JobSpec) -> None:
        self.spec = spec
        self.generation += 1
        for index in range(spec.slices.count_max):
            self.capacity.setdefault(SliceId(index), Capacity.AVAILABLE)
            self.since_s.setdefault(SliceId(index), self.now_s)

    # Time.

    def advance(self, seconds: float = 0.1) -> None:
        """Let time pass for everybody but the controller."""
        self.now_s = round(self.now_s + seconds, 6)
        for id_, notice in list(self.notices.items()):
            if self.now_s >= notice.deadline_s and notice.notice_class is NoticeClass.IMMINENT:
                self.take(id_)
        for agent in list(self.agents.values()):
            if agent.is_alive and agent.kill_at_s is not None and self.now_s >= agent.kill_at_s:
                self._exit(agent)
        for agent in self.agents.values():
            if agent.is_alive and not agent.is_frozen:
                self._follow(agent)
        self._train()
        # Whoever is done has the last step committed as soon as storage takes it.
        done = [one.step for one in self.agents.values() if one.worker is Worker.DONE]
        self.committed = max(done, default=0)
        for agent in self.agents.values():
            if agent.is_alive and not agent.is_frozen and not self.cut_reports:
                if self.now_s >= agent.born_s + self.timing.start_s:
                    agent.report = self._report(agent)

    def run(self, seconds: float, *, tick_s: float = 0.1) -> None:
        """Alternate time and passes for so long."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and not self.is_removed:
            self.advance(tick_s)
            self.run_pass()

    # Agents.

    def _of(self, id_: SliceId) -> list[Agent]:
        return [agent for host, agent in self.agents.items() if host.slice == id_]

    def _start(self, host: HostId, incarnation: Incarnation) -> None:
        old = self.agents.get(host)
        if old is not None and old.is_alive:
            return
        if self.capacity.get(host.slice) is not Capacity.AVAILABLE:
            return
        self._pid += 1
        self.agents[host] = Agent(
            host=host,
            pid=self._pid,
            started_for=incarnation,
            born_s=self.now_s,
            phase_since_s=self.now_s,
        )

    def _stop(self, agent: Agent, grace_s: float) -> None:
        if grace_s <= 0:
            self._exit(agent)
        else:
            # A frozen process does not see SIGTERM; the others end soon.
            ends_s = self.now_s + (grace_s if agent.is_frozen else min(grace_s, 0.3))
            agent.kill_at_s = min(ends_s, agent.kill_at_s or ends_s)

    def _exit(self, agent: Agent) -> None:
        if not agent.is_alive:
            return
        agent.is_alive = False
        agent.exited_at_s = self.now_s
        agent.memory.clear()
        self._orphan(agent.incarnation, but=agent.host)

    def _orphan(self, incarnation: Incarnation, *, but: HostId) -> None:
        """The other workers of an incarnation lose their collective."""
        for agent in self.agents.values():
            if agent.host == but or not agent.is_alive or agent.incarnation != incarnation:
                continue
            if agent.worker in (Worker.RESTORING, Worker.TRAINING):
                self.end_worker(agent, ExitCause.CONSEQUENCE, alone=True)

    def end_worker(
        self,
        agent: Agent,
        cause: ExitCause,
        *,
        signal: int | None = None,
        message: str = "",
        alone: bool = False,
        before_main: bool = False,
        stage: int = 0,
    ) -> None:
        restored = agent.restore.step if agent.restore is not None else None
        agent.exit = WorkerExit(
            incarnation=agent.incarnation,
            cause=cause,
            rank=Rank(agent.host.slice),
            signal=signal,
            message=message,
            at_s=self.now_s,
            step=Step(agent.step),
            restored_step=restored,
            is_before_main=before_main,
            stage=stage,
        )
        agent.worker = {ExitCause.LEFT: Worker.LEFT, ExitCause.DONE: Worker.DONE}.get(
            cause, Worker.ENDED
        )
        agent.phase_since_s = self.now_s
        if not alone:
            self._orphan(agent.incarnation, but=agent.host)

    def _follow(self, agent: Agent) -> None:
        directive = self.directive
        if self.now_s < agent.born_s + self.timing.start_s or directive is None or agent.is_deaf:
            return
        if directive.sequence > agent.sequence_seen:
            agent.sequence_seen = directive.sequence
            if directive.command is Command.STOP:
                self._save(directive)
                self._exit(agent)
                return
            member = any(one.slice == agent.host.slice for one in directive.members)
            if directive.command is Command.WAIT or not member:
                if agent.worker is not Worker.DONE:
                    agent.worker = Worker.NONE
                agent.phase_since_s = self.now_s
            elif directive.incarnation > agent.incarnation:
                agent.incarnation = directive.incarnation
                agent.worker, agent.exit, agent.restore = Worker.JOINING, None, None
                agent.held, agent.missing = None, ()
                agent.coordinator_lost_at_s = None
                agent.worker_since_s = agent.phase_since_s = self.now_s

        elif directive.command is Command.WAIT and directive.lead == agent.host:
            if self.now_s >= agent.phase_since_s + SAVE_AFTER_S:
                self._save(directive)

    def _save(self, directive: Directive) -> None:
        """The members bring to storage what they hold."""
        for member in directive.members:
            for host in member.hosts:
                agent = self.agents.get(HostId(member.slice, host.host))
                if agent is not None and agent.is_alive and not agent.is_frozen:
                    if not self.refuses_saves:
                        self.committed = max([self.committed, *agent.memory])
                    if agent.host == directive.lead:
                        agent.save_settled = directive.sequence

    def _members(self) -> list[Agent | None]:
        directive = self.directive
        if directive is None or directive.command is not Command.RUN:
            return []
        return [
            self.agents.get(HostId(one.slice, host.host))
            for one in directive.members
            for host in one.hosts
        ]

    def _train(self) -> None:
        directive, members = self.directive, self._members()
        if directive is None or not members:
            return
        n = directive.incarnation
        active = [
            one
            for one in members
            if one is not None and one.is_alive and one.incarnation == n and not one.is_frozen
        ]
        lead = next((one for one in active if one.host == directive.lead), None)
        if lead is not None and len(active) < len(members) and lead.worker is Worker.JOINING:
            if self.now_s >= lead.worker_since_s + directive.settings.join_timeout_s:
                present = {one.host for one in active}
                lead.missing = tuple(
                    HostId(one.slice, host.host)
                    for one in directive.members
                    for host in one.hosts
                    if HostId(one.slice, host.host) not in present
                )
        if len(active) < len(members):
            return
        self._join_and_restore(directive, active)
        if all(one.worker is Worker.TRAINING for one in active):
            self._step(active)
        self._serve(directive, active)

    def _join_and_restore(self, directive: Directive, active: list[Agent]) -> None:
        timing = self.timing
        if all(one.worker is Worker.JOINING for one in active):
            joined_s = max(one.worker_since_s for one in active)
            if self.now_s >= joined_s + timing.join_s:
                aside = set(directive.restore_set_aside)
                everything = {step for one in active for step in one.memory}
                stored = {self.committed} - {0}
                if everything | stored <= aside:
                    # What was set aside is still better than nothing.
                    aside = set()
                held = everything - aside
                step = max([*held, *(stored - aside), 0])
                self.restores[directive.incarnation] = (self._lineage_step, step)
                self._lineage_step = step
                for one in active:
                    one.worker, one.step = Worker.RESTORING, step
                    one.worker_since_s = one.phase_since_s = self.now_s
                    one.restore = RestoreFigures(
                        incarnation=directive.incarnation,
                        step=Step(step),
                        source="memory" if held else ("storage" if step else "fresh"),
                        own_bytes=1000 if one.memory - aside else 0,
                        peer_bytes=1000 if held and not one.memory - aside else 0,
                        rejected=one.rejects,
                        join_s=timing.join_s,
                        restore_s=timing.restore_s,
                    )
        if all(one.worker is Worker.RESTORING for one in active):
            if self.now_s >= active[0].worker_since_s + timing.restore_s:
                for one in active:
                    one.worker = Worker.TRAINING
                    one.worker_since_s = one.phase_since_s = self.now_s

    def _step(self, active: list[Agent]) -> None:
        since_s = active[0].worker_since_s
        if self.now_s < since_s + self.timing.step_s:
            return
        step = active[0].step + 1
        for one in active:
            if one.crashes_at is not None and step == one.crashes_at:
                self.end_worker(one, ExitCause.USER_ERROR, message="ValueError: crash")
                return
        self._lineage_step = step
        for one in active:
            one.step, one.worker_since_s = step, self.now_s
            one.memory = {step}
            if one.restore is not None and one.restore.first_step_at_s is None:
                one.restore = replace(
                    one.restore, first_step_s=self.timing.step_s, first_step_at_s=self.now_s
                )
        if step % self.commit_every == 0:
            self.committed = max(self.committed, step)
        if step >= self.steps_total:
            self.committed = step
            for one in active:
                self.end_worker(one, ExitCause.DONE, alone=True)

    def _serve(self, directive: Directive, active: list[Agent]) -> None:
        request = directive.request
        lead = next((one for one in active if one.host == directive.lead), None)
        if request is None or lead is None:
            return
        if lead.held is not None and lead.held.request_id == request.id:
            return
        if not all(one.worker in (Worker.TRAINING, Worker.LEFT) for one in active):
            return
        if self.now_s < lead.phase_since_s + self.timing.hold_s:
            return
        if request.durable:
            self.committed = max(self.committed, lead.step)
        for one in active:
            if request.kind is RequestKind.LEAVE and one.worker is Worker.TRAINING:
                if one.begins_ahead:
                    one.step += 1
                    self.end_worker(one, ExitCause.CONSEQUENCE, alone=True)
                else:
                    self.end_worker(one, ExitCause.LEFT, alone=True)
        lead.held = Held(
            request_id=request.id,
            step=Step(lead.step),
            where=tuple(one.host for one in active if one.host.slice not in request.doomed),
            durable=request.durable,
            bytes_moved=0,
            complete=len({one.host.slice for one in active} - set(request.doomed)) > 0
            or request.durable,
            drain_s=self.timing.hold_s,
        )

    def _report(self, agent: Agent) -> Report:
        phases = {
            Worker.NONE: HostPhase.WAITING,
            Worker.JOINING: HostPhase.JOINING,
            Worker.RESTORING: HostPhase.RESTORING,
            Worker.TRAINING: HostPhase.RUNNING,
            Worker.LEFT: HostPhase.HELD,
            Worker.ENDED: HostPhase.ENDED,
            Worker.DONE: HostPhase.DONE,
        }
        old = agent.report
        is_unsaved = agent.worker is Worker.DONE and self.committed < agent.step
        return Report(
            job_uid=UID,
            host=agent.host,
            address=f"127.64.{agent.host.slice + 1}.{agent.host.host + 1}",
            port=7070,
            pid=agent.pid,
            sequence=1 if old is None else old.sequence + 1,
            renewed_at_s=self.now_s,
            directive_seen=agent.sequence_seen,
            incarnation=agent.incarnation,
            phase=HostPhase.RUNNING if is_unsaved else phases[agent.worker],
            phase_since_s=agent.phase_since_s,
            step=Step(agent.step),
            step_snapshot=Step(max(agent.memory)) if agent.memory else None,
            step_committed=Step(self.committed) if self.committed else None,
            committed_at_s=self._committed_at_s,
            fork_refused=agent.fork_refused,
            storage_error=self.storage_error,
            storage_error_step=_step_named_in(self.storage_error),
            steps_per_s=10.0 if agent.worker is Worker.TRAINING else None,
            loss=1.0,
            exit=agent.exit,
            held=agent.held,
            missing=agent.missing,
            coordinator_lost_at_s=agent.coordinator_lost_at_s,
            notice=agent.notice,
            restore=agent.restore,
            save_settled=agent.save_settled,
            program_ready=self.now_s >= agent.born_s + self.timing.start_s + self.timing.import_s,
        )

    # What a test asks.

    def training(self) -> frozenset[SliceId]:
        """Slices whose every host trains in the present incarnation."""
        members = self._members()
        if not members or self.directive is None:
            return frozenset()
        for one in members:
            if one is None or not one.is_alive or one.worker is not Worker.TRAINING:
                return frozenset()
        return frozenset(one.slice for one in self.directive.members)

    def step(self) -> int:
        return max([agent.step for agent in self.agents.values()], default=0)


def _step_named_in(error: str | None) -> Step | None:
    found = re.search(r"step (\d+)", error or "")
    return None if found is None else Step(int(found[1]))
