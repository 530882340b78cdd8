"""`es.main`: what this process is, and what it does with the user's `train`."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from typing import NoReturn

from everstep.runtime.agent.link import ENV_LINK_FD, ENV_ZYGOTE_FD
from everstep.runtime.loop.options import EVERY_STEPS_ALONE, Options

BEFORE_FORKING = (
    "everstep.runtime.loop.worker",
    "everstep.runtime.loop.distributed",
    "everstep.runtime.loop.compiled",
    "everstep.runtime.loop.linked",
    "everstep.runtime.loop.run",
    "everstep.runtime.restore.assemble",
    "jaxlib.mlir.dialects.builtin",
    "jaxlib.mlir.dialects.mhlo",
)
"""What a worker imports by itself, at the latest when it lowers its first program."""


def main(
    train: Callable[..., object],
    *,
    seed: int = 0,
    checkpoints: str | None = None,
    every_steps: int = EVERY_STEPS_ALONE,
) -> None:
    """Run a training: under an agent when one started this process, else alone.

    Example:
        if __name__ == "__main__":
            es.main(train)

    Args:
        train: entered once per incarnation with a `Run`.
        seed: of `run.key` and `run.rng`.
        checkpoints: alone only: folder of the checkpoints. Default `$EVERSTEP_CHECKPOINTS`, else
            `./checkpoints`. Under an agent the job says it.
        every_steps: alone only: a checkpoint is due at multiples of this.

    Raises:
        SystemExit: alone, with the exit code; under an agent this never returns.
    """
    options = Options(seed=seed, checkpoints=checkpoints, every_steps=every_steps)
    if ENV_ZYGOTE_FD in os.environ:
        _serve_forks(train, int(os.environ[ENV_ZYGOTE_FD]), options)
    if ENV_LINK_FD in os.environ:
        _be_worker(train, int(os.environ.pop(ENV_LINK_FD)), options)
    from everstep.runtime.loop.alone import run_alone

    raise SystemExit(run_alone(train, options))


def _serve_forks(train: Callable[..., object], fd: int, options: Options) -> NoReturn:
    from everstep.runtime.agent.zygote import serve

    _import_before_forking()

    def enter(sock: socket.socket, control_fd: int, slots: list[int]) -> NoReturn:
        from everstep.runtime.loop.worker import run_worker

        run_worker(train, sock, control_fd, slots, options=options)

    serve(fd, enter=enter)


def _be_worker(train: Callable[..., object], fd: int, options: Options) -> NoReturn:
    from everstep.runtime.agent.signals import pass_by_in_worker
    from everstep.runtime.loop.worker import run_worker

    pass_by_in_worker()
    os.set_inheritable(fd, False)
    run_worker(train, socket.socket(fileno=fd), options=options)


def _import_before_forking() -> None:
    """Import in the zygote, once, what every forked worker would import anew.

    That is a tenth of a second of each recovery. Nothing here starts a thread or opens a device.
    """
    for name in BEFORE_FORKING:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Another jaxlib may call its parts otherwise, and finds them by itself.
            if (error.name or "").startswith("everstep"):
                raise
