"""How the processes of one program tell each other small things, without a barrier.

Under several processes that is JAX's own coordination service, which is there however they were
started; this module, alone in the room, reaches for its client.
"""

from __future__ import annotations

import socket
from typing import Any, Protocol

import jax

from everstep.runtime.errors import ConfigurationError, PeerUnavailable


class Channel(Protocol):
    """Values by key, set once, seen by all processes."""

    @property
    def process(self) -> int:
        """This process's number; 0 leads."""
        ...

    @property
    def process_count(self) -> int: ...

    def put(self, key: str, value: str) -> None:
        """Raises `PeerUnavailable` when the service is gone."""
        ...

    def get(self, key: str, timeout_s: float) -> str:
        """The value, as soon as some process has put it.

        Raises:
            PeerUnavailable: nobody did within the time, or the service is gone.
        """
        ...

    def forget(self, key: str) -> None:
        """Nobody will ask for the key again. Never fails."""
        ...


class Alone:
    """One process: everything is known at once."""

    process = 0
    process_count = 1

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def put(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str, timeout_s: float) -> str:
        del timeout_s
        return self._values[key]

    def forget(self, key: str) -> None:
        self._values.pop(key, None)


class JaxChannel:
    """Over the key-value store of JAX's coordination service."""

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self._prefix = f"everstep/{namespace}/"
        self.process = jax.process_index()
        self.process_count = jax.process_count()

    def put(self, key: str, value: str) -> None:
        try:
            self._client.key_value_set(self._prefix + key, value)
        except Exception as error:
            raise PeerUnavailable(f"JAX's coordination service: {_first_line(error)}") from error

    def get(self, key: str, timeout_s: float) -> str:
        try:
            found = self._client.blocking_key_value_get(
                self._prefix + key, max(1, round(timeout_s * 1000))
            )
        except Exception as error:
            # jaxlib has one type for everything. Whether it is late or gone, it is not here.
            raise PeerUnavailable(
                f"{key} was not told within {timeout_s:g} s: {_first_line(error)}"
            ) from error
        return str(found)

    def forget(self, key: str) -> None:
        try:
            self._client.key_value_delete(self._prefix + key)
        except Exception:  # noqa: BLE001 - one key too many in a service that ends with the program
            return


def open_channel(namespace: str) -> Channel:
    """The channel of this program.

    Args:
        namespace: equal on all processes, and used once in a program.

    Raises:
        ConfigurationError: there are several processes and no coordination service.
    """
    if jax.process_count() == 1:
        return Alone()
    from jax._src import distributed

    client: Any = distributed.global_state.client
    if client is None:
        raise ConfigurationError(
            "es.Checkpoints",
            f"{jax.process_count()} processes without a coordination service",
            "jax.distributed.initialize() before it",
        )
    return JaxChannel(client, namespace)


def own_address() -> str:
    """The address at which the other processes reach this one.

    It is the one from which this process goes to the coordination service, to which all go.
    """
    from jax._src import distributed

    state: Any = distributed.global_state
    place = str(state.coordinator_address or "127.0.0.1:1")
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        # Nothing is sent: only the way there is looked up.
        with socket.socket(found[0], socket.SOCK_DGRAM) as way:
            way.connect(found[4])
            return str(way.getsockname()[0])
    except (OSError, ValueError) as error:
        raise PeerUnavailable(f"no way to the coordinator at {place}: {error}") from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
