"""The exchange of one restore between the processes of a program."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from everstep.runtime.clock import Clock, SystemClock
from everstep.runtime.engine.channel import own_address
from everstep.runtime.engine.talk import Talk
from everstep.runtime.restore.exchange import Exchange

SILENCE_S = 60.0
"""So long another process may be silent in an exchange before what it owes is read by oneself."""


class _TalkMeeting:
    """`restore.exchange.Meeting` over what the processes talk over anyway."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.process = talk.process
        self.process_count = talk.count

    def put(self, key: str, value: str) -> None:
        self._talk.tell(key, door=value)

    def get(self, key: str, timeout_s: float) -> str:
        process = key.rpartition("/")[2]
        by_s = self._talk.deadline(timeout_s)
        told = self._talk.hear(key, by_s, f"process {process} does not exchange")
        return str(told["door"])


@contextlib.contextmanager
def exchanging(
    talk: Talk,
    key: str,
    deadline_s: float,
    *,
    address: str | None = None,
    clock: Clock | None = None,
) -> Generator[Exchange | None]:
    """An exchange for one restore of one part; None where there is one process.

    Args:
        talk: with the other processes.
        key: of the part in this restore, never used before.
        deadline_s: of any wait for another process.
        address: at which the others reach this process, where that is known.
        clock: another one for tests.
    """
    if talk.count == 1:
        yield None
        return
    with Exchange(
        _TalkMeeting(talk),
        key=f"{key}/door",
        address=address or own_address(),
        deadline_s=min(deadline_s, SILENCE_S),
        clock=clock or SystemClock(),
    ) as exchange:
        yield exchange
