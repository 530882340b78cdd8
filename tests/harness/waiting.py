"""Waiting for a condition with a deadline; never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 4.0
"""A machine that runs other tests beside takes so much longer. Nothing passes or fails by it."""


def wait_for(
    condition: Callable[[], T | None],
    *,
    what: str,
    timeout_s: float = 20.0,
    look_every_s: float = 0.01,
) -> T:
    """Return the first true value of a condition; fail with `what` at the deadline.

    Args:
        condition: looked at until it is true.
        what: is waited for, in words.
        timeout_s: what it takes at most on a machine that does nothing else.
        look_every_s: between two looks.
    """
    timeout_s *= PATIENCE
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= deadline_s:
            raise AssertionError(f"waited {timeout_s:g} s for {what}; last seen: {found!r}")
        time.sleep(look_every_s)
