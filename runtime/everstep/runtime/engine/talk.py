"""Facts and refusals between the processes of one program, each wait with a deadline."""

from __future__ import annotations

import json
from typing import Any

from everstep.runtime.clock import Clock
from everstep.runtime.engine.channel import Channel
from everstep.runtime.errors import PeerUnavailable

_LEAST_S = 0.1
"""A wait whose deadline has passed still looks once whether the word is there."""


class PeerFailed(PeerUnavailable):
    """Another process says that it could not do its part."""


class Talk:
    """JSON over a `Channel`. Alone, nothing is said."""

    def __init__(self, channel: Channel, clock: Clock) -> None:
        self._channel, self._clock = channel, clock
        self.process = channel.process
        self.count = channel.process_count

    @property
    def leads(self) -> bool:
        return self.process == 0

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(p for p in range(self.count) if p != self.process)

    def deadline(self, seconds: float) -> float:
        return self._clock.monotonic_s() + seconds

    def tell(self, key: str, **fields: Any) -> None:
        """Say something, once."""
        if self.count > 1:
            self._channel.put(key, json.dumps(fields))

    def refuse(self, key: str, why: BaseException) -> None:
        """Say that this process could not do its part. Never fails: the error at hand counts."""
        try:
            self.tell(key, error=f"{type(why).__name__}: {why}")
        except PeerUnavailable:
            return

    def hear(self, key: str, by_s: float, otherwise: str) -> dict[str, Any]:
        """What was said under a key.

        Args:
            key: of what is waited for.
            by_s: until when, on the monotonic clock.
            otherwise: what it means when nothing comes, for the message.

        Raises:
            PeerFailed: the other has refused; with its words.
            PeerUnavailable: nothing came in time.
        """
        left_s = max(_LEAST_S, by_s - self._clock.monotonic_s())
        try:
            told: dict[str, Any] = json.loads(self._channel.get(key, left_s))
        except PeerUnavailable as error:
            raise PeerUnavailable(f"{otherwise} ({error})") from error
        if "error" in told:
            raise PeerFailed(f"{otherwise}: {told['error']}")
        return told

    def forget(self, key: str) -> None:
        if self.count > 1:
            self._channel.forget(key)
