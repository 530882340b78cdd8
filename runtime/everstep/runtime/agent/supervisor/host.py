"""One host's agent: events into the session, its effects into the world.

Single-threaded on one event loop; long work goes to threads, and its outcome comes back as an
event. Decisions are in `session`, `rendezvous`, `agreement` and `evacuation`.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Coroutine
from typing import Any, assert_never

from aiohttp import web
from structlog.typing import FilteringBoundLogger

from everstep.controller.api.ids import Incarnation, Step
from everstep.controller.api.wire import Directive, NoticeReport, Request, RequestKind
from everstep.runtime.agent import events
from everstep.runtime.agent import session as life
from everstep.runtime.agent.channel import Channel
from everstep.runtime.agent.control import ControlBlock
from everstep.runtime.agent.link import Assignment, Ending, EndKind, Word, patience_of
from everstep.runtime.agent.peers import PeerAhead, PeerClient
from everstep.runtime.agent.process import adopt_orphans, children_of, end_strays
from everstep.runtime.agent.server import build_app
from everstep.runtime.agent.session import Session
from everstep.runtime.agent.supervisor import reporting
from everstep.runtime.agent.supervisor.answers import HostAnswers
from everstep.runtime.agent.supervisor.checkpoints import Checkpoints
from everstep.runtime.agent.supervisor.coordination import Coordination
from everstep.runtime.agent.supervisor.following import Following
from everstep.runtime.agent.supervisor.holding import serve_request
from everstep.runtime.agent.supervisor.joining import LeadJoin, Preparations, ask_lead
from everstep.runtime.agent.supervisor.local_copies import LocalCopies
from everstep.runtime.agent.supervisor.members import Members
from everstep.runtime.agent.supervisor.parcels import Parcels
from everstep.runtime.agent.supervisor.programs import ExitStatus, Program, ProgramEnded
from everstep.runtime.agent.supervisor.saving import save_held
from everstep.runtime.agent.supervisor.scope import Scope
from everstep.runtime.agent.supervisor.snapshots import Snapshots
from everstep.runtime.agent.supervisor.tail import LogTail
from everstep.runtime.agent.supervisor.tuning import tune_cadence
from everstep.runtime.agent.wire import Join, Joined, NoticePosted
from everstep.runtime.clock import Clock
from everstep.runtime.errors import ConfigurationError, EverstepError, Fenced
from everstep.runtime.settings import AgentOptions, check_order

POLL_S = 0.025
"""How often the control block is looked at while a worker lives; frames are acted on at once."""
IDLE_POLL_S = 0.25
CADENCE_UNTIL_MEASURED = 10
DUE_HOLD_S = 60.0
"""How long a checkpoint that is due may take to be agreed on, held and written."""
EXIT_USAGE = 2
EXIT_PORT_TAKEN = 78
EXIT_FAILED = 70


class Host:
    """Everything of one agent process."""

    def __init__(
        self, options: AgentOptions, channel: Channel, clock: Clock, log: FilteringBoundLogger
    ) -> None:
        self.options = options
        self.session = Session(host=options.host, job_uid=options.job_uid)
        self.snapshots: Snapshots | None = None
        self.local: LocalCopies | None = None
        self.scope: Scope | None = None
        self.following: Following | None = None
        self.clock = clock
        self.log = log
        self.channel = channel
        self.client = PeerClient()
        self.answers = HostAnswers(self)
        self._log_tail = LogTail()
        self.program = Program(options.command, log, self.publish_soon)
        self.coordination = Coordination(log)
        self.checkpoints = Checkpoints(self)
        self.parcels = Parcels(self)
        self.every_steps = CADENCE_UNTIL_MEASURED
        self._events: deque[events.Event] = deque()
        self._is_feeding = False
        self._reports = reporting.Reports(self)
        self._burials: set[asyncio.Task[None]] = set()
        self._spared: frozenset[int] = frozenset()
        self._done: asyncio.Future[int] | None = None

    # The life of the process.

    async def run(self) -> int:
        """Serve until the session says leave; returns the exit code.

        Blocking: for the life of the host.
        """
        self._done = asyncio.get_running_loop().create_future()
        adopt_orphans()
        runner = web.AppRunner(build_app(self.answers), access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.options.address, self.options.port)
            try:
                await site.start()
            except OSError as error:
                self.log.error(
                    "cannot serve peers: address in use or not of this machine",
                    address=self.options.address,
                    port=self.options.port,
                    why=error.strerror,
                )
                self._reports.address_refused = (
                    f"spec.runtime.agentPort: found port {self.options.port} of "
                    f"{self.options.address} taken, or no address of this machine; expected a "
                    "free port"
                )
                self.publish()
                return EXIT_PORT_TAKEN
            self._log_tail.mark()
            self.program.warm()
            if self.options.host.host == 0:
                # Host 0 of any slice may become the lead.
                self.coordination.warm()
            self.publish()
            tasks = [self._start(self._listen(), "directives"), self._start(self._poll(), "poll")]
            code = await self._done
            for task in tasks:
                task.cancel()
            return code
        finally:
            await self._close(runner)

    async def _close(self, runner: web.AppRunner) -> None:
        if self.scope is not None:
            self.scope.end()
        self.program.close()
        self.coordination.close()
        if self._burials:
            await asyncio.wait(set(self._burials), timeout=2.0)
        await asyncio.to_thread(end_strays, frozenset())
        await self.client.close()
        await runner.cleanup()
        self.checkpoints.close()
        if self.local is not None:
            self.local.close()
        if self.snapshots is not None:
            self.snapshots.close()
        self.channel.close()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._judge_task)
        return task

    def _judge_task(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Our own bug, or a machine that gives no more processes: end, and be started anew."""
        if isinstance(error, PeerAhead):
            self.log.info("superseded", why=str(error))
            return
        if isinstance(error, Fenced):
            self.feed(events.FenceSeen(newest=Incarnation(error.newest), at_s=self.clock.unix_s()))
            return
        self.log.error("the agent failed", exc_info=error)
        self._leave(EXIT_FAILED)

    def _leave(self, code: int) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(code)

    async def _listen(self) -> None:
        async for directive in self.channel.directives():
            self._prepare(directive)
            self.feed(events.DirectiveSeen(directive=directive, at_s=self.clock.unix_s()))

    def _prepare(self, directive: Directive) -> None:
        if self.snapshots is not None or directive.job_uid != self.options.job_uid:
            return
        try:
            check_order(directive.settings)
        except ConfigurationError as error:
            self.log.error("timeouts are in the wrong order", why=str(error))
            self._leave(EXIT_USAGE)
            return
        self.snapshots = Snapshots(self.options.host, directive.settings, self.log)
        settings = directive.settings
        if settings.local_path is not None:
            self.local = LocalCopies(self, settings.local_path, settings, self.snapshots)

    async def _poll(self) -> None:
        renewed_s = self.clock.monotonic_s()
        while True:
            if self.following is not None:
                self.following.poll()
            self.feed(events.TimePassed(at_s=self.clock.unix_s()))
            directive = self.session.directive
            interval_s = directive.settings.report_interval_s if directive is not None else 1.0
            now_s = self.clock.monotonic_s()
            if now_s - renewed_s >= interval_s:
                renewed_s = now_s
                self.publish()
            await asyncio.sleep(POLL_S if self.following is not None else IDLE_POLL_S)

    # Events in, effects out.

    def feed(self, event: events.Event) -> None:
        """Take an event in and perform what the session decides. Never re-entered."""
        self._events.append(event)
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._events:
                self.session, effects = life.step(self.session, self._events.popleft())
                for effect in effects:
                    self._perform(effect)
        finally:
            self._is_feeding = False

    def _perform(self, effect: events.Effect) -> None:
        match effect:
            case events.EndIncarnation():
                self._end_incarnation()
            case events.BeginJoin():
                self._begin_join(effect.directive)
            case events.LaunchWorker():
                self._launch(effect.assignment)
            case events.KeepSpare():
                if self.scope is not None:
                    patience_s = patience_of(self.scope.directive.settings)
                    self.scope.spawn(self.program.keep_spare(patience_s), "spare")
            case events.KillWorker():
                self._kill_worker(effect.why)
            case events.ServeRequest():
                self._serve(effect.request)
            case events.DropRequest():
                self._drop_request()
            case events.TellLead():
                self._tell_lead(effect.notice)
            case events.MakeFinal():
                if self.scope is not None:
                    self.scope.spawn(self.checkpoints.make_final(self.scope, effect.step), "final")
            case events.SaveHeld():
                self._save_held(effect)
            case events.Publish():
                self.publish_soon()
            case events.Leave():
                self.publish()
                self._leave(effect.code)
            case _:
                assert_never(effect)

    def _end_incarnation(self) -> None:
        if self.scope is not None:
            self.scope.end()
            self.scope = None

    def _save_held(self, order: events.SaveHeld) -> None:
        directive = order.directive
        scope = self.scope = Scope(
            directive=directive,
            members=Members(self.options.host, directive, self.client, self.answers),
            note_failure=self.fail,
            begun_at_s=self.clock.unix_s(),
        )
        scope.spawn(save_held(self, scope, order), "save what is held")

    def _begin_join(self, directive: Directive) -> None:
        members = Members(self.options.host, directive, self.client, self.answers)
        scope = Scope(
            directive=directive,
            members=members,
            note_failure=self.fail,
            begun_at_s=self.clock.unix_s(),
        )
        self.scope = scope
        by_s = scope.begun_at_s + directive.settings.join_timeout_s
        self.log.info("joining", incarnation=directive.incarnation, lead=str(directive.lead))
        if directive.lead == self.options.host:
            scope.join = LeadJoin(
                directive,
                by_s=by_s,
                prepare=Preparations(
                    claim=lambda: self.checkpoints.claim(directive),
                    start_service=lambda: self._start_service(scope),
                    step_committed=self.session.step_committed,
                ),
                clock=self.clock,
                log=self.log,
            )
            scope.spawn(self._lead_join(scope, scope.join), "lead the join")
        scope.spawn(self._join(scope, by_s), "join")

    async def _lead_join(self, scope: Scope, join: LeadJoin) -> None:
        await join.run()
        if join.fenced is not None:
            raise join.fenced
        if scope.service is not None:
            scope.spawn(self._watch_service(scope), "coordinator")

    async def _start_service(self, scope: Scope) -> str:
        count = len(scope.members.hosts)
        if count == 1:
            return ""
        service = await self.coordination.serve(
            address=self.options.address,
            port=self.options.coordinator_port,
            process_count=count,
            timeout_s=min(60.0, scope.directive.settings.join_timeout_s),
        )
        if scope.is_ended:
            service.close()
        scope.service = service
        return f"{self.options.address}:{service.port}"

    async def _watch_service(self, scope: Scope) -> None:
        if scope.service is not None:
            await scope.service.lost()
            self.feed(
                events.CoordinatorLost(incarnation=scope.incarnation, at_s=self.clock.unix_s())
            )

    async def _join(self, scope: Scope, by_s: float) -> None:
        """Offer what this host holds, once the last worker has left it alone."""
        while self._burials:
            await asyncio.wait(set(self._burials))
        inventory = await self.answers.holdings(None)
        if self.local is not None:
            inventory = await self.local.offer_beside(inventory)
        join = Join(
            incarnation=scope.incarnation,
            host=self.options.host,
            address=self.options.address,
            port=self.options.port,
            inventory=inventory,
            step_before=self.session.step,
        )

        async def ask(timeout_s: float) -> Joined:
            if scope.join is not None:
                return await scope.join.receive(join)
            lead = scope.directive.lead
            if lead is None or lead not in scope.members.peers:
                return Joined(failed="the directive names no lead")
            peer = scope.members.peers[lead]
            return await self.client.post(peer, "/v1/join", join, Joined, timeout_s=timeout_s)

        try:
            joined = await ask_lead(ask, by_s=by_s, clock=self.clock)
        except PeerAhead as error:
            self.log.warning("join refused", why=str(error))
            return
        self.feed(
            events.JoinAnswered(
                incarnation=scope.incarnation, joined=joined, at_s=self.clock.unix_s()
            )
        )

    def _launch(self, assignment: Assignment) -> None:
        if self.scope is not None and self.scope.incarnation == assignment.incarnation:
            self.scope.assignment = assignment
            self.scope.answered_at_s = self.clock.unix_s()
            self.scope.spawn(self._start_worker(self.scope, assignment), "start the worker")

    async def _start_worker(self, scope: Scope, assignment: Assignment) -> None:
        snapshots = self.snapshots
        if snapshots is None:
            return
        self._spared = children_of(os.getpid())
        try:
            own_slots = snapshots.begin(assignment)
            worker = await self.program.launch(assignment, own_slots, self._prepare_control)
        except ProgramEnded as ended:
            message = self._describe_end(ended)
            self._not_started(scope, assignment, ended.status, message, ending=None)
            return
        except (KeyError, OSError) as error:
            message = f"the worker could not be started: {error}"
            self._not_started(scope, assignment, ExitStatus(), message, EndKind.STARTUP_FAILED)
            return
        scope.worker = worker
        if scope.is_ended:
            worker.kill()
        snapshots.attach(worker)
        following = Following(
            worker, scope, snapshots, self.channel, feed=self.feed, clock=self.clock
        )
        self.following = following
        burial = self._start(self._follow(scope, following), "worker")
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)
        if scope.directive.lead == self.options.host:
            scope.spawn(self.checkpoints.keep_writing(scope), "checkpoints")
            if scope.directive.settings.snapshot_every_steps is None:
                scope.spawn(tune_cadence(self, scope), "cadence")
        self.parcels.begin(scope)
        if self.local is not None:
            scope.spawn(self.local.keep_writing(scope), "local copies")
        self.feed(events.WorkerStarted(incarnation=scope.incarnation, at_s=self.clock.unix_s()))

    def _not_started(
        self,
        scope: Scope,
        assignment: Assignment,
        status: ExitStatus,
        message: str,
        ending: EndKind | None,
    ) -> None:
        step = assignment.restore_step or Step(0)
        self.feed(
            events.WorkerEnded(
                incarnation=scope.incarnation,
                ending=None if ending is None else Ending(kind=ending, step=step, message=message),
                code=status.code,
                signal=status.signal,
                step=step,
                message=message,
                is_before_main=True,
                at_s=self.clock.unix_s(),
            )
        )

    def _prepare_control(self, control: ControlBlock) -> None:
        control.write(Word.SNAPSHOT_EVERY, self._cadence_at_start())

    def _cadence_at_start(self) -> int:
        directive = self.session.directive
        given = directive.settings.snapshot_every_steps if directive is not None else None
        return CADENCE_UNTIL_MEASURED if given is None else given

    def _describe_end(self, ended: ProgramEnded) -> str:
        command = self.options.command[0]
        if ended.status.code == 127:
            return f"{command}: no such command"
        if ended.status.code == 126:
            return f"{command}: cannot be executed"
        return self._log_tail.last_error()

    async def _follow(self, scope: Scope, following: Following) -> None:
        try:
            await following.follow()
        finally:
            scope.worker = None
            if self.following is following:
                self.following = None
        # What the worker forked and left behind goes with it; the program's own processes stay.
        own = self.program.own_pids | self.coordination.own_pids
        await asyncio.to_thread(end_strays, own | self._spared)

    def _kill_worker(self, why: str) -> None:
        self.log.warning("ending the worker", why=why)
        if self.scope is None:
            return
        if self.scope.worker is not None:
            self.scope.worker.kill()
        else:
            self.program.abandon_launch()

    # Requests and notices.

    def _serve(self, request: Request) -> None:
        scope = self.scope
        if scope is None:
            return
        if scope.serving is not None:
            scope.serving.cancel()
        scope.serving = scope.spawn(serve_request(self, scope, request), f"request {request.id}")

    def hold_durably(self, scope: Scope) -> None:
        """Lead only: have one step held by all and committed, unless a request does so anyway."""
        is_busy = scope.serving is not None and not scope.serving.done()
        if scope is not self.scope or is_busy or self.session.request is not None:
            return
        now_s = self.clock.unix_s()
        request = Request(
            id=f"{scope.incarnation}-due",
            kind=RequestKind.CHECKPOINT,
            durable=True,
            deadline_s=now_s + DUE_HOLD_S,
        )
        self._serve(request)

    def _drop_request(self) -> None:
        if self.scope is not None and self.scope.serving is not None:
            self.scope.serving.cancel()
            self.scope.serving = None
        self.answers.disarm()

    def _tell_lead(self, notice: NoticeReport) -> None:
        scope = self.scope
        if scope is None:
            return
        posted = NoticePosted(host=self.options.host, deadline_s=notice.deadline_s)
        if scope.directive.lead == self.options.host:
            self.take_notice(posted)
        else:
            scope.spawn(self._post_notice(scope, posted), "tell the lead")

    async def _post_notice(self, scope: Scope, posted: NoticePosted) -> None:
        lead = scope.directive.lead
        if lead is None:
            return
        left_s = max(1.0, posted.deadline_s - self.clock.unix_s())
        try:
            peer = scope.members.peers[lead]
            await self.client.tell(peer, "/v1/notice", posted, timeout_s=left_s)
        except EverstepError as error:
            self.log.warning("the lead was not told of the notice", why=str(error))

    def take_notice(self, posted: NoticePosted) -> None:
        """Lead only: a member will vanish. Hold outside it, whether or not a controller asks."""
        scope = self.scope
        if scope is None or self.session.request is not None:
            return  # The controller knows, and has asked for what it wants.
        earlier = scope.notices.get(posted.host.slice)
        if earlier is not None and earlier <= posted.deadline_s:
            return
        scope.notices[posted.host.slice] = posted.deadline_s
        doomed = tuple(sorted(scope.notices))
        request = Request(
            id=f"{scope.incarnation}-notice-{'-'.join(map(str, doomed))}",
            kind=RequestKind.CHECKPOINT,
            doomed=doomed,
            deadline_s=min(scope.notices.values()),
        )
        self.log.info("holding on a notice", doomed=list(doomed))
        self._serve(request)

    # What others tell.

    def set_cadence(self, every_steps: int) -> None:
        self.every_steps = every_steps
        directive = self.session.directive
        if directive is not None and directive.settings.snapshot_every_steps is not None:
            return
        if self.scope is not None and self.scope.worker is not None:
            self.scope.worker.control.write(Word.SNAPSHOT_EVERY, every_steps)

    def note_committed(self, step: Step, at_s: float) -> None:
        self._reports.committed_at_s = at_s
        if self.snapshots is not None:
            self.snapshots.release_due()
        self.feed(events.StepCommitted(step=step, at_s=self.clock.unix_s()))

    # Reports.

    def publish_soon(self) -> None:
        self._reports.publish_soon()

    def publish(self) -> None:
        self._reports.publish()
