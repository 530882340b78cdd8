"""The HTTP server of an agent: `wire`'s table of requests, handed to whoever answers them.

What a request means is not known here; fencing is: a request of another incarnation is refused
with both numbers before anybody sees it.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.typedefs import Middleware

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.agent.wire import (
    INCARNATION_HEADER,
    TOKEN_HEADER,
    Cadence,
    CommittedStep,
    Hold,
    HoldAnswer,
    Join,
    Joined,
    NoticePosted,
    Part,
    Progress,
    Refused,
    Take,
    Taken,
    WriteOrder,
)
from everstep.runtime.layout.manifest import Inventory, SnapshotManifest

BODY_BYTES_MAX = 1 << 28
"""An inventory names every shard of a host's snapshots."""

STATUS_NOT_YET = 425
STATUS_FENCED = 409
STATUS_GONE = 410

T = TypeVar("T", bound=msgspec.Struct)


class Answers(Protocol):
    """Who answers. Every method runs in the event loop and must not block it."""

    def identity(self) -> tuple[Incarnation, str]:
        """The incarnation that this agent knows, and its token; 0 and nothing before the first."""
        ...

    async def join(self, join: Join) -> Joined: ...
    async def progress(self, wait_held: Step | None, wait_s: float) -> Progress: ...
    async def hold(self, hold: Hold) -> HoldAnswer: ...
    async def holdings(self, step: Step | None) -> Inventory: ...
    async def take(self, take: Take) -> Taken: ...
    async def write(self, order: WriteOrder) -> Part: ...
    async def notice(self, notice: NoticePosted) -> None: ...
    async def cadence(self, cadence: Cadence) -> None: ...
    async def committed(self, committed: CommittedStep) -> None: ...
    def manifest(self, holding_id: str) -> SnapshotManifest:
        """Raises `KeyError` when the holding is gone."""
        ...

    def pin(self, holding_id: str) -> AbstractContextManager[None]:
        """Keep the holding while it is read. Raises `KeyError` when it is gone."""
        ...

    def holding_fd(self, holding_id: str) -> int: ...


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(answers: Answers) -> web.Application:
    """Make the application that serves an agent's peers."""
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_fence(answers)])
    app.add_routes(
        [
            web.get("/v1/health", _health),
            web.post("/v1/join", _posted(Join, answers.join)),
            web.post("/v1/hold", _posted(Hold, answers.hold)),
            web.post("/v1/take", _posted(Take, answers.take)),
            web.post("/v1/write", _posted(WriteOrder, answers.write)),
            web.post("/v1/notice", _told(NoticePosted, answers.notice)),
            web.post("/v1/cadence", _told(Cadence, answers.cadence)),
            web.post("/v1/committed", _told(CommittedStep, answers.committed)),
            web.get("/v1/progress", _progress(answers)),
            web.get("/v1/holdings", _holdings(answers)),
            web.get("/v1/holdings/{id}/manifest", _manifest(answers)),
            web.get("/v1/holdings/{id}/bytes", _bytes(answers), allow_head=False),
        ]
    )
    return app


def _json(value: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


async def _health(_request: web.Request) -> web.StreamResponse:
    return web.Response(text="ok\n")


def _fence(answers: Answers) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/v1/health":
            return await handler(request)
        mine, token = answers.identity()
        sent = request.headers.get(INCARNATION_HEADER, "")
        if not sent.isdigit():
            return web.Response(status=400, text=f"no number in header {INCARNATION_HEADER}\n")
        yours = Incarnation(int(sent))
        if yours > mine:
            message = f"incarnation {yours} is not known here yet; this agent is in {mine}"
            refused = Refused(message=message, yours=yours, mine=mine)
            return _json(refused, STATUS_NOT_YET)
        if yours < mine:
            message = f"incarnation {yours} is fenced; this agent is in incarnation {mine}"
            refused = Refused(message=message, yours=yours, mine=mine)
            return _json(refused, STATUS_FENCED)
        if not hmac.compare_digest(request.headers.get(TOKEN_HEADER, ""), f"Bearer {token}"):
            return web.Response(status=401, text="wrong token\n")
        try:
            return await handler(request)
        except KeyError as error:
            return web.Response(status=STATUS_GONE, text=f"holding {error} is gone\n")

    return middleware


def _posted(kind: type[T], act: Callable[[T], Awaitable[msgspec.Struct]]) -> Handler:
    """Decode the body, act, encode the answer."""

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            body = msgspec.json.decode(await request.read(), type=kind)
        except msgspec.MsgspecError as error:
            return web.Response(status=400, text=f"{error}\n")
        return _json(await act(body))

    return handler


def _told(kind: type[T], act: Callable[[T], Awaitable[None]]) -> Handler:
    """Decode the body, act, answer 204."""

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            body = msgspec.json.decode(await request.read(), type=kind)
        except msgspec.MsgspecError as error:
            return web.Response(status=400, text=f"{error}\n")
        await act(body)
        return web.Response(status=204)

    return handler


def _number(request: web.Request, name: str) -> int | None:
    text = request.query.get(name)
    if text is None:
        return None
    if not text.isdigit():
        raise web.HTTPBadRequest(text=f"{name}: found {text!r}, expected a number\n")
    return int(text)


def _progress(answers: Answers) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        held = _number(request, "held")
        wait_s = _number(request, "wait_s") or 0
        step = None if held is None else Step(held)
        return _json(await answers.progress(step, wait_s))

    return handler


def _holdings(answers: Answers) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        step = _number(request, "step")
        return _json(await answers.holdings(None if step is None else Step(step)))

    return handler


def _manifest(answers: Answers) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return _json(answers.manifest(request.match_info["id"]))

    return handler


class _HoldingResponse(web.FileResponse):
    """A range of a holding by sendfile, pinned until the last byte is sent."""

    def __init__(self, answers: Answers, holding_id: str) -> None:
        super().__init__(f"/proc/self/fd/{answers.holding_fd(holding_id)}", chunk_size=1 << 20)
        self._answers = answers
        self._holding_id = holding_id

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        with self._answers.pin(self._holding_id):
            return await super().prepare(request)


def _bytes(answers: Answers) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return _HoldingResponse(answers, request.match_info["id"])

    return handler
