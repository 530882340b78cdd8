"""Read the memory of other hosts over HTTP, by range.

Synchronous: a restore has threads of its own, and no event loop. Connections are kept and re-used
by whichever thread comes next.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
import numpy as np
import tenacity
from numpy.typing import NDArray

from everstep.controller.api.ids import Incarnation
from everstep.runtime.backoff import random_exponential
from everstep.runtime.errors import Fenced, ManifestCorrupt, PeerUnavailable
from everstep.runtime.layout.manifest import BLOCK_BYTES, Holding, SnapshotManifest
from everstep.runtime.restore.reshard import SourceKind

# The names of `agent.wire`; siblings do not import each other, and a test compares them.
TOKEN_HEADER = "Authorization"
INCARNATION_HEADER = "Everstep-Incarnation"

TIMEOUT_S = 10.0
"""Longest silence of a peer within one request."""
NOT_YET_WAIT_S = 10.0
"""How long a peer may take to learn of this incarnation."""
CONNECTIONS_KEPT_MAX = 8

T = TypeVar("T")


class _NotYet(PeerUnavailable):
    """The peer does not know this incarnation yet."""


class _Refused(msgspec.Struct, frozen=True):
    """The part of `agent.wire.Refused` that matters here."""

    mine: Incarnation


class PeerMemory:
    """One holding in the memory of an agent. Implements `MemorySource`. Any thread."""

    def __init__(
        self,
        holding: Holding,
        *,
        kind: SourceKind,
        token: str,
        incarnation: Incarnation,
        timeout_s: float = TIMEOUT_S,
        wait_s: float = NOT_YET_WAIT_S,
    ) -> None:
        self.kind = kind
        what = "disk" if holding.is_local else "memory"
        self.name = f"{what} of host {holding.host} at {holding.address}:{holding.port}"
        self.holding = holding
        self._incarnation = incarnation
        self._headers = {
            TOKEN_HEADER: f"Bearer {token}",
            INCARNATION_HEADER: str(incarnation),
        }
        self._timeout_s, self._wait_s = timeout_s, wait_s
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._manifest: SnapshotManifest | None = None

    def manifest(self) -> SnapshotManifest:
        """The holding's manifest, checked against what was offered at the join.

        Raises:
            PeerUnavailable: not to be had.
            ManifestCorrupt: it does not decode, or describes something else.
        """
        with self._lock:
            if self._manifest is not None:
                return self._manifest
        body = self._request("manifest", {}, _read_all)
        where = f"{self.name}, step {self.holding.step}"
        try:
            manifest = msgspec.json.decode(body, type=SnapshotManifest)
        except (msgspec.DecodeError, ValueError) as error:
            raise ManifestCorrupt(where, "manifest", "a snapshot manifest", str(error)) from error
        found = (manifest.step, manifest.incarnation, manifest.plot.shards)
        if found != (self.holding.step, self.holding.incarnation, self.holding.shards):
            raise ManifestCorrupt(where, "manifest", "what was offered", "another snapshot")
        if [len(crcs) for crcs in manifest.crcs] != [
            -(-shard.size_bytes // BLOCK_BYTES) for shard in manifest.plot.shards
        ]:
            raise ManifestCorrupt(where, "manifest", "a checksum of every block", "another count")
        with self._lock:
            self._manifest = manifest
        return manifest

    def view(self, offset: int, size_bytes: int) -> NDArray[np.uint8] | None:
        """None: nothing of a peer's memory is in this process."""
        del offset, size_bytes
        return None

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """See `MemorySource.read_into`. The bytes go from the socket straight into `out`."""
        if out.size == 0:
            return
        headers = {"Range": f"bytes={offset}-{offset + out.size - 1}"}

        def receive(answer: http.client.HTTPResponse) -> None:
            if answer.status != http.client.PARTIAL_CONTENT or answer.length != out.size:
                raise PeerUnavailable(
                    f"{self.name} answered {answer.status} with {answer.length} bytes to "
                    f"{headers['Range']}"
                )
            _fill(answer, out.data, self.name)

        self._request("bytes", headers, receive)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _request(
        self,
        what: str,
        headers: dict[str, str],
        receive: Callable[[http.client.HTTPResponse], T],
    ) -> T:
        """One request, again where the peer is not ready yet, until the deadline."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_NotYet),
            wait=random_exponential(0.02, 0.5),
            stop=tenacity.stop_after_delay(self._wait_s),
            reraise=True,
        )
        result: T = retrying(self._request_once, what, headers, receive)
        return result

    def _request_once(
        self,
        what: str,
        headers: dict[str, str],
        receive: Callable[[http.client.HTTPResponse], T],
    ) -> T:
        connection, is_kept = self._take()
        path = f"/v1/holdings/{self.holding.id}/{what}"
        try:
            try:
                answer = self._ask(connection, path, headers)
            except (http.client.HTTPException, ConnectionError):
                # A kept connection may have been closed by the peer while it was idle. A fresh
                # one that fails has no such excuse.
                if not is_kept:
                    raise
                connection.close()
                answer = self._ask(connection, path, headers)
            self._judge(answer)
            result = receive(answer)
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise PeerUnavailable(f"{self.name}: {error or type(error).__name__}") from error
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return result

    def _ask(
        self, connection: http.client.HTTPConnection, path: str, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        connection.request("GET", path, headers={**self._headers, **headers})
        return connection.getresponse()

    def _judge(self, answer: http.client.HTTPResponse) -> None:
        if answer.status in (http.client.OK, http.client.PARTIAL_CONTENT):
            return
        body = answer.read(4096)
        if answer.status == http.client.CONFLICT:
            with suppress(msgspec.DecodeError):
                refused = msgspec.json.decode(body, type=_Refused)
                if refused.mine > self._incarnation:
                    raise Fenced(own=self._incarnation, newest=refused.mine, where=self.name)
        kind = _NotYet if answer.status == http.client.TOO_EARLY else PeerUnavailable
        if answer.status == http.client.GONE:
            raise kind(f"{self.name} no longer holds {self.holding.id}")
        raise kind(f"{self.name} answered {answer.status} {answer.reason}")

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        address, port = self.holding.address, self.holding.port
        return http.client.HTTPConnection(address, port, timeout=self._timeout_s), False

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < CONNECTIONS_KEPT_MAX:
                self._idle.append(connection)
                return
        connection.close()


def _read_all(answer: http.client.HTTPResponse) -> bytes:
    return answer.read()


def _fill(answer: http.client.HTTPResponse, out: memoryview, name: str) -> None:
    done = 0
    while done < len(out):
        count = answer.readinto(out[done:])
        if not count:
            raise PeerUnavailable(f"{name} ended after {done} of {len(out)} bytes")
        done += count
