"""Which dtypes can be cast to which without a value becoming another. Pure.

Rounding is what a cast is for; wrapping around, or losing a sign or a fraction, is not.
"""

from __future__ import annotations

_FLOAT, _COMPLEX, _BOOL, _INT, _UINT = "float", "complex", "bool", "int", "uint"
_WITHOUT_SIGN = ("float8_e8m0fnu",)


def can_cast(saved: str, wanted: str) -> bool:
    """Whether values of one dtype can be asked for in another.

    Floats may be rounded; integers go to floats, and to integers that hold all of their range.
    """
    if saved == wanted:
        return True
    if wanted in _WITHOUT_SIGN:
        return False
    source, target = _family(saved), _family(wanted)
    if target == _COMPLEX:
        return True
    if target == _FLOAT:
        return source != _COMPLEX
    if target == _BOOL or source in (_FLOAT, _COMPLEX):
        return False
    if source == _BOOL:
        return True
    return source in (target, _UINT) and _bits(saved) < _bits(wanted)


def _family(dtype: str) -> str:
    for family in (_COMPLEX, _BOOL, _UINT, _INT):
        if dtype.startswith(family):
            return family
    return _FLOAT


def _bits(dtype: str) -> int:
    return int(dtype.removeprefix("u").removeprefix("int"))
