from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

API_LIST = Path(__file__).with_name("public_api.txt")
DOOR = importlib.import_module("everstep.runtime")


def exported_names() -> list[str]:
    return list(DOOR.__all__)


def listed_names() -> list[str]:
    lines = API_LIST.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def public_members(exported: type) -> Iterator[tuple[str, object]]:
    for name, member in vars(exported).items():
        is_callable = inspect.isroutine(member) or isinstance(member, property)
        if is_callable and not name.startswith("_"):
            yield name, member


def test_the_exported_names_are_those_on_the_list() -> None:
    assert sorted(exported_names()) == sorted(listed_names()), (
        f"a user sees this change: edit {API_LIST.name} and CHANGELOG.md with it"
    )


def test_no_name_is_exported_twice() -> None:
    assert len(exported_names()) == len(set(exported_names()))


@pytest.mark.parametrize("name", exported_names())
def test_every_exported_name_resolves(name: str) -> None:
    assert getattr(DOOR, name) is not None


def test_completion_offers_every_exported_name() -> None:
    # `dir` of a module with lazily resolved names leaves them out unless it is told of them.
    assert set(exported_names()) <= set(dir(DOOR))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(DOOR, "no_such_name")  # noqa: B009 - a type checker refuses the plain form.


@pytest.mark.parametrize("name", exported_names())
def test_every_exported_name_explains_itself(name: str) -> None:
    exported: object = getattr(DOOR, name)
    if not (inspect.isclass(exported) or inspect.isroutine(exported)):
        return  # A constant has no docstring of its own; its comment is in the module.
    assert inspect.getdoc(exported), f"{name} has no docstring"
    if inspect.isclass(exported):
        silent = [member for member, value in public_members(exported) if not inspect.getdoc(value)]
        assert not silent, f"{name} leaves these unexplained"
