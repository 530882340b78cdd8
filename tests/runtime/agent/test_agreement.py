"""Agreement on a step: never past, bounded, and never half of the members gone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_values import host
from everstep.controller.api.ids import HostId, Incarnation, Step
from everstep.runtime.agent import agreement
from everstep.runtime.agent.agreement import (
    Agreed,
    Agreement,
    Ask,
    AwaitHeld,
    Begun,
    EndAt,
    Event,
    HoldAnswered,
    MemberSilent,
    ProgressSeen,
    Propose,
    Settle,
    Stage,
    StepHeld,
    TimeUp,
    choose_margin,
)
from everstep.runtime.agent.wire import HoldAnswer, Progress

MEMBERS = (host(0), host(1), host(2))


def progress(step: int, *, is_training: bool = True) -> Progress:
    return Progress(
        incarnation=Incarnation(1), step_done=Step(step), is_training=is_training, step_held=None
    )


def start(*, leave: bool = True, step_s: float | None = 0.2) -> Agreement:
    state, effects = agreement.step(Agreement(members=MEMBERS, leave=leave, step_s=step_s), Begun())
    assert effects == (Ask(hosts=MEMBERS),)
    return state


def feed(state: Agreement, *events: Event) -> tuple[Agreement, tuple[agreement.Effect, ...]]:
    effects: tuple[agreement.Effect, ...] = ()
    for event in events:
        state, effects = agreement.step(state, event)
    return state, effects


def asked(state: Agreement, *steps: int) -> tuple[Agreement, tuple[agreement.Effect, ...]]:
    return feed(
        state,
        *(
            ProgressSeen(host=who, progress=progress(s), reply_s=0.01)
            for who, s in zip(MEMBERS, steps, strict=True)
        ),
    )


def accepts(step: int) -> list[Event]:
    answer = HoldAnswer(accepted=True, step_done=Step(step - 1))
    return [HoldAnswered(host=who, step=Step(step), answer=answer) for who in MEMBERS]


def held(step: int) -> list[Event]:
    return [StepHeld(host=who, step=Step(step)) for who in MEMBERS]


def test_the_next_step_is_proposed_then_confirmed_then_awaited() -> None:
    state, effects = asked(start(), 7, 8, 7)
    assert effects == (Propose(hosts=MEMBERS, step=Step(9), leave=False),)
    state, effects = feed(state, *accepts(9))
    assert effects == (Propose(hosts=MEMBERS, step=Step(9), leave=True),)
    state, effects = feed(state, *accepts(9))
    assert effects == (AwaitHeld(hosts=MEMBERS, step=Step(9)),)
    state, effects = feed(state, *held(9))
    assert effects == (Agreed(step=Step(9)),)
    assert state.stage is Stage.AGREED


def test_a_checkpoint_is_never_confirmed_to_leave() -> None:
    state, _ = asked(start(leave=False), 7, 7, 7)
    _, effects = feed(state, *accepts(8))
    assert effects == (AwaitHeld(hosts=MEMBERS, step=Step(8)),)


def test_a_member_past_the_proposal_raises_it_and_nobody_has_left() -> None:  # A1, A2
    state, _ = asked(start(), 7, 7, 7)
    late = HoldAnswer(accepted=False, step_done=Step(9))
    state, effects = feed(state, HoldAnswered(host=host(1), step=Step(8), answer=late))
    assert effects == (Propose(hosts=MEMBERS, step=Step(11), leave=False),)
    # What others say of the first proposal no longer counts.
    _, effects = feed(state, *accepts(8))
    assert effects == ()


def test_members_that_are_not_training_mean_that_memory_decides() -> None:
    state, effects = feed(
        start(),
        ProgressSeen(host=host(0), progress=progress(4), reply_s=0.01),
        ProgressSeen(host=host(1), progress=progress(4, is_training=False), reply_s=0.01),
        ProgressSeen(host=host(2), progress=progress(4), reply_s=0.01),
    )
    assert [type(effect) for effect in effects] == [Settle]
    assert state.stage is Stage.SETTLED


def passed(step: int, done: int, *hosts: HostId) -> list[Event]:
    answer = HoldAnswer(accepted=True, step_done=Step(done))
    return [HoldAnswered(host=who, step=Step(step), answer=answer) for who in hosts]


def test_who_passed_the_step_is_ended_there_when_another_leaves_at_it() -> None:  # A4
    state, _ = asked(start(), 7, 7, 7)
    state, _ = feed(state, *accepts(8))
    _, effects = feed(state, *passed(8, 7, host(0)), *passed(8, 8, host(1), host(2)))
    assert effects == (
        EndAt(hosts=(host(1), host(2)), step=Step(8)),
        AwaitHeld(hosts=MEMBERS, step=Step(8)),
    )


def test_when_all_passed_the_step_nobody_has_left_and_a_later_one_is_proposed() -> None:  # A4
    state, _ = asked(start(), 7, 7, 7)
    state, _ = feed(state, *accepts(8))
    _, effects = feed(state, *passed(8, 8, host(0)), *passed(8, 9, host(1), host(2)))
    assert effects == (Propose(hosts=MEMBERS, step=Step(11), leave=False),)


def test_a_silent_member_is_left_out_and_all_silent_settles() -> None:
    state = start()
    state, effects = feed(
        state,
        ProgressSeen(host=host(0), progress=progress(4), reply_s=0.01),
        MemberSilent(host=host(1)),
        ProgressSeen(host=host(2), progress=progress(5), reply_s=0.01),
    )
    assert effects == (Propose(hosts=(host(0), host(2)), step=Step(6), leave=False),)
    _, effects = feed(state, MemberSilent(host=host(0)), MemberSilent(host=host(2)))
    assert [type(effect) for effect in effects] == [Settle]


def test_the_deadline_settles_in_every_stage() -> None:  # A3, G7
    for events in ([], accepts(8), accepts(8) * 2):
        state, _ = asked(start(), 7, 7, 7)
        state, effects = feed(state, *events, TimeUp())
        assert [type(effect) for effect in effects] == [Settle]


def test_a_worker_that_ends_before_the_step_means_that_memory_decides() -> None:
    state, _ = asked(start(), 7, 7, 7)
    state, _ = feed(state, *accepts(8), *accepts(8))
    state, effects = feed(state, agreement.WorkerGone(host=host(1)))
    assert [type(effect) for effect in effects] == [Settle]


def test_rounds_are_bounded() -> None:  # A3
    state, effects = asked(start(), 0, 0, 0)
    rounds = 0
    while isinstance(effects[0], Propose):
        rounds += 1
        target = effects[0].step
        late = HoldAnswer(accepted=False, step_done=Step(target + 5))
        state, effects = feed(state, HoldAnswered(host=host(1), step=target, answer=late))
    assert rounds == agreement.ROUNDS_MAX
    assert isinstance(effects[0], Settle)


@pytest.mark.parametrize(
    ("step_s", "reply_s", "round_number", "expected"),
    [
        pytest.param(0.2, 0.01, 0, 1, id="long steps cost one"),
        pytest.param(0.01, 0.01, 0, 3, id="short steps leave room for two exchanges"),
        pytest.param(None, 0.01, 0, 2, id="nothing is known yet"),
        pytest.param(0.2, 0.01, 3, 8, id="each late round doubles it"),
    ],
)
def test_the_margin_fits_two_exchanges(
    step_s: float | None, reply_s: float, round_number: int, expected: int
) -> None:
    assert choose_margin(step_s=step_s, reply_s=reply_s, round_number=round_number) == expected


class Members:
    """Three members that take steps while messages travel; each may be slow or gone."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.step = dict.fromkeys(MEMBERS, chance.randrange(5))
        self.armed: dict[HostId, tuple[int, bool]] = {}
        self.held: dict[HostId, set[int]] = {who: set() for who in MEMBERS}
        self.left: dict[HostId, int] = {}
        self.gone = {who for who in MEMBERS if chance.random() < 0.1}

    def advance(self) -> None:
        """Lockstep: a step is finished only when nobody is more than one behind and none left."""
        who = self.chance.choice(MEMBERS)
        if who in self.left or who in self.gone or self.step[who] > min(self.step.values()):
            return
        if any(self.step[other] <= self.step[who] for other in self.left):
            return  # The collective waits for one that has left.
        self.step[who] += 1
        target, leave = self.armed.get(who, (-1, False))
        if self.step[who] == target:
            self.held[who].add(target)
            if leave:
                self.left[who] = target

    def hold(self, who: HostId, step: Step, *, leave: bool) -> HoldAnswer:
        done = self.step[who]
        if done < step:
            self.armed[who] = (step, leave)
            return HoldAnswer(accepted=True, step_done=Step(done))
        if step in self.held[who]:
            return HoldAnswer(accepted=True, step_done=Step(done))
        return HoldAnswer(accepted=False, step_done=Step(done))


@given(st.integers(0, 2**32))
def test_in_any_order_of_messages_and_steps_members_leave_together_or_settle(seed: int) -> None:
    # A1, A3: whoever left did so at the one agreed step, which every reachable member holds.
    chance = random.Random(seed)
    members = Members(chance)
    state = Agreement(members=MEMBERS, leave=True, step_s=0.1)
    inbox: list[Event] = [Begun()]
    awaited: Step | None = None
    for turn in range(2000):
        if state.stage in (Stage.AGREED, Stage.SETTLED):
            break
        members.advance()
        if awaited is not None:
            inbox += [
                StepHeld(host=who, step=awaited) for who in MEMBERS if awaited in members.held[who]
            ]
        if turn == 1500:
            inbox.append(TimeUp())
        if not inbox or chance.random() < 0.5:
            continue
        state, effects = agreement.step(state, inbox.pop(chance.randrange(len(inbox))))
        for effect in effects:
            match effect:
                case Ask(hosts=hosts):
                    for who in hosts:
                        inbox.append(
                            MemberSilent(host=who)
                            if who in members.gone
                            else ProgressSeen(
                                host=who, progress=progress(members.step[who]), reply_s=0.01
                            )
                        )
                case Propose(hosts=hosts, step=step, leave=leave):
                    for who in hosts:
                        answer = members.hold(who, step, leave=leave)
                        inbox.append(HoldAnswered(host=who, step=step, answer=answer))
                case AwaitHeld(step=step):
                    awaited = step
                case EndAt(hosts=hosts, step=step):
                    for who in hosts:
                        members.left.setdefault(who, step)
                case Agreed() | Settle():
                    pass
    assert state.stage in (Stage.AGREED, Stage.SETTLED), f"seed {seed}"
    assert len(set(members.left.values())) <= 1, f"seed {seed}: {members.left}"
    if state.stage is Stage.AGREED:
        target = state.target
        assert all(target in members.held[who] for who in state.reachable), f"seed {seed}"
        assert set(members.left.values()) <= {target}
