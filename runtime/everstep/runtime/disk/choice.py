"""Which local copies stay, and which must go to make room. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.controller.api.ids import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A folder of one owner's local tier."""

    name: str
    number: int | None
    """Counts the owner's copies; None for a folder that is no copy at all."""
    step: Step | None
    """None: torn, damaged, or of another run."""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is deleted before a copy is written, and what is missing even then."""

    removed: tuple[str, ...]
    missing_bytes: int


def next_number(found: Sequence[Found]) -> int:
    """The number of the next copy: none was ever used for another one."""
    return max((one.number for one in found if one.number is not None), default=0) + 1


def choose_removed(found: Sequence[Found], *, latest: int) -> tuple[str, ...]:
    """What goes after a copy was written: all but the last `latest` that are whole.

    By number, not by step: a run that went back to an older step goes on from there.
    """
    return tuple(one.name for one in found if one not in _whole(found)[:latest])


def choose_room(
    found: Sequence[Found], *, wanted_bytes: int, free_bytes: int, step_durable: Step | None
) -> Room:
    """What goes before a copy is written, so that it fits.

    What is no whole copy goes in any case. Whole ones go only where they must, oldest first, and
    only when durable storage has their step or a later one.
    """
    whole = _whole(found)
    removed = [one for one in found if one not in whole]
    free = free_bytes
    for one in reversed(whole):
        if free >= wanted_bytes:
            break
        if step_durable is not None and one.step is not None and one.step <= step_durable:
            removed.append(one)
            free += one.size_bytes
    return Room(
        removed=tuple(one.name for one in removed), missing_bytes=max(wanted_bytes - free, 0)
    )


def is_left_behind(found: Sequence[Found], *, step_durable: Step | None) -> bool:
    """Whether the copies of an owner that is gone are of no more use to anybody."""
    return all(
        one.step is None or (step_durable is not None and one.step <= step_durable) for one in found
    )


def _whole(found: Sequence[Found]) -> list[Found]:
    """Newest first."""
    whole = [one for one in found if one.number is not None and one.step is not None]
    return sorted(whole, key=lambda one: -(one.number or 0))
