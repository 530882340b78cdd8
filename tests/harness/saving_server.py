"""Programs that save and are killed, each forked from one that has imported everything.

An order is a line of JSON on standard input; what its program reached, and how it ended, are lines
on standard output. The server itself has one thread and no JAX backend, so it may fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEPT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended."""

    was_killed: bool
    committed: tuple[int, ...]
    """Steps of which it was told that they exist."""
    operations: int
    """Changes that it made to the folder, where it counts them and was not killed."""
    at: str
    """The change before which it was killed."""


class SavingServer:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )

    def save(
        self,
        run: Path,
        first: int,
        *,
        count: int = 1000,
        kill_before: int | None = None,
        kill_after_s: float | None = None,
    ) -> Ended:
        """Save steps one after the other, until all are saved or it is killed.

        Args:
            run: the folder.
            first: the first step.
            count: how many steps.
            kill_before: which of its changes to the folder it does not come to do, from 0.
            kill_after_s: how long it lives.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {
            "run": str(run),
            "first": first,
            "count": count,
            "kill_before": kill_before,
            "kill_after_s": kill_after_s,
        }
        print(json.dumps(order), file=self._process.stdin, flush=True)
        committed: list[int] = []
        operations, at = 0, ""
        for line in self._process.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "committed":
                committed.append(int(rest))
            elif word == "operations":
                operations = int(rest)
            elif word == "before":
                at = rest
            elif word == "ended":
                assert int(rest) in (0, -signal.SIGKILL), rest
                return Ended(
                    was_killed=int(rest) != 0,
                    committed=tuple(committed),
                    operations=operations,
                    at=at,
                )
        raise AssertionError("the server is gone")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def saving_server() -> Generator[SavingServer]:
    made = SavingServer()
    try:
        yield made
    finally:
        made.close()


def _say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def _serve() -> None:
    import everstep.runtime as es
    import tiny_parts
    from everstep.runtime.engine import checkpoints
    from everstep.runtime.storage import datafiles, tensors

    # Imported for the programs to come, so that none of them has to.
    del checkpoints, datafiles, tensors
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                _save(order, tiny_parts, es)
            except BaseException as error:  # noqa: BLE001 - said, and the test fails.
                _say("failed", type(error).__name__, error)
                os._exit(1)
            os._exit(0)
        if order["kill_after_s"] is not None:
            # Not a wait for something: the moment of a kill is what is tried.
            ended = os.pidfd_open(pid)
            select.select([ended], [], [], order["kill_after_s"])
            os.close(ended)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        _say("ended", os.waitstatus_to_exitcode(status))


def _save(order: dict[str, Any], tiny_parts: Any, es: Any) -> None:
    import threading

    from watched_disk import Operation, watched

    counted = 0
    lock = threading.Lock()

    def watch(operation: Operation) -> None:
        nonlocal counted
        if not operation.is_change:
            return
        with lock:
            if counted == order["kill_before"]:
                _say("before", operation.kind, operation.path[len(order["run"]) :])
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()
            counted += 1

    counting = order["kill_after_s"] is None
    with watched(order["run"], watch) if counting else contextlib.nullcontext():
        retention = es.Retention(latest=KEPT)
        checkpoints = es.Checkpoints(order["run"], retention=retention)
        for step in range(order["first"], order["first"] + order["count"]):
            checkpoints.save(step, tiny_parts.parts_of(step)).wait(60)
            _say("committed", step)
        checkpoints.close()
    _say("operations", counted)


if __name__ == "__main__":
    _serve()
