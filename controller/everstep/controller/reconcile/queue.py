"""Which job is looked at next. Pure: time comes as an argument, nothing happens here.

A key is there once, however often it was added. A key that failed comes back later each time, up
to a bound; one that succeeded starts over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

V = TypeVar("V")


def _no_time() -> Mapping[str, float]:
    return MappingProxyType({})


def _no_count() -> Mapping[str, int]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    first_s: float = 0.005
    factor: float = 2.0
    max_s: float = 30.0

    def delay_s(self, failures: int) -> float:
        """Return how long a key waits after this many failures in a row (1 or more)."""
        # The exponent is bounded, so that a key that failed for a year does not overflow.
        return min(self.first_s * self.factor ** min(failures - 1, 64), self.max_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Keys and when each is due.

    Invariants: (1) a key has one due time at most; (2) adding never makes it later; (3) every key
    that was added is taken after its due time, unless forgotten.
    """

    due: Mapping[str, float] = field(default_factory=_no_time)
    failures: Mapping[str, int] = field(default_factory=_no_count)
    backoff: Backoff = Backoff()

    def add(self, key: str, at_s: float) -> Queue:
        """Make a key due at this moment, or leave it due earlier."""
        if key in self.due and self.due[key] <= at_s:
            return self
        return replace(self, due=_with(self.due, key, at_s))

    def take(self, now_s: float) -> tuple[Queue, str | None]:
        """Take the key that has been due longest, if any is; of equals the first by name."""
        ready = [(at_s, key) for key, at_s in self.due.items() if at_s <= now_s]
        if not ready:
            return self, None
        _, key = min(ready)
        return replace(self, due=_without(self.due, key)), key

    def succeed(self, key: str) -> Queue:
        """Forget the failures of a key."""
        if key not in self.failures:
            return self
        return replace(self, failures=_without(self.failures, key))

    def fail(self, key: str, now_s: float) -> Queue:
        """Bring a key back after a delay that grows with each failure in a row."""
        count = self.failures.get(key, 0) + 1
        at_s = now_s + self.backoff.delay_s(count)
        failures = _with(self.failures, key, count)
        return replace(self, failures=failures).add(key, at_s)

    def forget(self, key: str) -> Queue:
        """Drop a key and its failures: its job does not exist any more."""
        return replace(self, due=_without(self.due, key), failures=_without(self.failures, key))

    def next_due_s(self) -> float | None:
        """Return when the next key is due, or None when the queue is empty."""
        return min(self.due.values(), default=None)


def _with(table: Mapping[str, V], key: str, value: V) -> Mapping[str, V]:
    return MappingProxyType({**table, key: value})


def _without(table: Mapping[str, V], key: str) -> Mapping[str, V]:
    return MappingProxyType({k: v for k, v in table.items() if k != key})
