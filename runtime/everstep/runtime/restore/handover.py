"""Parts of stored chunks on their way from one process to another: the bytes on the socket.

A giver connects, says who it is and for which exchange, and then sends parts in the order in
which it reads them: a header, the elements in C order, their CRC-32C. Nothing is asked for, so
nobody waits for an answer. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.clock import Clock
from everstep.runtime.errors import PeerUnavailable
from everstep.runtime.layout.boxes import whole
from everstep.runtime.storage.chunks import CRC_BYTES, Bytes, decode, encoded, extend_crc

TOKEN_BYTES = 32
_HELLO = struct.Struct("!4sI32s32s")
_MAGIC = b"evx1"
_HEADER = struct.Struct("!BIIQ")


class Kind(IntEnum):
    PART = 1
    REFUSED = 2
    """The giver could not read the chunk; whoever needs it reads it himself."""
    ALIVE = 3
    """Nothing yet, but work goes on."""
    DONE = 4


class Header(NamedTuple):
    kind: Kind
    chunk: int = 0
    """Number of the shared chunk, the same on both sides."""
    part: int = 0
    """Number of the part among those that the taker needs of the chunk."""
    size_bytes: int = 0


class WrongBytes(PeerUnavailable):
    """What arrived is not what was sent."""


class Wire:
    """One end of a connection. One thread sends, or one receives."""

    def __init__(
        self, connection: socket.socket, name: str, deadline_s: float, clock: Clock
    ) -> None:
        connection.settimeout(deadline_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self.name = connection, name
        self._deadline_s, self._clock = deadline_s, clock

    # The giver's end.

    def introduce(self, process: int, token: str, agreement: str) -> None:
        self._send(_HELLO.pack(_MAGIC, process, _fixed(token), _fixed(agreement)))

    def tell(self, header: Header) -> None:
        self._send(_HEADER.pack(*header))

    def give(self, chunk: int, part: int, values: NDArray[Any]) -> None:
        """Send elements. Blocking: until the socket has taken them; see `Wire`."""
        self.tell(Header(Kind.PART, chunk, part, values.nbytes))
        crc = 0
        for block in encoded(values, values.shape):
            crc = extend_crc(crc, block)
            self._send(block.data)
        self._send(crc.to_bytes(CRC_BYTES, "little"))

    # The taker's end.

    def meet(self, token: str, agreement: str) -> int:
        """The process at the other end.

        Raises:
            PeerUnavailable: it is nobody who was invited to this exchange.
        """
        magic, process, its_token, its_agreement = _HELLO.unpack(self._take(_HELLO.size))
        if magic != _MAGIC or not hmac.compare_digest(its_token, _fixed(token)):
            raise PeerUnavailable(f"{self.name} is not of this exchange")
        if its_agreement != _fixed(agreement):
            raise PeerUnavailable(f"{self.name} restores something else")
        return int(process)

    def hear(self) -> Header:
        kind, chunk, part, size = _HEADER.unpack(self._take(_HEADER.size))
        try:
            return Header(Kind(kind), chunk, part, size)
        except ValueError as error:
            raise WrongBytes(f"{self.name} sent a frame of kind {kind}") from error

    def take(self, target: NDArray[Any], progressed: Callable[[], None]) -> None:
        """Receive elements into their place, in blocks; `progressed` is told of each.

        Raises:
            WrongBytes: the checksum differs; the target is undefined then.
            PeerUnavailable: the peer was gone, or took longer than the deadline for a block.
        """

        def receive(block: Bytes) -> None:
            self._fill(block.data)
            progressed()

        computed, sent = decode(receive, target.shape, whole(target.shape), target)
        if computed != sent:
            raise WrongBytes(f"{self.name} sent bytes with another checksum")

    def close(self) -> None:
        """Also wakes up a thread that waits at this end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _take(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        by_s = self._clock.monotonic_s() + self._deadline_s
        while view:
            try:
                count = self._socket.recv_into(view)
            except TimeoutError as error:
                raise self._silent() from error
            except OSError as error:
                raise PeerUnavailable(f"{self.name}: {error}") from error
            if count == 0:
                raise PeerUnavailable(f"{self.name} has gone")
            view = view[count:]
            if view and self._clock.monotonic_s() > by_s:
                raise self._silent()

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except TimeoutError as error:
            raise self._silent() from error
        except OSError as error:
            raise PeerUnavailable(f"{self.name}: {error}") from error

    def _silent(self) -> PeerUnavailable:
        return PeerUnavailable(f"{self.name} was silent for {self._deadline_s:g} s")


def scratch_of(target: NDArray[Any], dtype: np.dtype[np.generic]) -> NDArray[Any]:
    """Where elements arrive: in their place, or beside it when they are to be cast."""
    return target if target.dtype == dtype else np.empty(target.shape, dtype)


def _fixed(text: str) -> bytes:
    return text.encode()[:TOKEN_BYTES].ljust(TOKEN_BYTES, b"\0")
