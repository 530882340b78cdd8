"""A clock that moves when it is told to."""

from __future__ import annotations

from everstep.runtime.errors import ConfigurationError


class ManualClock:
    """Implements `Clock`. Both readings move together."""

    def __init__(self, *, unix_s: float = 1_700_000_000.0, monotonic_s: float = 1000.0) -> None:
        self._unix_s = unix_s
        self._monotonic_s = monotonic_s

    def unix_s(self) -> float:
        """Seconds since 1970, as set."""
        return self._unix_s

    def monotonic_s(self) -> float:
        """Seconds of no meaning but their difference."""
        return self._monotonic_s

    def advance(self, seconds: float) -> None:
        """Let time pass. It cannot go back."""
        if seconds < 0:
            raise ConfigurationError("seconds", seconds, "0 or more: time does not go back")
        self._unix_s += seconds
        self._monotonic_s += seconds
