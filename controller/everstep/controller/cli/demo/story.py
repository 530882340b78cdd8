"""What happens to the training, and what must hold afterwards. Pure.

A story is a list of acts. Each act begins when the training has finished a step, does one thing
to the slices, and ends when the job is training again on the count of slices that the act leaves.
The standard story is the one the README tells; any other is drawn from a seed, and a seed always
draws the same story.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum

from everstep.controller.api.ids import SliceId

ALL = (SliceId(0), SliceId(1), SliceId(2))
"""The demo's slices."""


STEP_COUNT_MIN = 60
"""In fewer there is no room for the acts, with a checkpoint on disk before everything is killed."""


class Deed(Enum):
    """What is done to the slices. The value is how the table at the end names it."""

    NOTICE = "notice"
    KILL = "killed"
    KILL_AND_CONTROLLER = "killed, controller too"
    KILL_TWICE = "killed, another during the recovery"
    FREEZE = "frozen"
    WITHDRAW = "notice, withdrawn"
    RETURN = "capacity returns"
    KILL_ALL = "everything killed"


class LossBound(Enum):
    """How many finished steps an act may cost."""

    NONE = "none"
    SNAPSHOT = "since the last snapshot"
    COMMIT = "since the last commit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One disturbance.

    Invariants: (1) `slices` is never empty; (2) `left` is never empty, and is what the job must
    be training on when the act is over.
    """

    after_step: int
    deed: Deed
    slices: tuple[SliceId, ...]
    left: tuple[SliceId, ...]
    notice_s: float | None = None
    environment: dict[str, str] | None = None
    """Set in the job's template before the deed: agents that start later see it."""

    @property
    def loss_bound(self) -> LossBound:
        if self.deed in (Deed.NOTICE, Deed.RETURN, Deed.WITHDRAW):
            return LossBound.NONE
        return LossBound.COMMIT if self.deed is Deed.KILL_ALL else LossBound.SNAPSHOT

    @property
    def sentence(self) -> str:
        named = " and ".join(f"slice {s}" for s in self.slices)
        match self.deed:
            case Deed.NOTICE:
                return f"{named} will be preempted in {self.notice_s:g} s"
            case Deed.WITHDRAW:
                return f"{named} gets a notice of {self.notice_s:g} s, which is then withdrawn"
            case Deed.KILL:
                return f"SIGKILL of all of {named}, no notice"
            case Deed.KILL_AND_CONTROLLER:
                return f"SIGKILL of all of {named}, and of the controller while it recovers"
            case Deed.KILL_TWICE:
                first, second = self.slices
                return f"SIGKILL of slice {first}, and of slice {second} while it recovers"
            case Deed.FREEZE:
                return f"SIGSTOP of all of {named}; it is replaced"
            case Deed.RETURN:
                return f"capacity for {named} returns"
            case Deed.KILL_ALL:
                back = " and ".join(f"slice {s}" for s in self.left)
                return f"SIGKILL of everything; only {back} can be had again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    title: str
    step_count: int
    acts: tuple[Act, ...]
    acts_required: int
    """How many acts must be over before the training is. A drawn story may be overtaken by the end
    on a machine where a step is quick and a start is slow; the others may not, and the training
    waits for them."""

    def bound(self, number: int) -> int:
        """How many steps the training may finish at its own pace until an act is over.

        So far as the next act begins; in the last one half of what is left. From there on it waits
        (`examples.pace` of the runtime), so that it cannot end before the story.
        """
        if number + 1 < len(self.acts):
            return self.acts[number + 1].after_step
        return (self.acts[number].after_step + self.step_count) // 2


def standard_story(step_count: int) -> Story:
    """The story of the README.

    Args:
        step_count: length of the training, at least `STEP_COUNT_MIN`; the acts are spread over it.
    """
    at = [round(step_count * share) for share in (0.1, 0.25, 0.4, 0.6, 0.8)]
    two, one = (SliceId(0), SliceId(2)), (SliceId(2),)
    return Story(
        title="the standard story",
        step_count=step_count,
        acts_required=5,
        acts=(
            Act(after_step=at[0], deed=Deed.NOTICE, slices=(SliceId(1),), left=two, notice_s=20.0),
            Act(after_step=at[1], deed=Deed.KILL_AND_CONTROLLER, slices=(SliceId(0),), left=one),
            Act(after_step=at[2], deed=Deed.RETURN, slices=(SliceId(0), SliceId(1)), left=ALL),
            Act(
                after_step=at[3],
                deed=Deed.KILL_ALL,
                slices=ALL,
                left=(SliceId(0), SliceId(1)),
                environment={"DATA": "-1", "FSDP": "2"},
            ),
            Act(after_step=at[4], deed=Deed.RETURN, slices=(SliceId(2),), left=ALL),
        ),
    )


def draw_story(seed: int, step_count: int) -> Story:
    """Draw a story: two losses of random kinds, each at a random step, each followed by a return.

    Args:
        seed: the same seed draws the same story.
        step_count: length of the training, at least `STEP_COUNT_MIN`.
    """
    # A seeded generator handed in as a number keeps this pure: no entropy enters here.
    draw = random.Random(seed)
    acts: list[Act] = []
    present = set(ALL)
    loss_count = 2
    gap = step_count // (2 * loss_count + 1)
    for number in range(loss_count):
        after = gap * (2 * number + 1) + draw.randrange(max(1, gap // 2))
        act = _draw_loss(draw, after, present)
        acts.append(act)
        present = set(act.left)
        absent = tuple(s for s in ALL if s not in present)
        if absent:
            back = absent if draw.random() < 0.7 else absent[:1]
            present |= set(back)
            acts.append(
                Act(
                    after_step=after + gap,
                    deed=Deed.RETURN,
                    slices=back,
                    left=tuple(sorted(present)),
                )
            )
    return Story(title=f"story {seed}", step_count=step_count, acts=tuple(acts), acts_required=0)


def _draw_loss(draw: random.Random, after_step: int, present: set[SliceId]) -> Act:
    deeds = [Deed.NOTICE, Deed.KILL, Deed.KILL_AND_CONTROLLER, Deed.FREEZE, Deed.WITHDRAW]
    if len(present) == len(ALL):
        deeds += [Deed.KILL_TWICE, Deed.KILL_TWICE]
    if len(present) == 1:
        deeds = [Deed.WITHDRAW]
    deeds.append(Deed.KILL_ALL)
    deed = draw.choice(deeds)
    order = sorted(present)
    draw.shuffle(order)
    notice_s = float(draw.randint(6, 20)) if deed in (Deed.NOTICE, Deed.WITHDRAW) else None
    environment: dict[str, str] | None = None
    if deed in (Deed.WITHDRAW, Deed.FREEZE):
        # A frozen slice is replaced: its capacity never went away.
        slices, left = order[:1], sorted(present)
    elif deed is Deed.KILL_TWICE:
        slices, left = order[:2], sorted(order[2:])
    elif deed is Deed.KILL_ALL:
        slices = sorted(present)
        left = sorted(order[: draw.randint(1, len(order))])
        environment = {"DATA": "-1", "FSDP": draw.choice(["1", "2"])}
    else:
        count = draw.randint(1, len(order) - 1)
        slices, left = sorted(order[:count]), sorted(order[count:])
    return Act(
        after_step=after_step,
        deed=deed,
        slices=tuple(slices),
        left=tuple(left),
        notice_s=notice_s,
        environment=environment,
    )
