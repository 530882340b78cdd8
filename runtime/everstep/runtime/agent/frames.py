"""Frames on a Unix stream socket: four bytes of length, then JSON; descriptors travel beside them.

The synchronous half is for the worker and the zygote, which wait for one frame at a time. The
agent reads several links at once and uses `FrameStream`. Nothing here knows what a frame means.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from everstep.runtime.errors import InvariantViolated

HEADER_BYTES = 4
FRAME_BYTES_MAX = 1 << 28
"""A plot of a hundred thousand shards is about 16 MiB; anything near this is a broken stream."""
DESCRIPTORS_MAX = 250
"""Of one frame. The kernel's own bound is 253."""

Frame = TypeVar("Frame")


class LinkClosed(EOFError):
    """The other side ended, between two frames or within one."""


def encode(frame: msgspec.Struct) -> bytes:
    payload = msgspec.json.encode(frame)
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


def send(sock: socket.socket, frame: msgspec.Struct, fds: Sequence[int] = ()) -> None:
    """Write one frame, and give the other side its own copies of `fds`.

    Raises:
        LinkClosed: the other side has ended.

    Blocking: while the socket's buffer is full, that is while the other side does not read.
    """
    data = encode(frame)
    try:
        if fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            sent = sock.sendmsg([data], rights)
            data = data[sent:]
        sock.sendall(data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise LinkClosed("the other side of the link has ended") from error


def receive(sock: socket.socket, frame_type: Any, max_fds: int = 0) -> tuple[Any, list[int]]:
    """Read exactly one frame of `frame_type`, and the descriptors that came with it.

    Args:
        sock: a blocking socket; a time limit on it applies.
        frame_type: a struct or a union of tagged structs.
        max_fds: how many descriptors the caller is ready to own.

    Raises:
        LinkClosed: the other side has ended.

    Blocking: until a frame is there.
    """
    fds: list[int] = []
    header = _receive_exactly(sock, HEADER_BYTES, fds, max_fds)
    length = int.from_bytes(header, "little")
    if length > FRAME_BYTES_MAX:
        raise InvariantViolated(f"a frame of {length} bytes on the link; the stream is broken")
    payload = _receive_exactly(sock, length, fds, max_fds)
    return msgspec.json.decode(payload, type=frame_type), fds


def _receive_exactly(sock: socket.socket, count: int, fds: list[int], max_fds: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        try:
            chunk, ancillary, _, _ = sock.recvmsg(
                count - len(received), socket.CMSG_SPACE(4 * max_fds) if max_fds else 0
            )
        except ConnectionResetError as error:
            raise LinkClosed("the other side of the link has ended") from error
        fds.extend(_descriptors(ancillary))
        if not chunk:
            raise LinkClosed("the other side of the link has ended")
        received += chunk
    return bytes(received)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> Iterator[int]:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            yield from numbers


class FrameStream(Generic[Frame]):
    """One end of a link inside an event loop. Reads ahead, so that the other side never waits.

    Descriptors are kept in the order in which they came; who receives a frame that is known to
    carry some takes them with `take_descriptor`.
    """

    def __init__(self, sock: socket.socket, frame_type: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder: msgspec.json.Decoder[Frame] = msgspec.json.Decoder(frame_type)
        self._buffer = bytearray()
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._descriptors: deque[int] = deque()
        self._outgoing = asyncio.Lock()
        self._is_closed = False
        self._is_reading = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._read)

    async def receive(self) -> Frame:
        """Wait for the next frame.

        Raises:
            LinkClosed: the other side ended; frames that it sent before were all returned.
        """
        frame = await self._frames.get()
        if frame is None:
            self._frames.put_nowait(None)
            raise LinkClosed("the other side of the link has ended")
        return frame

    def take_descriptor(self) -> int:
        return self._descriptors.popleft()

    async def send(self, frame: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Write one frame. A link whose other side has ended swallows it: `receive` says so."""
        data = memoryview(encode(frame))
        async with self._outgoing:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, OSError):
                while fds and not self._is_closed:
                    try:
                        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                        data = data[self._sock.sendmsg([data], rights) :]
                        break
                    except BlockingIOError:
                        await asyncio.sleep(0.001)
                if not self._is_closed:
                    await self._loop.sock_sendall(self._sock, data)

    def finish(self) -> None:
        """Take in what is there and nothing more: the process at the other end is gone.

        The end of the stream itself may never come, because a process that the other side forked
        has a copy of its descriptor.
        """
        while self._is_reading:
            if not self._read():
                self._stop_reading()

    def close(self) -> None:
        """Close this end; a waiting `receive` is told."""
        if self._is_closed:
            return
        self._stop_reading()
        self._is_closed = True
        self._sock.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _read(self) -> bool:
        """Take in what one call gives; False when there is nothing now."""
        try:
            chunk, ancillary, _, _ = self._sock.recvmsg(
                1 << 16, socket.CMSG_SPACE(4 * DESCRIPTORS_MAX)
            )
        except BlockingIOError:
            return False
        except OSError:
            self._stop_reading()
            return False
        self._descriptors.extend(_descriptors(ancillary))
        if not chunk:
            self._stop_reading()
            return False
        self._buffer += chunk
        self._parse()
        return True

    def _parse(self) -> None:
        while len(self._buffer) >= HEADER_BYTES:
            length = int.from_bytes(self._buffer[:HEADER_BYTES], "little")
            end = HEADER_BYTES + length
            if length > FRAME_BYTES_MAX:
                self._stop_reading()
                return
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            try:
                self._frames.put_nowait(self._decoder.decode(payload))
            except msgspec.MsgspecError:
                # A stream that does not speak the protocol is as good as closed.
                self._stop_reading()
                return

    def _stop_reading(self) -> None:
        if not self._is_reading:
            return
        self._is_reading = False
        self._loop.remove_reader(self._sock.fileno())
        self._frames.put_nowait(None)
