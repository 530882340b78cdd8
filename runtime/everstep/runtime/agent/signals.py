"""SIGTERM and SIGINT in the user's program: heard here first, then by the program's own handler.

A signal has one handler, so a program that sets its own would take ours away, and ours would take
its away. Here ours stays in place and calls the program's. Python's table of handlers is looked at
before every step (`adopt`), so it does not matter when, how often, or by which name the program
sets one. From the main thread only; elsewhere Python allows no handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)

Handler = Callable[[int, FrameType | None], object]


class ProgramSignals:
    """Hears `SIGNALS` for as long as it is open. At most one is open in a process."""

    def __init__(self, hear: Callable[[int], None] | None = None) -> None:
        """Say what to do when a signal comes; None lets it pass without effect.

        Args:
            hear: called before the program's own handler. It may raise, which then ends the
                training; what the program's handler raises does not.
        """
        self._hear = hear
        self._ours = self._receive
        self._programs: dict[int, Handler | None] = {}
        self._found: dict[int, object] = {}
        self._ending: BaseException | None = None
        """What ours raised: nothing of the program keeps it from ending the training."""

    def open(self, programs: Mapping[signal.Signals, object] | None = None) -> None:
        """Take the place of the present handlers and keep them as the program's.

        In another thread than the main one nothing is done.

        Args:
            programs: handlers that the program had set before somebody else took their place.
        """
        global _opened
        if threading.current_thread() is not threading.main_thread():
            return
        _opened = self
        self._found = {number: signal.getsignal(number) for number in SIGNALS}
        self.adopt()
        for number, handler in (programs or {}).items():
            self._programs[number] = _of_program(handler)

    def close(self) -> None:
        """Give the program's handlers their place back, the last ones that it set."""
        global _opened
        if _opened is not self:
            return
        _opened = None
        self.adopt()
        for number in SIGNALS:
            programs = self._programs.get(number)
            found = self._found[number]
            if programs is not None:
                signal.signal(number, programs)
            elif callable(found) or isinstance(found, int):
                signal.signal(number, found)

    def adopt(self) -> None:
        """Put ours back where the program has set its own since, which is then called by ours."""
        for number in SIGNALS:
            present = signal.getsignal(number)
            if present is not self._ours:
                self._programs[number] = _of_program(present)
                signal.signal(number, self._ours)

    def hand_to_child(self) -> None:
        """In a process that the program forked: SIGTERM is the program's, and else the default.

        `Process.terminate` of a data loader must work, and is no request to the training. A SIGINT
        passes by it, as by the worker.
        """
        self._hear = None
        if signal.getsignal(signal.SIGTERM) is self._ours:
            programs = self._programs.get(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_DFL if programs is None else programs)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        programs = self._programs.get(number)
        try:
            if self._hear is not None:
                self._hear(number)
        except BaseException as error:
            self._ending = error
            raise
        finally:
            if programs is not None:
                self._call(programs, number, frame)

    def _call(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Call the program's handler.

        Another signal may come while it runs. What ours raises then comes up through the program's
        handler, and must not be taken for something that the program raised.
        """
        before = self._ending
        try:
            handler(number, frame)
        except BaseException as error:  # noqa: BLE001 - of the user's code, and it must not end the step.
            if error is not self._ending:
                _say(
                    f"the program's handler of {signal.Signals(number).name} raised "
                    f"{type(error).__name__}: {error}; the step that is under way is finished all "
                    "the same"
                )
        if self._ending is not None and self._ending is not before:
            raise self._ending


_opened: ProgramSignals | None = None


def adopt() -> None:
    """See `ProgramSignals.adopt`; of the one that is open, if any. Costs well below a microsecond.

    Blocking: not. From the training's thread.
    """
    if _opened is not None and threading.current_thread() is threading.main_thread():
        _opened.adopt()


def pass_by_in_worker(programs: Mapping[signal.Signals, object] | None = None) -> None:
    """Let SIGTERM and SIGINT pass without effect on a worker; the program's handlers are called.

    They arrive when a whole process group is signalled. The agent is the one who acts on a notice;
    the worker is told by the control block.

    Args:
        programs: as for `ProgramSignals.open`.
    """
    signals = ProgramSignals()
    signals.open(programs)
    worker_pid = os.getpid()

    def in_child() -> None:
        if os.getpid() != worker_pid:
            signals.hand_to_child()

    os.register_at_fork(after_in_child=in_child)


def _of_program(present: object) -> Handler | None:
    """A handler that the program set, or None where there is Python's default or none to call."""
    if present is signal.default_int_handler or not callable(present):
        return None
    handler: Handler = present
    return handler


def _say(words: str) -> None:
    """Write a line past `sys.stderr`, which refuses whoever interrupts one of its own writes."""
    with contextlib.suppress(OSError):
        os.write(2, f"everstep: {words}\n".encode(errors="replace"))
