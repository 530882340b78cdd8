"""What an agent makes of the end of its worker: a cause, and words that name signal and step."""

from __future__ import annotations

import signal

import pytest

from everstep.controller.api.ids import Incarnation, Step
from everstep.controller.api.wire import ExitCause
from everstep.runtime.agent.endings import classify
from everstep.runtime.agent.events import WorkerEnded


def ended(
    *, code: int | None = None, number: int | None = None, early: bool = False
) -> WorkerEnded:
    return WorkerEnded(
        incarnation=Incarnation(1),
        ending=None,
        code=code,
        signal=number,
        step=Step(12),
        is_before_main=early,
        at_s=1.0,
    )


@pytest.mark.parametrize(
    ("number", "count", "cause", "name"),
    [
        (signal.SIGSEGV, 2, ExitCause.SIGNALED, "11 (SIGSEGV)"),
        (signal.SIGKILL, 2, ExitCause.SIGNALED, "9 (SIGKILL)"),
        (signal.SIGABRT, 1, ExitCause.SIGNALED, "6 (SIGABRT)"),
        # With others about it may be jaxlib's answer to somebody else's end.
        (signal.SIGABRT, 2, ExitCause.CONSEQUENCE, "6 (SIGABRT)"),
        # Of real time, and without a name of its own.
        (35, 2, ExitCause.SIGNALED, "35"),
    ],
)
def test_a_signal_is_named_with_the_step_after_which_it_came(
    number: int, count: int, cause: ExitCause, name: str
) -> None:
    found = classify(ended(number=number), process_count=count)
    assert found == (cause, f"ended by signal {name} after step 12")


def test_a_signal_before_main_says_so() -> None:
    _, message = classify(ended(number=signal.SIGSEGV, early=True), process_count=1)
    assert message == "ended by signal 11 (SIGSEGV) before es.main was called"
