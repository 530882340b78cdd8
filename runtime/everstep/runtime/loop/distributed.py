"""Connect to a coordination service that runs in a process of its own.

`jax.distributed.initialize` starts a service in process 0, and its CPU backend announces the
address that the machine's name resolves to. An incarnation has its coordinator elsewhere, and a
host has an address of its own. So this module, alone, reaches into `jax._src`: it is checked
against the versions it was written for, and falls back to the public call.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import jax

VERIFIED_VERSIONS = ((0, 10),)
BARRIER_PREFIX = "everstep/"


class Connection:
    """This process's client of the coordination service; None inside when it is alone."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def is_alone(self) -> bool:
        return self._client is None

    def wait_for_all(self, name: str, timeout_s: float) -> bool:
        """Wait until every process of the incarnation is here, or the time is over.

        Blocking: for `timeout_s` at most.
        """
        if self._client is None:
            return True
        try:
            self._client.wait_at_barrier(BARRIER_PREFIX + name, round(timeout_s * 1000))
        except Exception:  # noqa: BLE001 - jaxlib raises one type for everything; absence is the answer
            return False
        return True

    def claim(self, name: str, value: str) -> str | None:
        """Set a value once for all members; the value that was there, or None if first."""
        if self._client is None:
            return None
        with contextlib.suppress(Exception):
            self._client.key_value_set(BARRIER_PREFIX + name, value)
            return None
        with contextlib.suppress(Exception):
            return str(self._client.blocking_key_value_get(BARRIER_PREFIX + name, 1000))
        return None


def is_verified() -> bool:
    """Whether this jax is one whose private parts are known."""
    return jax.__version_info__[:2] in VERIFIED_VERSIONS


def has_devices() -> bool:
    """Whether this process has opened jax's devices: too late to make it one of several."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def connect(
    *, address: str, rank: int, process_count: int, local_address: str, timeout_s: float
) -> Connection:
    """Join the coordination service at `address` as process `rank`.

    Args:
        address: `ip:port`, a service that is up already. Empty when `process_count` is 1.
        local_address: address that this process's collectives bind and announce.
        timeout_s: bound of the connection itself.

    Raises:
        RuntimeError: the service could not be reached (jaxlib may also abort the process).

    Blocking: for `timeout_s` at most.
    """
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_enable_recoverability", True)
    if not address:
        return Connection(None)
    heartbeat_s = 600
    if is_verified():
        client = _connect_client(address, rank, process_count, round(timeout_s), heartbeat_s)
        _announce_on(local_address, client)
        return Connection(client)
    return _connect_publicly(address, rank, process_count, round(timeout_s), heartbeat_s)


def _connect_client(
    address: str, rank: int, process_count: int, timeout_s: int, heartbeat_s: int
) -> Any:
    from jax._src import distributed

    private = _jaxlib()
    client = private.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=max(1, timeout_s),
        heartbeat_timeout=heartbeat_s,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state: Any = distributed.global_state
    state.client = client
    state.process_id = rank
    state.num_processes = process_count
    state.coordinator_address = address
    return client


def _jaxlib() -> Any:
    return importlib.import_module("jaxlib._jax")


def _announce_on(local_address: str, client: Any) -> None:
    """Have the CPU backend's collectives bind `local_address` instead of the machine's name."""
    from jax._src import xla_bridge

    private = _jaxlib()

    def make_client() -> Any:
        collectives = private.make_gloo_tcp_collectives(
            distributed_client=client, hostname=local_address
        )
        return xla_bridge.make_cpu_client(collectives=collectives)

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def _connect_publicly(
    address: str, rank: int, process_count: int, timeout_s: int, heartbeat_s: int
) -> Connection:
    """Process 0 gets an idle service on a free loopback port, and talks to ours like the rest."""
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=process_count,
        process_id=rank,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, timeout_s),
        heartbeat_timeout_seconds=heartbeat_s,
        coordinator_bind_address="127.0.0.1:0",
    )
    return Connection(None)
