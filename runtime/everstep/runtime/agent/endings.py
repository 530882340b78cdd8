"""How a worker ended, judged from what the agent saw of it. Pure."""

from __future__ import annotations

import signal

from everstep.controller.api.wire import ExitCause
from everstep.runtime.agent.events import WorkerEnded
from everstep.runtime.agent.link import EndKind

_CAUSES: dict[EndKind, ExitCause] = {
    EndKind.DONE: ExitCause.DONE,
    EndKind.LEFT: ExitCause.LEFT,
    EndKind.USER_ERROR: ExitCause.USER_ERROR,
    EndKind.EXITED_EARLY: ExitCause.EXITED_EARLY,
    EndKind.STATE_REFUSED: ExitCause.STATE_REFUSED,
    EndKind.STARTUP_FAILED: ExitCause.STARTUP_FAILED,
    EndKind.FENCED: ExitCause.CONSEQUENCE,
    EndKind.COLLECTIVE_ERROR: ExitCause.CONSEQUENCE,
}
NOT_RETRYABLE = frozenset({ExitCause.STATE_REFUSED})
_SIGABRT = signal.SIGABRT


def classify(event: WorkerEnded, *, process_count: int) -> tuple[ExitCause, str]:
    """The cause of a worker's end and a line for people, from what was seen of it."""
    if event.ending is not None:
        return _CAUSES[event.ending.kind], event.ending.message or event.message
    if event.signal is not None:
        message = event.message or _describe_signal(event.signal, event)
        if event.signal == _SIGABRT and process_count > 1:
            # jaxlib ends a process so when another member or the coordinator is gone. Whether it
            # was that or the program's own doing, the other endings tell.
            return ExitCause.CONSEQUENCE, message
        return ExitCause.SIGNALED, message
    where = "before es.main was called" if event.is_before_main else "without finishing train"
    if event.code == 0:
        return ExitCause.EXITED_EARLY, event.message or f"the program ended with code 0 {where}"
    if event.code == 1 or event.is_before_main:
        message = f"the program ended with code {event.code} {where}"
        if event.code == 1 and event.message:
            # The last line of its traceback.
            return ExitCause.USER_ERROR, f"{message}: {event.message}"
        return ExitCause.USER_ERROR, event.message or message
    return (
        ExitCause.EXITED_EARLY,
        event.message or f"the program ended with code {event.code} {where}",
    )


def _describe_signal(number: int, event: WorkerEnded) -> str:
    known = {one.value: one.name for one in signal.Signals}
    name = f" ({known[number]})" if number in known else ""
    when = "before es.main was called" if event.is_before_main else f"after step {event.step}"
    return f"ended by signal {number}{name} {when}"
