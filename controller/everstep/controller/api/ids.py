"""Identities that must not be confused with each other, or with plain numbers."""

from __future__ import annotations

from typing import NewType

import msgspec

SliceId = NewType("SliceId", int)
"""Stable number of a slice in `[0, slices.max)`. It does not change when other slices leave."""

Rank = NewType("Rank", int)
"""Dense number of a member slice or of a process within one incarnation."""

Incarnation = NewType("Incarnation", int)
"""Number of a gang start. It only grows; it is the fencing token (G6). 0 means none yet."""

Step = NewType("Step", int)
"""One optimiser step. State "at step s" is the state after s finished steps; 0 is fresh."""


class HostId(msgspec.Struct, frozen=True, order=True):
    """One host of one slice, stable across incarnations."""

    slice: SliceId
    host: int

    def __str__(self) -> str:
        return f"{self.slice}/{self.host}"
