"""Compares plain data with a type and finds every difference, not only the first.

msgspec stops at the first error and names it in Python's words. People fix a file once, so here the
whole document is walked: unknown fields (with the nearest known name), missing ones, wrong kinds,
names outside a closed set. What passes is safe to hand to `msgspec.convert`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import inspect

from everstep.controller.api.errors import Problem

_FOUND_LENGTH_MAX = 80


def describe(value: object) -> str:
    """Name a value as its author would recognise it."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            text = value if len(value) <= _FOUND_LENGTH_MAX else value[:_FOUND_LENGTH_MAX] + "…"
            return f"the text {text!r}"
        case int() | float():
            return f"the number {value}"
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return f"a list of {len(cast('Sequence[object]', value))}"
        case _:
            return f"a value of type {type(value).__name__}"


def fit(kind: type[msgspec.Struct], value: object, path: str = "") -> tuple[Any, list[Problem]]:
    """Return the value with what means "not given" left out, and all that does not fit.

    A `null` in a field that has a default means the default, as in Kubernetes.
    """
    problems: list[Problem] = []
    return _fit(inspect.type_info(kind), value, path, problems), problems


def _fit(kind: inspect.Type, value: object, path: str, problems: list[Problem]) -> Any:
    if isinstance(kind, inspect.Metadata):
        kind = kind.type
    match kind:
        case inspect.StructType():
            return _fit_struct(kind, value, path, problems)
        case inspect.UnionType():
            return _fit_union(kind, value, path, problems)
        case inspect.VarTupleType() | inspect.ListType():
            if not isinstance(value, (list, tuple)):
                return _refuse(problems, path, value, "a list")
            items = cast("Sequence[object]", value)
            return [
                _fit(kind.item_type, item, f"{path}[{index}]", problems)
                for index, item in enumerate(items)
            ]
        case inspect.DictType():
            return _fit_mapping(kind, value, path, problems)
        case inspect.EnumType():
            names = [str(member.value) for member in kind.cls]
            if value not in names:
                return _refuse(problems, path, value, _one_of(names, value))
            return value
        case inspect.AnyType():
            return value
        case _:
            if not _is_plain(kind, value):
                return _refuse(problems, path, value, _words(kind, value))
            return value


def _fit_struct(kind: inspect.StructType, value: object, path: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        return _refuse(problems, path, value, "a mapping")
    given = cast("Mapping[object, object]", value)
    known = {field.encode_name: field for field in kind.fields}
    fitted: dict[str, Any] = {}
    for name, item in given.items():
        where = f"{path}.{name}" if path else str(name)
        field = known.get(name) if isinstance(name, str) else None
        if field is None:
            expected = _nearest(str(name), tuple(known))
            problems.append(Problem(path=where, found="an unknown field", expected=expected))
        elif item is None and not field.required:
            continue
        else:
            fitted[field.encode_name] = _fit(field.type, item, where, problems)
    for name, field in known.items():
        if field.required and name not in given:
            where = f"{path}.{name}" if path else name
            expected = _words(field.type, None)
            problems.append(Problem(path=where, found="nothing", expected=expected))
    return fitted


def _fit_mapping(kind: inspect.DictType, value: object, path: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        return _refuse(problems, path, value, "a mapping")
    fitted: dict[str, Any] = {}
    for name, item in cast("Mapping[object, object]", value).items():
        where = f"{path}.{name}"
        if not isinstance(name, str):
            _refuse(problems, where, name, "a key that is text: put it in quotes")
            continue
        fitted[name] = _fit(kind.value_type, item, where, problems)
    return fitted


def _fit_union(kind: inspect.UnionType, value: object, path: str, problems: list[Problem]) -> Any:
    for choice in kind.types:
        attempt: list[Problem] = []
        fitted = _fit(choice, value, path, attempt)
        if not attempt:
            return fitted
    real = [choice for choice in kind.types if not isinstance(choice, inspect.NoneType)]
    if len(real) == 1:
        return _fit(real[0], value, path, problems)
    expected = " or ".join(_words(choice, None) for choice in real)
    return _refuse(problems, path, value, expected)


def _is_plain(kind: inspect.Type, value: object) -> bool:
    match kind:
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.IntType():
            return isinstance(value, int) and not isinstance(value, bool)
        case inspect.FloatType():
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case inspect.StrType():
            return isinstance(value, str)
        case inspect.NoneType():
            return value is None
        case _:
            return False


def _words(kind: inspect.Type, value: object) -> str:
    match kind:
        case inspect.StructType():
            required = [field.encode_name for field in kind.fields if field.required]
            return f"a mapping with {', '.join(required)}" if required else "a mapping"
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number"
        case inspect.FloatType():
            return "a number"
        case inspect.StrType():
            if isinstance(value, (int, float)):
                return "text: put it in quotes"
            return "text"
        case inspect.VarTupleType() | inspect.ListType():
            return "a list"
        case inspect.EnumType():
            return _one_of([str(member.value) for member in kind.cls], value)
        case inspect.UnionType():
            real = [choice for choice in kind.types if not isinstance(choice, inspect.NoneType)]
            return " or ".join(_words(choice, value) for choice in real)
        case _:
            return "a mapping"


def _one_of(names: Sequence[str], value: object) -> str:
    listed = "one of " + ", ".join(names)
    near = difflib.get_close_matches(str(value), names, n=1)
    return f"{listed}; did you mean {near[0]}?" if near else listed


def _nearest(name: str, known: tuple[str, ...]) -> str:
    lowered = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower().replace("_", ""), lowered, n=1, cutoff=0.5)
    if near:
        return f"{lowered[near[0]]}, the nearest known name"
    return "one of " + ", ".join(sorted(known))


def _refuse(problems: list[Problem], path: str, value: object, expected: str) -> None:
    problems.append(Problem(path=path, found=describe(value), expected=expected))
