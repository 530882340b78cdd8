"""The metrics of the last steps, travelling with every step that is held.

Metrics are recorded by rank 0 alone. When it is lost in a step that others have finished and hold,
the training goes on after that step, and nobody would make its metrics again. So they are a part
of what is held, and whoever restores it tells them once more: a later line of a step wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

RECENT = "recent-metrics"
"""Key of `SnapshotManifest.extra`."""
RECENT_STEPS = 64
"""More steps than an agent ever is behind its worker by, when nothing is wrong."""

Line = tuple[int, tuple[float, ...]]
"""A step, and its values in the order of their names."""


class Recent(msgspec.Struct, frozen=True, kw_only=True):
    names: tuple[str, ...]
    lines: tuple[tuple[int, tuple[str, ...]], ...]
    """Values in hexadecimal: exact, and also for what is no number."""


def recent_extra(names: tuple[str, ...], lines: Iterable[Line]) -> dict[str, str]:
    """The lines as an entry for `extra`; empty when there are none."""
    told = tuple((step, tuple(value.hex() for value in values)) for step, values in lines)
    if not told:
        return {}
    return {RECENT: msgspec.json.encode(Recent(names=names, lines=told)).decode()}


def recent_lines(extra: Mapping[str, str], names: tuple[str, ...]) -> tuple[Line, ...]:
    """The lines that came with a step, if they have these names; a program may have other ones.

    What cannot be read counts as none: the state is worth more than its metrics.
    """
    try:
        found = msgspec.json.decode(extra.get(RECENT, "null"), type=Recent | None)
        if found is None or found.names != names:
            return ()
        return tuple((step, tuple(map(float.fromhex, values))) for step, values in found.lines)
    except (msgspec.DecodeError, ValueError, OverflowError):
        return ()
