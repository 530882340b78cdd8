"""Collects what is wrong with a job, each problem with its path, what was found, what would do."""

from __future__ import annotations

import math
import re

from everstep.controller.api.errors import Problem
from everstep.controller.api.shape import describe

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL_LENGTH_MAX = 63
_COUNT_MAX = 2**31 - 1
SECONDS_MAX = 10 * 365 * 86400.0
"""Ten years. A larger number is a slip of units, and would overflow somebody's timer."""


class Problems:
    """Collects problems; each method is one kind of rule."""

    def __init__(self) -> None:
        self.items: list[Problem] = []

    def add(self, path: str, value: object, expected: str) -> None:
        self.items.append(Problem(path=path, found=describe(value), expected=expected))

    def equal(self, path: str, value: object, expected: str) -> None:
        if value != expected:
            self.add(path, value, repr(expected))

    def count(
        self, path: str, value: int | None, *, least: int = 1, most: int = _COUNT_MAX
    ) -> bool:
        """A whole number within bounds. None is "not given" and always fits."""
        if value is None or least <= value <= most:
            return True
        bound = f"at least {least}" if most == _COUNT_MAX else f"{least} to {most}"
        self.add(path, value, f"a whole number, {bound}")
        return False

    def seconds(self, path: str, value: float | None, *, may_be_zero: bool = False) -> bool:
        if value is None:
            return True
        low = value >= 0 if may_be_zero else value > 0
        if math.isfinite(value) and low and value <= SECONDS_MAX:
            return True
        bound = "0 or more" if may_be_zero else "more than 0"
        self.add(path, value, f"seconds, {bound} and at most {SECONDS_MAX:.0f}")
        return False

    def label(self, path: str, value: str, length_max: int) -> None:
        """A part of a name that children carry."""
        if len(value) > length_max:
            expected = (
                f"at most {length_max} characters, because the names of children grow from it"
            )
            self.add(path, value, f"{expected} (it has {len(value)})")
        elif not _LABEL.fullmatch(value):
            self.add(path, value, "a DNS label: small letters, digits and '-', not first or last")
