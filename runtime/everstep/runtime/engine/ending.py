"""The end of a program that has not closed its checkpoints: what is on its way gets some time."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable

from everstep.runtime.engine.saving import Writer

EXIT_S = 600.0
"""How long the end of the interpreter waits for steps that are on their way, in all."""

_open: dict[Writer, float] = {}
_pid: int | None = None


def finish_at_exit(writer: Writer, deadline_s: float, log: logging.Logger) -> None:
    """Have the end of the program wait for a writer, for so long at most."""
    global _pid
    for ended in [one for one in _open if not one.is_alive]:
        del _open[ended]
    _open[writer] = min(deadline_s, EXIT_S)
    if _pid is None:
        _pid = os.getpid()
        # `atexit` comes after Python has shut its thread pools, with which storage is written;
        # what its own pools use to be told before that has no public name.
        register: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
        register(_finish, log)


def _finish(log: logging.Logger) -> None:
    if os.getpid() != _pid:
        return  # A fork's copy: the threads are in the other process.
    for writer in _open:
        writer.end()
    for writer, deadline_s in _open.items():
        if not writer.close(deadline_s):
            log.error("steps that were on their way at the end are lost: %s", writer.uri)
        for saved in writer.unsaid:
            if saved.failure is not None and not saved.was_told:
                log.error("%s", saved.failure)
