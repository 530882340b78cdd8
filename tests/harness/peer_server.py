"""A peer for restore tests: the two paths of an agent that serve bytes, over a real shelf.

It can be told to misbehave as peers do: to hang up, to be gone, to be of another incarnation.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import web

from everstep.controller.api.ids import Incarnation
from everstep.runtime.agent.wire import INCARNATION_HEADER, TOKEN_HEADER, Refused
from everstep.runtime.snapshot.shelf import Shelf


class PeerServer:
    """Serves one shelf on 127.0.0.1 from a thread of its own, as a context manager."""

    def __init__(self, shelf: Shelf, *, token: str = "t", incarnation: int = 1) -> None:
        self.shelf, self.token, self.incarnation = shelf, token, incarnation
        self.address, self.port = "127.0.0.1", 0
        self.requests: Counter[str] = Counter()
        """Requests by last part of the path."""
        self.ranges: list[tuple[int, int]] = []
        self.not_yet_count = 0
        """Answer this many requests with 425 first."""
        self.hang_up_after: int | None = None
        """Send this many bytes of a range, then close the connection."""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="peer server")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "the peer server did not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it; connections are closed. A second call does nothing."""
        if self._thread.is_alive() and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/holdings/{id}/manifest", self._manifest)
        app.router.add_get("/v1/holdings/{id}/bytes", self._bytes)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, self.address, 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    def _refuse(self, request: web.Request) -> web.Response | None:
        self.requests[request.path.rsplit("/", 1)[1]] += 1
        if request.headers.get(TOKEN_HEADER) != f"Bearer {self.token}":
            return web.Response(status=401)
        if self.not_yet_count > 0:
            self.not_yet_count -= 1
            return web.Response(status=425)
        theirs = int(request.headers[INCARNATION_HEADER])
        if theirs != self.incarnation:
            refused = Refused(
                message="another incarnation",
                yours=Incarnation(theirs),
                mine=Incarnation(self.incarnation),
            )
            return web.Response(status=409, body=msgspec.json.encode(refused))
        if request.match_info["id"] not in dict(self.shelf.manifests()):
            return web.Response(status=410)
        return None

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        refused = self._refuse(request)
        if refused is not None:
            return refused
        manifest = dict(self.shelf.manifests())[request.match_info["id"]]
        return web.Response(body=msgspec.json.encode(manifest))

    async def _bytes(self, request: web.Request) -> web.StreamResponse:
        refused = self._refuse(request)
        if refused is not None:
            return refused
        asked = request.http_range
        data = self.shelf.view(request.match_info["id"])[asked.start : asked.stop]
        self.ranges.append((asked.start, asked.stop))
        if self.hang_up_after is None:
            return web.Response(status=206, body=bytes(data))
        answer = web.StreamResponse(status=206, headers={"Content-Length": str(len(data))})
        await answer.prepare(request)
        await answer.write(bytes(data[: self.hang_up_after]))
        assert request.transport is not None
        request.transport.abort()
        return answer
