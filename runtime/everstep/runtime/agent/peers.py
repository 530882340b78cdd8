"""How an agent asks other agents. One HTTP client per agent; every request has a deadline."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from everstep.controller.api.ids import HostId, Incarnation
from everstep.controller.api.wire import Directive
from everstep.runtime.agent.server import STATUS_FENCED, STATUS_NOT_YET
from everstep.runtime.agent.wire import INCARNATION_HEADER, TOKEN_HEADER, Refused
from everstep.runtime.errors import Fenced, PeerUnavailable

T = TypeVar("T", bound=msgspec.Struct)

RETRY_S = 0.02
RETRY_MAX_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One agent's address in one incarnation, and what opens its door."""

    host: HostId
    address: str
    port: int
    incarnation: Incarnation
    token: str

    @property
    def base(self) -> str:
        # An IPv6 address needs brackets in a URL.
        name = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{name}:{self.port}"


def peers_of(directive: Directive) -> dict[HostId, Peer]:
    """All member hosts of a directive."""
    return {
        HostId(member.slice, host.host): Peer(
            host=HostId(member.slice, host.host),
            address=host.address,
            port=host.port,
            incarnation=directive.incarnation,
            token=directive.token,
        )
        for member in directive.members
        for host in member.hosts
    }


class PeerAhead(Fenced):
    """A member knows a newer incarnation; the directive that says so is on its way here."""


class PeerClient:
    """Requests to other agents; to be closed."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, enable_cleanup_closed=False)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False
            )
        return self._session

    async def get(self, peer: Peer, path: str, answer: type[T], *, timeout_s: float) -> T:
        """GET; see `ask`."""
        return await self._ask("GET", peer, path, b"", answer, timeout_s)

    async def post(
        self, peer: Peer, path: str, body: msgspec.Struct, answer: type[T], *, timeout_s: float
    ) -> T:
        """POST a body and decode the answer. Tries again while the peer is not there or not ready.

        Raises:
            PeerAhead: the peer is in a newer incarnation.
            PeerUnavailable: no answer within `timeout_s`; names the host and the last reason.
        """
        return await self._ask("POST", peer, path, msgspec.json.encode(body), answer, timeout_s)

    async def tell(self, peer: Peer, path: str, body: msgspec.Struct, *, timeout_s: float) -> None:
        """POST a body whose answer is nothing. Raises as `post`."""
        await self._ask("POST", peer, path, msgspec.json.encode(body), None, timeout_s)

    async def _ask(
        self,
        method: str,
        peer: Peer,
        path: str,
        body: bytes,
        answer: type[T] | None,
        timeout_s: float,
    ) -> T:
        reason = "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                pause_s = RETRY_S
                while True:
                    try:
                        return await self._ask_once(method, peer, path, body, answer)
                    except _TryAgain as error:
                        reason = str(error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(RETRY_MAX_S, pause_s * 1.5)
        except TimeoutError:
            raise PeerUnavailable(
                f"host {peer.host} at {peer.address}:{peer.port}: {path}: "
                f"{reason} within {timeout_s:.3g} s"
            ) from None

    async def _ask_once(
        self, method: str, peer: Peer, path: str, body: bytes, answer: type[T] | None
    ) -> T:
        headers = {
            TOKEN_HEADER: f"Bearer {peer.token}",
            INCARNATION_HEADER: str(peer.incarnation),
        }
        try:
            async with self._open().request(
                method, peer.base + path, data=body, headers=headers
            ) as response:
                content = await response.read()
                status = response.status
        except (aiohttp.ClientError, OSError) as error:
            raise _TryAgain(str(error) or type(error).__name__) from error
        if status == STATUS_NOT_YET:
            raise _TryAgain(msgspec.json.decode(content, type=Refused).message)
        if status == STATUS_FENCED:
            refused = msgspec.json.decode(content, type=Refused)
            raise PeerAhead(own=refused.yours, newest=refused.mine, where=f"host {peer.host}")
        if status >= 500:
            raise _TryAgain(f"status {status}")
        if status >= 400:
            # Asking again would get the same answer.
            said = content[:200].decode(errors="replace").strip()
            raise PeerUnavailable(f"host {peer.host}: {path}: status {status}: {said}")
        if answer is None:
            return None  # type: ignore[return-value]
        return msgspec.json.decode(content, type=answer)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class _TryAgain(Exception):
    """The request may succeed a moment later."""
