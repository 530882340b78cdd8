"""The process that has imported everything and forks a worker for each incarnation.

`serve` is called by `es.main` inside the user's program when the agent started it as a zygote. It
holds no device, no thread, no socket but the one to its agent. What a forked worker does is not
known here: `enter` is given.

Frames between agent and zygote are defined here too; both sides import this module, which
therefore imports jax only through what the user's program already loaded.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import msgspec

from everstep.runtime.agent.frames import DESCRIPTORS_MAX, LinkClosed, receive, send
from everstep.runtime.agent.link import ENV_ZYGOTE_FD
from everstep.runtime.agent.process import die_with_parent, thread_names
from everstep.runtime.agent.signals import SIGNALS, pass_by_in_worker

Enter = Callable[[socket.socket, int, list[int]], NoReturn]
"""What a new worker runs: its end of the link, the control block, the own slots."""


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag="fork"):
    """Agent → zygote, with the link and the control block."""

    number: int = 0
    """Comes back in `Forked`: the agent may have given up on an earlier one."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The user's program is imported and can be forked."""

    pid: int


class CannotFork(msgspec.Struct, frozen=True, kw_only=True, tag="cannot-fork"):
    """At start instead of `Ready`, or instead of `Forked`. The zygote ends right after."""

    why: str


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag="forked"):
    """One descriptor comes with it: the worker's pidfd, so that its number can never be reused
    between the fork and the first signal.
    """

    pid: int
    number: int = 0


class Reaped(msgspec.Struct, frozen=True, kw_only=True, tag="reaped"):
    pid: int
    status: int
    """As `waitpid` returns it."""


ZygoteFrame = Ready | CannotFork | Forked | Reaped


def why_not_forkable() -> str | None:
    """Why this process must not be forked now, in words for the user; None when it may be."""
    # First, because a device brings threads with it, and they are not what the user can change.
    # Only what the program itself has loaded: a program without jax can be forked as well.
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and bridge.backends_are_initialized():
        return (
            "the program used a jax device at import; a device cannot be shared with a forked "
            "process (create arrays inside `train`)"
        )
    threads = thread_names()
    if len(threads) != 1:
        return (
            f"the program has {len(threads)} threads after its imports ({', '.join(threads)}); "
            "a forked process would have one of them"
        )
    return None


def serve(fd: int, *, enter: Enter) -> NoReturn:
    """Fork workers as the agent asks, until the agent ends.

    Args:
        fd: the socket named by `ENV_ZYGOTE_FD`.
        enter: what a forked worker runs. It never returns.

    Blocking: for the life of the agent.
    """
    # A shell in between (`sh -c "python train.py; …"`) gets the agent's death signal; this line
    # hands it on. The end of the socket is the same news once more.
    die_with_parent(os.getppid())
    os.environ.pop(ENV_ZYGOTE_FD, None)
    # What the program set at import is for its workers.
    programs = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    with contextlib.suppress(LinkClosed):
        _Zygote(sock, enter, programs).run()
    _leave(0)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Zygote:
    def __init__(
        self, sock: socket.socket, enter: Enter, programs: Mapping[signal.Signals, object]
    ) -> None:
        self._sock = sock
        self._enter = enter
        self._programs = programs
        """Handlers of signals that the program set at import."""
        self._workers: dict[int, int] = {}
        """pidfd → pid."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    def run(self) -> None:
        why = why_not_forkable()
        if why is not None:
            send(self._sock, CannotFork(why=why))
            _leave(0)
        # Objects made by the imports are never collected: the collector would otherwise write to
        # every page of them in every worker.
        gc.collect()
        gc.freeze()
        send(self._sock, Ready(pid=os.getpid()))
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._sock:
                    order, fds = receive(self._sock, Fork, DESCRIPTORS_MAX)
                    self._fork(order, fds)
                else:
                    self._reap(key.fd)

    def _fork(self, order: Fork, fds: Sequence[int]) -> None:
        why = why_not_forkable()
        if why is not None:
            send(self._sock, CannotFork(why=why))
            _leave(0)
        link_fd, control_fd, *slots = fds
        sys.stdout.flush()
        sys.stderr.flush()
        zygote_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(zygote_pid, link_fd, control_fd, slots)
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        send(self._sock, Forked(pid=pid, number=order.number), [pidfd])
        for fd in fds:
            os.close(fd)

    def _become_worker(
        self, zygote_pid: int, link_fd: int, control_fd: int, slots: list[int]
    ) -> NoReturn:
        try:
            die_with_parent(zygote_pid)
            self._selector.close()
            self._sock.close()
            for pidfd in self._workers:
                os.close(pidfd)
            pass_by_in_worker(self._programs)
            self._enter(socket.socket(fileno=link_fd), control_fd, slots)
        except BaseException as error:  # noqa: BLE001
            # Nothing of the zygote's own stack may go on in the worker, whatever was raised.
            sys.excepthook(type(error), error, error.__traceback__)
            _leave(1)

    def _reap(self, pidfd: int) -> None:
        pid = self._workers.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        send(self._sock, Reaped(pid=pid, status=status))
