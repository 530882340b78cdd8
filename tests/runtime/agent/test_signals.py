"""A program's handlers of SIGTERM and SIGINT, set whenever it likes, beside our own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType

import pytest

from everstep.runtime.agent import signals
from everstep.runtime.agent.signals import SIGNALS, ProgramSignals

Handler = Callable[[int, FrameType | None], None]


@pytest.fixture(autouse=True)
def handlers_as_before() -> Generator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def heard() -> Generator[list[str]]:
    said: list[str] = []
    opened = ProgramSignals(lambda number: said.append(signal.Signals(number).name))
    opened.open()
    yield said
    opened.close()


def saying(said: list[str], what: str) -> Handler:
    def handle(_number: int, _frame: FrameType | None) -> None:
        said.append(what)

    return handle


def send(number: signal.Signals = signal.SIGTERM) -> None:
    # To this thread, so that the handler has run when the call returns.
    signal.pthread_kill(threading.get_ident(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_ours_is_called_first_and_then_the_programs(
    number: signal.Signals, heard: list[str]
) -> None:
    signal.signal(number, saying(heard, "program"))
    signals.adopt()
    send(number)
    assert heard == [number.name, "program"]


def test_a_handler_set_before_is_called_as_well() -> None:
    said: list[str] = []
    signal.signal(signal.SIGTERM, saying(said, "program"))
    opened = ProgramSignals(lambda _: said.append("ours"))
    opened.open()
    send()
    opened.close()
    assert said == ["ours", "program"]


def test_the_handler_that_was_set_last_is_the_one_that_is_called(heard: list[str]) -> None:
    for what in ("first", "second"):
        signal.signal(signal.SIGTERM, saying(heard, what))
        signals.adopt()
    send()
    assert heard == ["SIGTERM", "second"]


def test_a_second_signal_is_heard_by_both_like_the_first(heard: list[str]) -> None:
    signal.signal(signal.SIGTERM, saying(heard, "program"))
    signals.adopt()
    send()
    send()
    assert heard == ["SIGTERM", "program"] * 2


def test_a_program_that_ignores_a_signal_does_not_stop_ours(heard: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signals.adopt()
    send()
    assert heard == ["SIGTERM"]


def test_what_the_programs_handler_raises_is_said_and_ends_nothing(
    heard: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, leave)
    signals.adopt()
    send()
    assert heard == ["SIGTERM"]
    assert "the program's handler of SIGTERM raised SystemExit: 3" in capsys.readouterr().err


def test_what_ours_raises_ends_the_training_after_the_programs_was_called() -> None:
    said: list[str] = []

    def end(_number: int) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, saying(said, "program"))
    opened = ProgramSignals(end)
    opened.open()
    with pytest.raises(SystemExit):
        send()
    opened.close()
    assert said == ["program"]


def test_the_programs_last_handler_is_back_in_place_afterwards() -> None:
    said: list[str] = []
    handler = saying(said, "program")
    opened = ProgramSignals()
    opened.open()
    signal.signal(signal.SIGTERM, handler)
    opened.close()
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("has_own", [False, True], ids=["default", "own handler"])
def test_a_process_that_the_program_forks_can_be_terminated(has_own: bool) -> None:
    opened = ProgramSignals()
    opened.open()
    if has_own:
        signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(7))
        signals.adopt()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        # It ends in here, whatever happens: the rest of the test is its parent's.
        opened.hand_to_child()
        os.write(writer, b"ready")
        signal.alarm(10)
        while True:
            signal.pause()
    os.read(reader, 5)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    opened.close()
    os.close(reader)
    os.close(writer)
    assert os.waitstatus_to_exitcode(status) == (7 if has_own else -signal.SIGTERM)


def test_in_another_thread_nothing_is_touched() -> None:
    before = signal.getsignal(signal.SIGTERM)
    opened = ProgramSignals()
    for act in (opened.open, signals.adopt, opened.close):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
