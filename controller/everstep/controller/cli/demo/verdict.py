"""Whether the story held: each promise that an act must keep, as a check with its figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.controller.api.status import Recovery
from everstep.controller.cli.demo.story import Act, Deed, LossBound


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    holds: bool
    detail: str


def judge_act(
    act: Act,
    recoveries: Sequence[Recovery],
    *,
    step_committed: int,
    snapshot_every_steps: int,
) -> list[Check]:
    """Check what one act cost against what it may cost.

    Args:
        recoveries: the changes of incarnation that the act caused, oldest first.
        step_committed: newest durable step just before the deed.
        snapshot_every_steps: interval of the snapshots.
    """
    checks: list[Check] = []
    lost = sum(r.lost_steps or 0 for r in recoveries)
    if act.loss_bound is LossBound.NONE:
        checks.append(_check("no step lost", lost == 0, f"{lost} lost"))
    elif act.loss_bound is LossBound.SNAPSHOT:
        # Each change of incarnation may cost the steps since its own last snapshot.
        bound = snapshot_every_steps * max(1, len(recoveries))
        checks.append(_check("loss within the snapshots", lost <= bound, f"{lost} of {bound}"))
    else:
        restored = max((r.step_restored or 0 for r in recoveries), default=0)
        held = restored >= step_committed
        checks.append(
            _check(
                "resumed from the last commit or later",
                held,
                f"at step {restored}; step {step_committed} was committed before the loss",
            )
        )
    if act.deed is Deed.NOTICE and recoveries and act.notice_s is not None:
        first = recoveries[0]
        held_s = (first.detect_s or 0.0) + (first.drain_s or 0.0)
        checks.append(_check("held before the deadline", held_s < act.notice_s, f"{held_s:.2f} s"))
    if act.loss_bound is LossBound.SNAPSHOT and act.deed is not Deed.FREEZE:
        read = sum(r.storage_bytes for r in recoveries)
        checks.append(_check("restored from memory", read == 0, f"{read} bytes from storage"))
    if act.deed is Deed.KILL_ALL and recoveries and max(r.step_restored or 0 for r in recoveries):
        read = sum(r.storage_bytes for r in recoveries)
        checks.append(_check("restored from disk", read > 0, f"{read} bytes from storage"))
    return checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a training ended with: the loss of every step, and a digest of every leaf."""

    losses: Mapping[int, float]
    digests: Mapping[str, str]


def judge_end(
    found: Result,
    expected: Result,
    *,
    step_count: int,
    conflicts: Sequence[int],
) -> tuple[Check, Check]:
    """Compare the disturbed run with the undisturbed one, bit for bit.

    Returns:
        Whether the losses of every step are equal, and whether the parameters are.
    """
    losses, calm = found.losses, expected.losses
    missing = [s for s in range(1, step_count + 1) if s not in losses or s not in calm]
    # Compared as text: it is exact, and two losses that are no numbers are equal.
    different = [s for s in losses if s in calm and repr(losses[s]) != repr(calm[s])]
    if missing:
        detail = f"no loss recorded for step {missing[0]} and {len(missing) - 1} more"
    elif different:
        first = min(different)
        detail = f"step {first}: {losses[first]!r} is not {calm[first]!r}"
    elif conflicts:
        detail = f"step {conflicts[0]} gave another loss when it was replayed"
    else:
        detail = f"{step_count} losses"
    equal = not missing and not different and not conflicts
    digests, wanted = found.digests, expected.digests
    unequal = sorted(k for k in wanted if digests.get(k) != wanted[k])
    same = bool(wanted) and not unequal and digests.keys() == wanted.keys()
    about = f"{len(wanted)} leaves" if same else f"differ: {', '.join(unequal[:3])}"
    return (
        _check("losses equal to the undisturbed run", equal, detail),
        _check("parameters equal to the undisturbed run", same, about),
    )


def _check(name: str, holds: bool, detail: str) -> Check:
    return Check(name=name, holds=holds, detail=detail)
