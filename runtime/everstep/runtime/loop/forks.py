"""`train` in the process it was entered in, and in none that the user's program forks from it.

A fork's copy comes out of `train` as the worker does, by what it raises or by returning. The link,
the shared words, the checkpoints and jax's connection are the worker's alone, so the copy says
what it raised and ends here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from everstep.runtime.loop.ending import trace_of
from everstep.runtime.loop.run import Run


def enter(train: Callable[[Run], object], run: Run) -> None:
    """Run `train` and finish the run.

    Raises:
        BaseException: whatever `train` raised, in this process.
    """
    pid = os.getpid()
    os.register_at_fork(after_in_child=run.disown)
    try:
        train(run)
    except BaseException as raised:
        if os.getpid() != pid:
            _end_child(raised)
        raise
    if os.getpid() != pid:
        _end_child(None)
    run.finish()


def _end_child(error: BaseException | None) -> NoReturn:
    """End a fork's copy: with 0 where it returned, as Python says for `sys.exit`, else with 1."""
    code, said = 1, ""
    match error:
        case None:
            code = 0
        case SystemExit(code=None):
            code = 0
        case SystemExit(code=int(number)):
            code = number & 0xFF
        case SystemExit():
            said = f" ended with: {error.code}\n"
        case _:
            said = f" raised; the training goes on without it\n{trace_of(error)}"
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if said:
        text = f"everstep: a process that the program forked (pid {os.getpid()}){said}"
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="replace"))
    # Not by an ordinary exit: what was registered for the end of the program is the worker's.
    os._exit(code)
