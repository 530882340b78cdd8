"""The controller's only reader of time and of randomness. The core gets both as arguments."""

from __future__ import annotations

import secrets
import time
import uuid
from typing import Protocol


class Clock(Protocol):
    def unix_s(self) -> float:
        """Seconds since 1970, comparable between processes of one machine."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go back, for waits within one process."""
        ...


class SystemClock:
    def unix_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()


def pause(seconds: float) -> None:
    """Let other processes run for a moment, inside a wait that has a deadline of its own."""
    time.sleep(seconds)


def fresh_token() -> str:
    """Return a bearer token that nobody can guess."""
    return secrets.token_urlsafe(32)


def fresh_uid() -> str:
    """Return an id that no other object has, and none will have."""
    return str(uuid.uuid4())
