"""The tiny training, whose program forks a child in step 5.

`FORKED` says how the child goes on: `raises`, `exits` (`sys.exit` with words), `returns`,
`reports` (calls `run.step_done`), `steps` (asks for the next step), `restores`, `is-terminated`.
The program says on stderr how the child ended.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import everstep.runtime as es
from everstep.runtime.examples import tiny

FORK_STEP = 5


class Over(Exception):
    pass


def train(run: es.Run) -> None:
    hand_out = run.steps

    def forking(count: int) -> Iterator[int]:
        for step in hand_out(count):
            if step == FORK_STEP:
                fork(run, step)
            yield step

    run.steps = forking  # type: ignore[method-assign]
    try:
        tiny.train(run)
    except Over:
        return


def fork(run: es.Run, step: int) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        go_on(run, step, writer)
    if os.environ["FORKED"] == "is-terminated":
        os.read(reader, 1)
        os.kill(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    sys.stderr.write(f"the child {pid} ended with {code}\n")
    sys.stderr.flush()
    os.close(reader)
    os.close(writer)


def go_on(run: es.Run, step: int, writer: int) -> None:
    no_state: Any = None
    match os.environ["FORKED"]:
        case "raises":
            raise ValueError("in the child")
        case "exits":
            raise SystemExit("in the child")
        case "returns":
            raise Over
        case "reports":
            run.step_done(step, no_state)
        case "steps":
            next(iter(run.steps(1000)))
        case "restores":
            run.restore(no_state)
        case _:
            os.write(writer, b"1")
            signal.alarm(20)
            while True:
                signal.pause()


if __name__ == "__main__":
    es.main(train, every_steps=10)
