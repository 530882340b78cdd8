"""JAX's coordination service in processes of its own, one for each incarnation.

`main` is a process that has imported jaxlib and forks: so a service is up some hundredths of a
second after it was asked for. Each service lives as long as the agent's end of its line is open,
and the agent learns of its end by the same line.

Nothing is shared with a worker: a service outlives any of them, and rank 0 is an ordinary member.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from typing import Any, NoReturn

import msgspec

from everstep.runtime.agent.frames import LinkClosed, receive, send
from everstep.runtime.agent.process import die_with_parent

PORTS_TRIED_MAX = 64


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag="serve"):
    """Agent → forker, with one descriptor: the service's end of its line."""

    address: str
    port: int
    process_count: int
    heartbeat_timeout_s: int
    register_timeout_s: int


class Serving(msgspec.Struct, frozen=True, kw_only=True, tag="serving"):
    """Service → agent, with the service's pidfd: it accepts connections on this port."""

    pid: int
    port: int


class NotServing(msgspec.Struct, frozen=True, kw_only=True, tag="not-serving"):
    why: str


ServiceFrame = Serving | NotServing


def is_free(address: str, port: int) -> bool:
    """Whether nobody listens there.

    gRPC binds with SO_REUSEPORT, so two services on one port would both come up and share the
    members between them; a plain socket is refused in that case.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _native() -> Any:
    """Jaxlib's extension, without jax: half the time and two thirds of the memory."""
    return importlib.import_module("jaxlib._jax")


def _serve(order: Serve, line: socket.socket) -> NoReturn:
    ports = range(order.port, min(order.port + PORTS_TRIED_MAX, 1 << 16))
    port = next((p for p in ports if is_free(order.address, p)), None)
    if port is None:
        why = f"no free port from {order.port} to {ports[-1]} on {order.address}"
        send(line, NotServing(why=why))
        os._exit(1)
    try:
        # Recoverable: a worker that is killed must not make the service abort the late ones.
        service = _native().get_distributed_runtime_service(
            f"{order.address}:{port}",
            order.process_count,
            heartbeat_timeout=order.heartbeat_timeout_s,
            cluster_register_timeout=order.register_timeout_s,
            recoverable=True,
        )
    except Exception as error:  # noqa: BLE001 - jaxlib raises its own kinds; all mean the same here.
        send(line, NotServing(why=f"{type(error).__name__}: {error}"))
        os._exit(1)
    pidfd = os.pidfd_open(os.getpid())
    send(line, Serving(pid=os.getpid(), port=port), [pidfd])
    # The agent sends nothing more: the next thing to read is the end of the line.
    while line.recv(1):
        pass
    del service
    os._exit(0)


def main() -> None:
    """Fork services as the agent asks, on the socket whose number is the first argument."""
    agent_pid, fd = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(agent_pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # Ended services are reaped by the kernel.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)

    _native()  # Imported once here, for all that are forked.
    forker_pid = os.getpid()
    while True:
        try:
            order, fds = receive(sock, Serve, 1)
        except LinkClosed:
            os._exit(0)
        if os.fork() == 0:
            die_with_parent(forker_pid)
            sock.close()
            _serve(order, socket.socket(fileno=fds[0]))
        os.close(fds[0])


if __name__ == "__main__":
    main()
