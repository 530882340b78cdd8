"""Python scalars as exact text, and how their values travel with a step.

The tree of a state is announced once per incarnation, but a Python scalar in it may change with
every step. Its value of a step therefore travels in the step's `extra`, under `INLINE`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

import msgspec

from everstep.runtime.errors import ManifestCorrupt
from everstep.runtime.layout.tree import LeafKind, TreeSpec

INLINE = "inline"
"""Key of `SnapshotManifest.extra`: a JSON object, leaf index → `Leaf.value`."""

Scalar = bool | int | float | complex | str

_TYPES: dict[type, str] = {t: t.__name__ for t in (bool, int, float, complex, str)}


def scalar_type(value: object) -> str | None:
    """Name of the value's type when it is exactly a Python scalar; a subclass is not one."""
    return _TYPES.get(type(value))


def encode_scalar(value: Scalar) -> str:
    """Write a scalar so that `decode_scalar` returns an equal one of the same type.

    Raises:
        OverflowError: an int with more digits than Python writes as text.
    """
    if isinstance(value, complex):
        return f"{value.real.hex()} {value.imag.hex()}"
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, int):
        try:
            return repr(value)
        except ValueError as error:
            raise OverflowError(str(error)) from error
    # `ascii` writes lone surrogates as escapes, which JSON text could not carry.
    return ascii(value)


def decode_scalar(type_name: str, text: str) -> Scalar:
    """Read what `encode_scalar` wrote.

    Raises:
        ManifestCorrupt: the text is not of that type.
    """
    try:
        if type_name == "bool" and text in ("True", "False"):
            return text == "True"
        if type_name == "int":
            return int(text)
        if type_name == "float":
            return float.fromhex(text)
        if type_name == "complex":
            real, imag = text.split(" ")
            return complex(float.fromhex(real), float.fromhex(imag))
        if type_name == "str":
            found: object = ast.literal_eval(text)
            if isinstance(found, str):
                return found
    except (ValueError, SyntaxError) as error:
        raise ManifestCorrupt("inline value", type_name, type_name, text[:80]) from error
    raise ManifestCorrupt("inline value", type_name, type_name, text[:80])


def inline_extra(tree: TreeSpec) -> dict[str, str]:
    """The values of all scalar leaves as an entry for `extra`; empty when there are none."""
    values = {
        str(index): leaf.value
        for index, leaf in enumerate(tree.leaves)
        if leaf.kind is LeafKind.SCALAR and leaf.value is not None
    }
    return {INLINE: msgspec.json.encode(values).decode()} if values else {}


def inline_values(tree: TreeSpec, extra: Mapping[str, str]) -> dict[int, Scalar]:
    """Values of the scalar leaves of a saved step: from `extra`, else those in the tree.

    Raises:
        ManifestCorrupt: a value is missing or does not read as its type.
    """
    try:
        texts = msgspec.json.decode(extra.get(INLINE, "{}"), type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ManifestCorrupt("inline values", INLINE, "a JSON object", str(error)) from error
    values: dict[int, Scalar] = {}
    for index, leaf in enumerate(tree.leaves):
        if leaf.kind is not LeafKind.SCALAR:
            continue
        text = texts.get(str(index), leaf.value)
        if text is None:
            raise ManifestCorrupt("inline values", leaf.name, leaf.dtype, "nothing")
        values[index] = decode_scalar(leaf.dtype, text)
    return values


def with_values(tree: TreeSpec, extra: Mapping[str, str]) -> TreeSpec:
    """The tree of a saved step with that step's own values of Python scalars.

    Raises:
        ManifestCorrupt: as `inline_values`.
    """
    values = inline_values(tree, extra)
    return TreeSpec(
        leaves=tuple(
            msgspec.structs.replace(leaf, value=encode_scalar(values[index]))
            if index in values
            else leaf
            for index, leaf in enumerate(tree.leaves)
        )
    )
