"""Agents in virtual time: the real session, rendezvous and agreement; everything else is simulated.

One thread, one seed. Members train in lockstep, messages are late or lost and sent again, hosts
die, freeze and come back, notices arrive, the controller sleeps. The checkers are in `checks`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from agent_values import ROWS, directive, holding, host, inventory
from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step
from everstep.controller.api.wire import (
    Directive,
    Held,
    HostPhase,
    Request,
    RequestKind,
    RestoreFigures,
)
from everstep.runtime.agent import agreement, events, rendezvous
from everstep.runtime.agent import session as life
from everstep.runtime.agent.agreement import Agreement, Stage
from everstep.runtime.agent.link import Ending, EndKind
from everstep.runtime.agent.rendezvous import Choice, Committed, Gathering, Place
from everstep.runtime.agent.session import Session
from everstep.runtime.agent.wire import HoldAnswer, Join, Joined, Progress
from everstep.runtime.layout.manifest import Holding

STEP_S = 0.1
SNAPSHOT_EVERY = 2
COMMIT_EVERY = 10
KEPT = 3
JOIN_S = 90.0


@dataclass
class Worker:
    incarnation: Incarnation
    step: int
    is_training: bool = False
    armed: tuple[int, bool] | None = None


@dataclass
class Serving:
    request: Request
    state: Agreement
    is_over: bool = False


@dataclass
class SimHost:
    id: HostId
    session: Session
    is_frozen: bool = False
    worker: Worker | None = None
    memory: dict[int, Holding] = field(default_factory=dict[int, Holding])
    gathering: Gathering | None = None
    serving: Serving | None = None
    deferred: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


@dataclass
class Restart:
    """One incarnation that began: what was finished before, and where it started."""

    incarnation: int
    step_before: int
    step: int
    cause: str
    survivors: int


def _takes_part(member: SimHost, worker: Worker) -> bool:
    """Whether a member contributes to the step after `worker.step`, or has."""
    other = member.worker
    if other is not None:
        is_same = other.incarnation == worker.incarnation
        return is_same and other.is_training and other.step >= worker.step
    ended = member.session.exit
    is_same = ended is not None and ended.incarnation == worker.incarnation
    return is_same and ended is not None and ended.step > worker.step


class World:
    def __init__(self, seed: int, slices: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.hosts: dict[HostId, SimHost] = {}
        self.claimed = 0
        self.commits: list[tuple[int, int]] = []
        self.step_finished = 0
        self.restarts: list[Restart] = []
        self.faults: list[str] = []
        self.served: dict[str, tuple[float, float]] = {}
        """Request id → when it was acknowledged, its deadline."""
        self.joins_begun: dict[tuple[HostId, int], float] = {}
        self.slices = slices
        # The controller's ledger.
        self.incarnation = 0
        self.sequence = 0
        self.members: tuple[int, ...] = ()
        self.notices: dict[int, float] = {}
        self.request: Request | None = None
        self.is_controller_down = False
        self.cause = "first"
        self.directive: Directive | None = None
        for slice_id in range(slices):
            self.boot(slice_id)

    # Time and messages.

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._order), act))

    def on(self, who: HostId, delay_s: float, act: Callable[[SimHost], None]) -> None:
        """Do something on a host later; a frozen one does it when it wakes, a new one never."""
        first = self.hosts.get(who)

        def run() -> None:
            if first is None or self.hosts.get(who) is not first:
                return
            if first.is_frozen:
                first.deferred.append(run)
            else:
                act(first)

        self.at(delay_s, run)

    def delay(self) -> float:
        """A message's way, lost ones sent again."""
        delay_s = self.chance.uniform(0.001, 0.03)
        while self.chance.random() < 0.1:
            delay_s += 0.05
        return delay_s

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._queue)
            act()
            self.check()
        self.now_s = until_s

    def check(self) -> None:
        for one in self.hosts.values():
            if one.worker is not None:
                # S2, G6: no worker outlives its incarnation on a host that knows a newer one.
                assert one.worker.incarnation == one.session.incarnation
        assert self.commits == sorted(self.commits, key=lambda c: c[1]), "G6: one claim at a time"

    # Hosts.

    def boot(self, slice_id: int) -> None:
        who = host(slice_id)
        one = SimHost(id=who, session=Session(host=who, job_uid="uid-1"))
        self.hosts[who] = one
        self.on(who, 0.01, self._tick)
        if self.directive is not None:
            self._show(who, self.directive)

    def kill(self, slice_id: int) -> None:
        self.hosts.pop(host(slice_id), None)

    def _tick(self, one: SimHost) -> None:
        self.feed(one, events.TimePassed(at_s=self.now_s))
        self.on(one.id, 0.5, self._tick)

    def _show(self, who: HostId, new: Directive) -> None:
        def see(one: SimHost) -> None:
            self.feed(one, events.DirectiveSeen(directive=new, at_s=self.now_s))

        self.on(who, self.delay(), see)

    def feed(self, one: SimHost, event: events.Event) -> None:
        one.session, effects = life.step(one.session, event)
        for effect in effects:
            match effect:
                case events.EndIncarnation():
                    one.worker, one.gathering, one.serving = None, None, None
                case events.BeginJoin():
                    self._begin_join(one, effect.directive)
                case events.LaunchWorker():
                    self._launch(one, effect)
                case events.KillWorker():
                    self._end(one, None, signal=9)
                case events.ServeRequest():
                    self._serve(one, effect.request)
                case events.DropRequest():
                    one.serving = None
                    if one.worker is not None:
                        one.worker.armed = None
                case events.SaveHeld():
                    self._save_held(one, effect.directive)
                case events.Leave():
                    self.hosts.pop(one.id, None)
                case events.KeepSpare() | events.TellLead() | events.MakeFinal() | events.Publish():
                    pass

    def _save_held(self, one: SimHost, order: Directive) -> None:
        def saved(host: SimHost) -> None:
            self.feed(host, events.HeldSaved(sequence=order.sequence, at_s=self.now_s))

        self.on(one.id, self.delay(), saved)

    # The join.

    def _begin_join(self, one: SimHost, new: Directive) -> None:
        self.joins_begun[one.id, new.incarnation] = self.now_s
        if new.lead == one.id:
            one.gathering = Gathering(directive=new)
            self.on(one.id, JOIN_S, lambda h: self._join_expired(h, new.incarnation))
        join = Join(
            incarnation=new.incarnation,
            host=one.id,
            address="a",
            port=1,
            inventory=inventory(*one.memory.values()),
            step_before=one.session.step,
        )
        assert new.lead is not None
        self._ask_join(one.id, new.lead, join)

    def _ask_join(self, who: HostId, lead: HostId, join: Join) -> None:
        def arrive(one: SimHost) -> None:
            if one.session.incarnation > join.incarnation:
                return
            if one.gathering is None or one.session.incarnation < join.incarnation:
                self.at(0.02, lambda: self._ask_join(who, lead, join))
                return
            outcome = rendezvous.receive(one.gathering, join)
            if isinstance(outcome, Gathering):
                one.gathering = outcome
                if outcome.is_complete:
                    self._answer(one, outcome)

        self.on(lead, self.delay(), arrive)

    def _join_expired(self, one: SimHost, incarnation: Incarnation) -> None:
        gathering = one.gathering
        if gathering is None or gathering.directive.incarnation != incarnation:
            return
        for member in gathering.joins:
            self._tell_joined(member, incarnation, Joined(missing=gathering.missing))

    def _answer(self, one: SimHost, gathering: Gathering) -> None:
        new = gathering.directive
        if new.incarnation < self.claimed:
            fence = events.FenceSeen(newest=Incarnation(self.claimed), at_s=self.now_s)
            self.feed(one, fence)
            return
        self.claimed = new.incarnation
        commits = [Committed(step=Step(s), held_in=None) for s, _ in self.commits]
        choice = rendezvous.choose([j.inventory for j in gathering.joins.values()], commits)
        assert isinstance(choice, Choice)
        restart = Restart(
            incarnation=new.incarnation,
            step_before=self.step_finished,
            step=choice.step or 0,
            cause=self.cause,
            survivors=sum(bool(j.inventory.holdings) for j in gathering.joins.values()),
        )
        self.restarts.append(restart)
        # What was finished beyond the restored step is lost, and will be finished anew.
        self.step_finished = restart.step
        place = Place(coordinator_address="c", uri="/run")
        for member, joined in rendezvous.answer(gathering, choice, place).items():
            self._tell_joined(member, new.incarnation, joined)
        one.gathering = None

    def _tell_joined(self, who: HostId, incarnation: Incarnation, joined: Joined) -> None:
        def arrive(one: SimHost) -> None:
            event = events.JoinAnswered(incarnation=incarnation, joined=joined, at_s=self.now_s)
            self.feed(one, event)

        self.on(who, self.delay(), arrive)

    # Training.

    def _launch(self, one: SimHost, effect: events.LaunchWorker) -> None:
        given = effect.assignment
        step = given.restore_step or Step(0)
        worker = Worker(incarnation=given.incarnation, step=step)
        one.worker = worker
        one.memory = {s: h for s, h in one.memory.items() if s <= step}

        def restored(host_: SimHost) -> None:
            if host_.worker is worker:
                figures = RestoreFigures(incarnation=given.incarnation, step=step, source="x")
                self.feed(
                    host_,
                    events.WorkerRestored(
                        incarnation=given.incarnation, figures=figures, at_s=self.now_s
                    ),
                )
                worker.is_training = True
                self._step_soon(host_, worker)

        self.on(one.id, self.chance.uniform(0.1, 2.0), restored)

    def _step_soon(self, one: SimHost, worker: Worker) -> None:
        self.on(one.id, STEP_S * self.chance.uniform(0.9, 1.1), lambda h: self._step(h, worker))

    def _step(self, one: SimHost, worker: Worker) -> None:
        if one.worker is not worker:
            return
        # A collective needs everyone: one that is gone, frozen or behind holds up the rest. One
        # that has finished this step and left has done its part.
        members = [self.hosts.get(h) for h in rendezvous.roster(self._directive_of(one))]
        if not all(m is not None and _takes_part(m, worker) for m in members):
            self._step_soon(one, worker)
            return
        worker.step += 1
        self.step_finished = max(self.step_finished, worker.step)
        if one.session.worker is not None and not one.session.worker.is_training:
            self.feed(
                one,
                events.WorkerFirstStep(
                    incarnation=worker.incarnation, figures=None, at_s=self.now_s
                ),
            )
        progressed = events.WorkerProgressed(
            incarnation=worker.incarnation, step=Step(worker.step), at_s=self.now_s
        )
        self.feed(one, progressed)
        is_armed = worker.armed is not None and worker.armed[0] == worker.step
        if is_armed or worker.step % SNAPSHOT_EVERY == 0:
            self._snapshot(one, worker)
        if is_armed and worker.armed is not None and worker.armed[1]:
            self._end(one, Ending(kind=EndKind.LEFT, step=Step(worker.step)), code=75)
            return
        if one.session.is_lead and worker.step % COMMIT_EVERY == 0:
            self._commit(one, worker)
        self._step_soon(one, worker)

    def _directive_of(self, one: SimHost) -> Directive:
        assert one.session.directive is not None
        return one.session.directive

    def _snapshot(self, one: SimHost, worker: Worker) -> None:
        one.memory[worker.step] = holding(
            one.id, worker.step, (0, ROWS), incarnation=worker.incarnation
        )
        for step in sorted(one.memory)[:-KEPT]:
            del one.memory[step]

    def _commit(self, one: SimHost, worker: Worker) -> None:
        step, incarnation = worker.step, worker.incarnation

        def write(host_: SimHost) -> None:
            # The storage itself refuses who is not the newest claim (G6).
            if incarnation != self.claimed:
                fence = events.FenceSeen(newest=Incarnation(self.claimed), at_s=self.now_s)
                if host_.session.incarnation == incarnation:
                    self.feed(host_, fence)
                return
            self.commits = [c for c in self.commits if c[0] < step]
            self.commits.append((step, incarnation))

        self.on(one.id, self.chance.uniform(0.05, 1.0), write)

    def _end(
        self,
        one: SimHost,
        ending: Ending | None,
        *,
        code: int | None = None,
        signal: int | None = None,
    ) -> None:
        worker = one.worker
        if worker is None:
            return
        one.worker = None
        self.feed(
            one,
            events.WorkerEnded(
                incarnation=worker.incarnation,
                ending=ending,
                code=code,
                signal=signal,
                step=Step(worker.step),
                at_s=self.now_s,
            ),
        )

    def kill_worker(self, slice_id: int) -> None:
        one = self.hosts.get(host(slice_id))
        if one is not None:
            self._end(one, None, signal=9)

    # Requests.

    def _serve(self, one: SimHost, request: Request) -> None:
        members = rendezvous.roster(self._directive_of(one))
        state = Agreement(members=members, leave=True, step_s=STEP_S)
        serving = Serving(request=request, state=state)
        one.serving = serving
        left_s = max(0.0, request.deadline_s - self.now_s)
        self.on(one.id, 0.75 * left_s, lambda h: self._agree(h, serving, agreement.TimeUp()))
        self.on(one.id, left_s, lambda h: self._acknowledge(h, serving, None, "deadline"))
        self._agree(one, serving, agreement.Begun())

    def _agree(self, one: SimHost, serving: Serving, event: agreement.Event) -> None:
        if one.serving is not serving or serving.state.stage in (Stage.AGREED, Stage.SETTLED):
            return
        serving.state, effects = agreement.step(serving.state, event)
        for effect in effects:
            match effect:
                case agreement.Ask(hosts=hosts):
                    for who in hosts:
                        self._call(one, serving, who, self._progress_of(who))
                case agreement.Propose(hosts=hosts, step=step, leave=leave):
                    for who in hosts:
                        self._call(one, serving, who, self._hold_of(who, step, leave=leave))
                case agreement.EndAt(hosts=hosts, step=step):
                    for who in hosts:
                        self._call(one, serving, who, self._end_at(step))
                case agreement.AwaitHeld(hosts=hosts, step=step):
                    for who in hosts:
                        self._await_held(one, serving, who, step)
                case agreement.Agreed(step=step):
                    self._acknowledge(one, serving, step, "")
                case agreement.Settle(why=why):
                    held = [set(h.memory) for h in self.hosts.values()]
                    newest = max(set().union(*held), default=0)
                    self._acknowledge(one, serving, Step(newest), why)

    def _call(
        self,
        one: SimHost,
        serving: Serving,
        who: HostId,
        act: Callable[[SimHost], agreement.Event | None],
    ) -> None:
        answered: list[bool] = []
        incarnation = one.session.incarnation

        def reply(event: agreement.Event) -> None:
            self.on(one.id, self.delay(), lambda h: self._agree(h, serving, event))

        def arrive(member: SimHost) -> None:
            if member.session.incarnation == incarnation and (event := act(member)) is not None:
                answered.append(True)
                reply(event)

        def give_up(_: SimHost) -> None:
            if not answered:
                self._agree(one, serving, agreement.MemberSilent(host=who))

        self.on(who, self.delay(), arrive)
        self.on(one.id, 2.0, give_up)

    def _progress_of(self, who: HostId) -> Callable[[SimHost], agreement.Event | None]:
        def act(member: SimHost) -> agreement.Event:
            worker = member.worker
            progress = Progress(
                incarnation=member.session.incarnation,
                step_done=member.session.step if worker is None else Step(worker.step),
                is_training=worker is not None and worker.is_training,
                step_held=None,
            )
            return agreement.ProgressSeen(host=who, progress=progress, reply_s=0.03)

        return act

    def _hold_of(
        self, who: HostId, step: Step, *, leave: bool
    ) -> Callable[[SimHost], agreement.Event | None]:
        def act(member: SimHost) -> agreement.Event:
            worker = member.worker
            done = member.session.step if worker is None else Step(worker.step)
            accepted = step in member.memory
            if worker is not None and worker.step < step:
                earlier = worker.armed or (0, False)
                if step < earlier[0]:
                    accepted = False
                else:
                    leaves = leave or earlier == (step, True)
                    worker.armed, accepted = (step, leaves), True
            answer = HoldAnswer(accepted=accepted, step_done=done)
            return agreement.HoldAnswered(host=who, step=step, answer=answer)

        return act

    def _end_at(self, step: Step) -> Callable[[SimHost], agreement.Event | None]:
        def act(member: SimHost) -> None:
            self._end(member, Ending(kind=EndKind.LEFT, step=step), code=75)

        return act

    def _await_held(self, one: SimHost, serving: Serving, who: HostId, step: Step) -> None:
        if one.serving is not serving or serving.state.stage is not Stage.HOLDING:
            return

        def look(member: SimHost) -> agreement.Event | None:
            if step in member.memory:
                return agreement.StepHeld(host=who, step=step)
            return agreement.WorkerGone(host=who) if member.worker is None else None

        self._call(one, serving, who, look)
        self.on(one.id, 0.1, lambda h: self._await_held(h, serving, who, step))

    def _acknowledge(self, one: SimHost, serving: Serving, step: Step | None, why: str) -> None:
        if one.serving is not serving or serving.is_over:
            return
        serving.is_over = True
        request = serving.request
        self.served[request.id] = (self.now_s, request.deadline_s)
        held = Held(
            request_id=request.id,
            step=step or Step(0),
            where=(),
            durable=False,
            bytes_moved=0,
            complete=step is not None,
            message=why,
        )
        incarnation = one.session.incarnation
        self.feed(one, events.RequestServed(incarnation=incarnation, held=held, at_s=self.now_s))

    # The controller: as simple as one can be that keeps its promises.

    def control(self) -> None:
        self.at(self.chance.uniform(0.05, 0.2), self.control)
        if self.is_controller_down:
            return
        alive = tuple(s for s in range(self.slices) if host(s) in self.hosts)
        doomed = tuple(sorted(s for s in self.members if s in self.notices))
        stay = tuple(s for s in alive if s not in self.notices)
        lead = self.hosts.get(host(self.members[0])) if self.members else None
        held = None if lead is None else lead.session.held
        is_served = (
            self.request is not None and held is not None and held.request_id == self.request.id
        )
        lost = [s for s in self.members if s not in alive]
        ended = [
            s
            for s in self.members
            if s in alive
            and self.hosts[host(s)].session.incarnation == self.incarnation
            and (
                self.hosts[host(s)].session.phase is HostPhase.ENDED
                or self.hosts[host(s)].session.missing
            )
        ]
        if not self.members and stay:
            self._next(stay, "first" if not self.incarnation else "regrown")
        elif lost or ended:
            self._next(stay or alive, "loss")
        elif doomed and is_served:
            self._next(stay, "notice")
        elif doomed and (self.request is None or set(self.request.doomed) != set(doomed)):
            self._ask_to_leave(doomed)
        elif self.request is not None and not doomed:
            self.request = None
            self._write(None)
        elif set(stay) - set(self.members) and not doomed and self._is_calm():
            self._next(stay, "grow")

    def _is_calm(self) -> bool:
        return all(
            self.hosts[host(s)].session.phase is HostPhase.RUNNING
            for s in self.members
            if host(s) in self.hosts
        )

    def _next(self, members: tuple[int, ...], cause: str) -> None:
        self.request = None
        self.cause = cause
        self.members = members
        if members:
            self.incarnation += 1
            self._write(None)

    def _ask_to_leave(self, doomed: tuple[int, ...]) -> None:
        self.request = Request(
            id=f"{self.incarnation}-{self.sequence}",
            kind=RequestKind.LEAVE,
            doomed=tuple(map(SliceId, doomed)),
            deadline_s=min(self.notices[s] for s in doomed),
        )
        self._write(self.request)

    def _write(self, request: Request | None) -> None:
        self.sequence += 1
        self.directive = directive(
            self.incarnation, self.members, sequence=self.sequence, request=request
        )
        for who in list(self.hosts):
            self._show(who, self.directive)
