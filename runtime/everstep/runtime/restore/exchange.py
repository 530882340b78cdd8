"""Read each stored chunk once over all processes of a restore, and hand its parts round.

Every process computes who reads what (`restore.division`), reads its share in the order of the
leaves, and sends each of the others their parts over a connection of their own, in that order.
What does not arrive, because its giver is gone, silent, slow, wrong or wants something else, is
read by whoever needs it. So nobody depends on another for more than a deadline, and the bytes are
right whoever fails.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, Self

from everstep.runtime.clock import Clock
from everstep.runtime.errors import PeerUnavailable
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.restore.arrivals import Arrivals
from everstep.runtime.restore.giving import Sender
from everstep.runtime.restore.handover import TOKEN_BYTES, Wire
from everstep.runtime.restore.outcome import Target
from everstep.runtime.restore.passing import Passing, Stage
from everstep.runtime.restore.reshard import Piece

EXCHANGE_BYTES_MIN = 1 << 20
"""When less than this would be read twice, everybody reads alone: meeting takes longer."""


class Meeting(Protocol):
    """Where processes tell each other small things: `engine.channel.Channel`."""

    @property
    def process(self) -> int: ...

    @property
    def process_count(self) -> int: ...

    def put(self, key: str, value: str) -> None:
        """Raises `PeerUnavailable`."""
        ...

    def get(self, key: str, timeout_s: float) -> str:
        """Raises `PeerUnavailable` when nobody put it within the time."""
        ...


class Exchange:
    """One restore's exchange. Made and closed by the restoring thread, on every process.

    **Blocking**: each wait on another process is at most `deadline_s` without a block from it.
    """

    def __init__(
        self,
        meeting: Meeting,
        *,
        key: str,
        address: str,
        deadline_s: float,
        clock: Clock,
    ) -> None:
        """Prepare; nothing is opened before `begin`.

        Args:
            meeting: with the other processes.
            key: of this restore, never used before.
            address: at which the others reach this process.
            deadline_s: of every wait on another process.
            clock: that measures it.
        """
        self._meeting, self._key = meeting, key
        self._address = address
        # Known to those whom it is told over the meeting: nobody else puts bytes into a state.
        self._token = secrets.token_hex(TOKEN_BYTES // 2)
        self._deadline_s, self._clock = deadline_s, clock
        self._own = meeting.process
        self._is_told = False
        self._server: socket.socket | None = None
        self._stages: Sequence[Stage] = ()
        self._firsts: list[int] = []
        self._senders: dict[int, Sender] = {}
        self._arrivals = Arrivals(deadline_s, clock)
        self._agreement = ""

    @property
    def process_count(self) -> int:
        return self._meeting.process_count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, agreement: str, stages: Sequence[Stage]) -> bool:
        """Open the door to the others, and go to those who need something of this process.

        Args:
            agreement: a digest of all that the division was computed from. Processes that
                restore something else exchange nothing with this one.
            stages: in order.

        Returns:
            Whether there is anything to exchange; if not, everybody reads alone.
        """
        if sum(stage.division.saved_bytes for stage in stages) < EXCHANGE_BYTES_MIN:
            self._tell({})
            return False
        self._stages, self._agreement = stages, agreement
        first, givers, takers = 0, set[int](), set[int]()
        for stage in stages:
            self._firsts.append(first)
            first += len(stage.division.shared)
            for chunk in stage.division.shared:
                if chunk.reader == self._own:
                    takers.update(chunk.needers)
                elif self._own in chunk.needers:
                    givers.add(chunk.reader)
        self._arrivals.chunk_count = first
        try:
            self._server = socket.create_server(
                (self._address, 0), family=_family(self._address), backlog=128
            )
        except OSError:
            # Nobody can come in. The others are told, and read for themselves.
            self._tell({})
            self._arrivals.lose(givers, f"{self._address} cannot be listened at")
        else:
            port = self._server.getsockname()[1]
            self._tell(
                {
                    "address": self._address,
                    "port": port,
                    "token": self._token,
                    "agreement": agreement,
                }
            )
            _start(self._accept, "everstep-exchange")
        takers.discard(self._own)
        for process in sorted(takers):
            sender = Sender(
                process=process,
                connect=self._connect,
                progress=lambda: self._arrivals.progress,
                lost=self._lose,
                deadline_s=self._deadline_s,
            )
            self._senders[process] = sender
            sender.start()
        for process in sorted(givers - takers):
            # Whether it takes part at all; who does not is not waited for.
            _start(partial(self._look_up, process), "everstep-look-up")
        return True

    def stage(
        self, number: int, pieces: Sequence[Piece], targets: Sequence[Target], tree: TreeSpec
    ) -> Passing:
        """Take part in one stage. Stages come in order, each after the one before is done."""
        stage = self._stages[number]
        return Passing(
            own=self._own,
            stage=stage,
            first=self._firsts[number],
            pieces=pieces,
            targets=targets,
            tree=tree,
            senders=self._senders,
            arrivals=self._arrivals,
        )

    def finish(self) -> None:
        """Wait until the others have taken what they get; what they fail to take is theirs."""
        for sender in self._senders.values():
            sender.put(None)
        for sender in self._senders.values():
            sender.join()

    def close(self) -> None:
        """End, whatever was reached: the others notice, and read what they lack."""
        if not self._is_told:
            # If even that cannot be told, they wait as long as they wait for anybody.
            with contextlib.suppress(PeerUnavailable):
                self._tell({})
        for sender in self._senders.values():
            sender.stop()
        if self._server is not None:
            # A thread that waits for the next one to come is woken up by this alone.
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
        self._arrivals.close()

    def _connect(self, process: int) -> Wire:
        """Go to another process.

        Raises:
            PeerUnavailable: it did not say where it is, wants something else, or is gone.
        """
        told = self._told(process)
        name = f"process {process}"
        place = (told["address"], told["port"])
        try:
            connection = socket.create_connection(place, self._deadline_s)
        except OSError as error:
            raise PeerUnavailable(f"{name} at {place[0]}:{place[1]}: {error}") from error
        wire = Wire(connection, f"{name} at {place[0]}:{place[1]}", self._deadline_s, self._clock)
        wire.introduce(self._own, told["token"], self._agreement)
        return wire

    def _look_up(self, process: int) -> None:
        try:
            self._told(process)
        except PeerUnavailable as error:
            self._lose(process, str(error))

    def _told(self, process: int) -> dict[str, Any]:
        try:
            text = self._meeting.get(f"{self._key}/{process}", self._deadline_s)
        except PeerUnavailable as error:
            raise PeerUnavailable(f"process {process} did not say where it is: {error}") from error
        told: dict[str, Any] = json.loads(text)
        if told.get("agreement") != self._agreement:
            raise PeerUnavailable(f"process {process} takes no part in the exchange")
        return told

    def _lose(self, process: int, why: str) -> None:
        """Who cannot be given anything gives nothing either."""
        self._arrivals.lose([process], why)

    def _tell(self, told: dict[str, str | int]) -> None:
        self._is_told = True
        self._meeting.put(f"{self._key}/{self._own}", json.dumps(told))

    def _accept(self) -> None:
        server = self._server
        while server is not None:
            try:
                connection, place = server.accept()
            except OSError:
                return
            wire = Wire(connection, f"{place[0]}:{place[1]}", self._deadline_s, self._clock)
            receive = partial(self._arrivals.receive, wire, self._token, self._agreement)
            _start(receive, "everstep-take")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _start(do: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=do, name=name, daemon=True)
    thread.start()
    return thread
