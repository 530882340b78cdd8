"""A program's handlers of SIGTERM and SIGINT, set whenever it likes, beside our own."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
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
    heard: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    def leave(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, leave)
    signals.adopt()
    send()
    assert heard == ["SIGTERM"]
    assert "the program's handler of SIGTERM raised SystemExit: 3" in capfd.readouterr().err


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


class Interrupted:
    """A program's handler during whose first call the second signal comes."""

    def __init__(self, said: list[str], *, swallows: bool = False) -> None:
        self._said, self._swallows = said, swallows

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self._said.append("program")
        if self._said.count("program") > 1:
            return
        try:
            send()
        except SystemExit:
            if not self._swallows:
                raise


@pytest.mark.parametrize("swallows", [False, True], ids=["lets it pass", "swallows it"])
def test_a_second_signal_during_the_programs_handler_ends_the_training(
    swallows: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def end_when_asked_twice(_number: int) -> None:
        said.append("ours")
        if said.count("ours") == 2:
            raise SystemExit(143)

    signal.signal(signal.SIGTERM, Interrupted(said, swallows=swallows))
    opened = ProgramSignals(end_when_asked_twice)
    opened.open()
    with pytest.raises(SystemExit):
        send()
    opened.close()
    assert said == ["ours", "program", "ours", "program"]
    assert "raised" not in capfd.readouterr().err


class Busy(io.StringIO):
    """A stream in the middle of a write, as one that a signal has interrupted."""

    def write(self, _text: str, /) -> int:
        raise RuntimeError("reentrant call")


def test_a_handler_that_interrupts_a_write_to_stderr_ends_nothing(
    heard: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.stderr.write("told"))
    signals.adopt()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Busy())
        send()
    assert heard == ["SIGTERM"]
    assert "raised RuntimeError: reentrant call" in capfd.readouterr().err


def test_the_programs_last_handler_is_back_in_place_afterwards() -> None:
    said: list[str] = []
    handler = saying(said, "program")
    opened = ProgramSignals()
    opened.open()
    signal.signal(signal.SIGTERM, handler)
    opened.close()
    assert signal.getsignal(signal.SIGTERM) is handler


FORKING = """
import os
import signal
import sys
from everstep.runtime.agent import signals

opened = signals.ProgramSignals()
opened.open()
if sys.argv[1] == "own handler":
    signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(7))
    signals.adopt()
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    opened.hand_to_child()
    os.write(writer, b"ready")
    signal.alarm(10)
    while True:
        signal.pause()
os.read(reader, 5)
os.kill(pid, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(("handler", "code"), [("default", -signal.SIGTERM), ("own handler", 7)])
def test_a_process_that_the_program_forks_can_be_terminated(handler: str, code: int) -> None:
    # In a process of its own: what other tests have imported into this one must not be forked.
    done = subprocess.run(
        [sys.executable, "-c", FORKING, handler],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{int(code)}\n"


def test_in_another_thread_nothing_is_touched() -> None:
    before = signal.getsignal(signal.SIGTERM)
    opened = ProgramSignals()
    for act in (opened.open, signals.adopt, opened.close):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
