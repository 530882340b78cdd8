"""Collects what is wrong with a job, each problem with its path, what was found, what would do."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from everstep.controller.api.errors import Problem
from everstep.controller.api.shape import describe

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL_LENGTH_MAX = 63
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_PREFIX_LENGTH_MAX = 253
_ANNOTATIONS_BYTES_MAX = 256 << 10
_NAME_RULE = "letters, digits, '-', '_' and '.', the first and last a letter or digit"
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

    def labels(self, path: str, labels: Mapping[str, str]) -> None:
        """As Kubernetes takes them: qualified names, and values of the same characters."""
        for key, value in labels.items():
            self._qualified(f"{path}.{key}", key)
            if value and (len(value) > LABEL_LENGTH_MAX or not _NAME.fullmatch(value)):
                expected = f"nothing, or at most {LABEL_LENGTH_MAX} of {_NAME_RULE}"
                self.add(f"{path}.{key}", value, f"{expected} (it has {len(value)})")

    def annotations(self, path: str, annotations: Mapping[str, str]) -> None:
        """As Kubernetes takes them: qualified names, any text, bounded together."""
        for key in annotations:
            # Their names may be of large letters too in the part before the slash.
            self._qualified(f"{path}.{key}", key.lower())
        size = sum(len(key.encode()) + len(text.encode()) for key, text in annotations.items())
        if size > _ANNOTATIONS_BYTES_MAX:
            expected = f"at most {_ANNOTATIONS_BYTES_MAX} bytes of names and values together"
            self.add(path, f"{size} bytes", expected)

    def _qualified(self, path: str, key: str) -> None:
        prefix, slash, name = key.rpartition("/")
        is_name = len(name) <= LABEL_LENGTH_MAX and _NAME.fullmatch(name)
        is_prefix = not slash or (len(prefix) <= _PREFIX_LENGTH_MAX and _PREFIX.fullmatch(prefix))
        if not (is_name and is_prefix):
            expected = (
                f"a key of at most {LABEL_LENGTH_MAX} of {_NAME_RULE}, perhaps after a DNS name "
                "and one '/'"
            )
            self.add(path, key, expected)
