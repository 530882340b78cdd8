"""Quantities as in Kubernetes: `512Mi`, `16Gi`, `1.5G`, `2e9`."""

from __future__ import annotations

import re
from fractions import Fraction

_SYNTAX = re.compile(
    r"(?P<number>[0-9]+(\.[0-9]*)?|\.[0-9]+)(?P<suffix>m|k|[MGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3})?"
)
_FACTORS = {
    "m": Fraction(1, 1000),
    "": Fraction(1),
    "k": Fraction(10**3),
    **{name: Fraction(10 ** (3 * power)) for power, name in enumerate("MGTPE", start=2)},
    **{f"{name}i": Fraction(1 << (10 * power)) for power, name in enumerate("KMGTPE", start=1)},
}


def parse_quantity(text: str) -> Fraction | None:
    """Return the exact value, or None where the text is not a quantity. Signs are not taken."""
    found = _SYNTAX.fullmatch(text)
    if found is None:
        return None
    number, suffix = Fraction(found["number"]), found["suffix"] or ""
    if suffix[:1] in ("e", "E") and len(suffix) > 1 and suffix != "Ei":
        return number * Fraction(10) ** int(suffix[1:])
    return number * _FACTORS[suffix]


def parse_bytes(text: str) -> int | None:
    """Return whole bytes, rounded up as Kubernetes does; None where it is not a quantity."""
    value = parse_quantity(text)
    return None if value is None else -(-value.numerator // value.denominator)
