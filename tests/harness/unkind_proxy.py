"""A proxy before an object server that treats requests as networks and overloaded servers do.

Each request is shown to the rule that is set; the fault that it names is done to this request.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import unquote

import google_crc32c
from aiohttp import ClientSession, web
from yarl import URL


@dataclass(frozen=True)
class Asked:
    """A request, as a rule sees it."""

    kind: str
    """`create`, `read`, `list`, `stat`, `delete`, or `other`."""
    name: str
    """Of the object, or the prefix of a list."""
    number: int
    """Counts the requests of this kind, from 0."""
    tries: int
    """Counts those of this kind and name, from 0."""


@dataclass(frozen=True)
class Delay:
    seconds: float


@dataclass(frozen=True)
class Answer:
    """A status of the proxy's own."""

    status: int
    retry_after: str | None = None
    is_done_first: bool = False
    """The server does what was asked; only its answer is not passed on."""


@dataclass(frozen=True)
class Cut:
    """Close the connection."""

    is_done_first: bool = False
    after_bytes: int | None = None
    """Of the answer's body; at once when None."""


@dataclass(frozen=True)
class Lie:
    """Say that an object was stored, with the right checksum, and store nothing."""


@dataclass(frozen=True)
class Shorten:
    """Answer with so many bytes, and say that this is all."""

    to_bytes: int


@dataclass(frozen=True)
class Flip:
    """Flip a bit of the answer's body, or of the request's."""

    at_byte: int = 0
    is_of_request: bool = False


Fault = Delay | Answer | Cut | Lie | Shorten | Flip
Rule = Callable[[Asked], Fault | None]


class UnkindProxy:
    """As a context manager: serves on 127.0.0.1 from a thread of its own."""

    def __init__(self, upstream: str, rule: Rule | None = None) -> None:
        self.rule = rule
        self.port = 0
        self.asked: list[Asked] = []
        self.faults: Counter[str] = Counter()
        """What was done, by the fault's kind."""
        self.is_guarded = False
        """Whether only the token server's tokens are taken, until `expire_tokens`."""
        self.tokens_given: list[str] = []
        """By the token server, at `/token`."""
        self._refuse_tokens: int | None = None
        self._valid: set[str] = set()
        self._upstream = upstream
        self._kinds: Counter[str] = Counter()
        self._names: Counter[tuple[str, str]] = Counter()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="unkind proxy")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10), "the proxy did not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/token", self._give_token)
        application.router.add_route("*", "/{tail:.*}", self._handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        async with ClientSession(auto_decompress=False) as self._session:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            self._ready.set()
            await self._stop.wait()
            await runner.cleanup()
        # Who was just let in, or has just been let go, is closed in the next turns of the loop.
        for _ in range(5):
            await asyncio.sleep(0)

    def expire_tokens(self) -> None:
        """Refuse all that were given, with 401."""
        self._valid.clear()

    def stop_giving(self, status: int | None) -> None:
        """Let the token server answer with a status; give tokens again when None."""
        self._refuse_tokens = status

    async def _give_token(self, request: web.Request) -> web.Response:
        await request.read()
        if self._refuse_tokens is not None:
            said = {"error": "invalid_grant", "error_description": "the account is disabled"}
            return web.json_response(said, status=self._refuse_tokens)
        token = f"token-{len(self.tokens_given)}"
        self.tokens_given.append(token)
        self._valid.add(f"Bearer {token}")
        return web.json_response(
            {"access_token": token, "expires_in": 3600, "token_type": "Bearer"}
        )

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read()
        except (ConnectionError, web.HTTPException):
            return web.Response(status=400)
        if self.is_guarded and request.headers.get("Authorization") not in self._valid:
            return web.Response(status=401, text="the token has expired")
        asked = self._see(request, body)
        fault = self.rule(asked) if self.rule is not None else None
        if fault is not None:
            self.faults[type(fault).__name__] += 1
        return await self._treat(request, body, asked, fault)

    def _see(self, request: web.Request, body: bytes) -> Asked:
        kind, name = _kind_and_name(request, body)
        asked = Asked(kind, name, self._kinds[kind], self._names[kind, name])
        self._kinds[kind] += 1
        self._names[kind, name] += 1
        self.asked.append(asked)
        return asked

    async def _treat(
        self, request: web.Request, body: bytes, asked: Asked, fault: Fault | None
    ) -> web.StreamResponse:
        match fault:
            case Delay(seconds):
                await asyncio.sleep(seconds)
            case Answer(status, retry_after, is_done_first):
                if is_done_first:
                    await self._forward(request, body)
                headers = {"Retry-After": retry_after} if retry_after is not None else {}
                return web.Response(status=status, text="of the proxy", headers=headers)
            case Cut(is_done_first, None):
                if is_done_first:
                    await self._forward(request, body)
                return _hang_up(request)
            case Lie():
                return web.json_response(_as_if_stored(asked.name, _content(request, body)))
            case Flip(at_byte, True):
                content = _content(request, body)
                if content:
                    at = body.find(content) + at_byte % len(content)
                    body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            case _:
                pass
        status, headers, content = await self._forward(request, body)
        if status >= 300:
            return web.Response(status=status, headers=headers, body=content)
        match fault:
            case Shorten(to_bytes):
                content = content[:to_bytes]
            case Flip(at_byte, False) if content:
                at = at_byte % len(content)
                content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
            case Cut(_, int(after_bytes)):
                response = web.StreamResponse(status=status, headers=headers)
                response.content_length = len(content)
                await response.prepare(request)
                await response.write(content[:after_bytes])
                return _hang_up(request)
            case _:
                pass
        return web.Response(status=status, headers=headers, body=content)

    async def _forward(
        self, request: web.Request, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in ("host", "content-length", "transfer-encoding", "connection")
        }
        url = URL(self._upstream + request.raw_path, encoded=True)
        async with self._session.request(
            request.method, url, data=io.BytesIO(body), headers=headers
        ) as answer:
            content = await answer.read()
            kept = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date")
            }
            return answer.status, kept, content


def _hang_up(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _kind_and_name(request: web.Request, body: bytes) -> tuple[str, str]:
    path = request.raw_path.partition("?")[0]
    name = unquote(path.partition("/o/")[2])
    if path.startswith("/upload/"):
        found = re.search(rb'"name": ?"([^"]+)"', body[:4000])
        return "create", request.query.get("name") or (found[1].decode() if found else "")
    if request.method == "DELETE":
        return "delete", name
    if request.method == "GET" and name:
        is_read = path.startswith("/download/") or request.query.get("alt") == "media"
        return "read" if is_read else "stat", name
    if request.method == "GET" and path.endswith("/o"):
        return "list", request.query.get("prefix", "")
    return "other", path


def _content(request: web.Request, body: bytes) -> bytes:
    """What is to be stored: the second part of two, or all."""
    if request.query.get("uploadType") != "multipart":
        return body
    boundary = request.headers["Content-Type"].partition("boundary=")[2].strip('"').encode()
    second = body.split(b"--" + boundary)[2]
    return second.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")


def _as_if_stored(name: str, content: bytes) -> dict[str, str]:
    crc = int(google_crc32c.value(content)).to_bytes(4, "big")
    return {
        "kind": "storage#object",
        "name": name,
        "size": str(len(content)),
        "crc32c": base64.b64encode(crc).decode(),
        "generation": "1",
        "metageneration": "1",
    }


def describe(asked: list[Asked]) -> str:
    """For the message of a test that fails."""
    return json.dumps([f"{one.kind} {one.name}" for one in asked[-20:]], indent=1)
