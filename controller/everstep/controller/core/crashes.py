"""Steps that crash whoever restores them: counted, set aside, and taken back in.

Only what the restored step itself can have caused counts. Whatever is killed, frozen or lost around
a restore says nothing about the step, however often it happens: a healthy step that is not restored
any more is lost work.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.controller.api.ids import Step
from everstep.controller.api.reasons import Reason
from everstep.controller.api.wire import ExitCause, WorkerExit
from everstep.controller.core.health import Ending
from everstep.controller.core.ledger import Crash
from everstep.controller.core.turn import Turn

CRASHES_SET_ASIDE = 2
_BY_ITSELF = frozenset({ExitCause.USER_ERROR, ExitCause.EXITED_EARLY, ExitCause.STATE_REFUSED})
# What a process does to itself: SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS. Others
# send the rest: the kernel's out-of-memory killer, an operator, a terminal.
_OWN_SIGNALS = frozenset({4, 5, 6, 7, 8, 11, 31})


def judge_crash(turn: Turn, first: Ending, endings: Sequence[Ending]) -> Step | None:
    """Count the step that the first cause of an incident restored and did not get beyond.

    Args:
        turn: the pass.
        first: the ending that is the first cause.
        endings: all that are known of the incident.

    Returns:
        The step that was counted; None when nothing says that it was the step's doing.
    """
    step = first.exit.restored_step
    if step is None or step <= 0 or first.exit.is_before_main or first.exit.step > step:
        return None
    if not _is_own_doing(first.exit) or any(_is_from_outside(one.exit) for one in endings):
        return None
    _count(turn, step)
    return step


def _is_own_doing(ended: WorkerExit) -> bool:
    # Of an abort the agent alone cannot say whose doing it is; here it is the first cause.
    return ended.cause in _BY_ITSELF or ended.signal in _OWN_SIGNALS


def _is_from_outside(ended: WorkerExit) -> bool:
    return ended.cause is ExitCause.SIGNALED and ended.signal not in _OWN_SIGNALS


def _count(turn: Turn, step: Step) -> None:
    ledger = turn.ledger
    if step in ledger.restore_set_aside:
        # Tried again for want of another one. The failure budget says when that ends.
        return
    again = ledger.crash is not None and ledger.crash.step == step
    count = ledger.crash.count + 1 if ledger.crash is not None and again else 1
    if count < CRASHES_SET_ASIDE:
        turn.change(crash=Crash(step=step, count=count))
        return
    turn.change(crash=None, restore_set_aside=(*ledger.restore_set_aside, step))
    text = f"Step {step} is not restored again: the worker ended right after it {count} times."
    turn.tell(f"set-aside-{step}", Reason.STEP_SET_ASIDE, text)


def forgive(turn: Turn, step: Step) -> None:
    """Take a step back in after which an incarnation trained on: it was not the step."""
    ledger = turn.ledger
    kept = tuple(one for one in ledger.restore_set_aside if one != step)
    crash = None if ledger.crash is not None and ledger.crash.step == step else ledger.crash
    if (crash, kept) != (ledger.crash, ledger.restore_set_aside):
        turn.change(crash=crash, restore_set_aside=kept)


def forgive_trained(turn: Turn, endings: Sequence[Ending]) -> None:
    """Take back in what ended workers had restored and trained on from.

    An incarnation may end before anybody saw it train; its endings tell.
    """
    for ending in endings:
        restored = ending.exit.restored_step
        if restored is not None and ending.exit.step > restored:
            forgive(turn, restored)


def uncount(turn: Turn, step: Step) -> None:
    """Take one count back: a disruption proves to have been the first cause (invariant 4)."""
    ledger = turn.ledger
    if step in ledger.restore_set_aside:
        kept = tuple(one for one in ledger.restore_set_aside if one != step)
        crash = Crash(step=step, count=CRASHES_SET_ASIDE - 1)
        turn.change(crash=crash, restore_set_aside=kept)
    elif ledger.crash is not None and ledger.crash.step == step:
        count = ledger.crash.count - 1
        turn.change(crash=Crash(step=step, count=count) if count > 0 else None)
