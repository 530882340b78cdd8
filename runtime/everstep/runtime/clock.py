"""The only reader of time. Everything else gets `now` as an argument or a `Clock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def unix_s(self) -> float:
        """Seconds since 1970, comparable between hosts as far as their clocks agree."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go back; comparable within one machine boot only."""
        ...


class SystemClock:
    def unix_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()
