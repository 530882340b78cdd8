"""What the core must remember because it cannot be observed. Stored in the job's status."""

from __future__ import annotations

import msgspec

from everstep.controller.api.ids import Incarnation, SliceId


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Everything has a default, so that an absent ledger is the ledger of a new job."""

    incarnation: Incarnation = Incarnation(0)
    members: tuple[SliceId, ...] = ()
    """Slices of `incarnation`, in rank order."""
