"""The coordination service's start, with a real process that is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import structlog

from everstep.runtime.agent.supervisor.coordination import Coordination, Service


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_forker_that_is_killed_before_it_serves_is_replaced() -> None:
    async def serve(coordination: Coordination) -> Service:
        serving = asyncio.ensure_future(
            coordination.serve(
                address="127.0.0.1", port=free_port(), process_count=2, timeout_s=30.0
            )
        )
        # The order is out and cannot be taken in.
        await asyncio.sleep(0)
        os.kill(forker, signal.SIGKILL)
        return await serving

    coordination = Coordination(structlog.get_logger())
    try:
        coordination.warm()
        (forker,) = coordination.own_pids
        os.kill(forker, signal.SIGSTOP)
        service = asyncio.run(serve(coordination))
        assert coordination.own_pids != {forker}
        with socket.create_connection(("127.0.0.1", service.port), timeout=10):
            service.close()
    finally:
        coordination.close()
