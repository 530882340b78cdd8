"""Python scalars come back equal, and of their own type."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.runtime.errors import ManifestCorrupt
from everstep.runtime.layout.scalars import (
    INLINE,
    Scalar,
    decode_scalar,
    encode_scalar,
    inline_extra,
    inline_values,
    scalar_type,
)
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec

scalars = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(exclude_categories=[])),
)


@given(scalars)
def test_every_scalar_comes_back_as_it_was(value: Scalar) -> None:
    name = scalar_type(value)
    assert name is not None
    text = encode_scalar(value)
    text.encode("utf-8")
    found = decode_scalar(name, text)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_a_nan_is_a_nan() -> None:
    found = decode_scalar("float", encode_scalar(math.nan))
    assert isinstance(found, float)
    assert math.isnan(found)


def test_a_subclass_is_no_scalar() -> None:
    class Celsius(float):
        pass

    assert scalar_type(Celsius(1.0)) is None
    assert scalar_type(b"x") is None


@pytest.mark.parametrize(
    ("name", "text"),
    [("bool", "1"), ("int", "x"), ("float", ""), ("complex", "1"), ("str", "1"), ("list", "[]")],
)
def test_what_is_not_of_its_type_is_refused(name: str, text: str) -> None:
    with pytest.raises(ManifestCorrupt):
        decode_scalar(name, text)


def test_values_of_the_step_win_over_those_of_the_tree() -> None:
    def tree(value: int) -> TreeSpec:
        leaf = Leaf(
            path=(Key(KeyKind.DICT, "n"),), kind=LeafKind.SCALAR, dtype="int", value=repr(value)
        )
        return TreeSpec(leaves=(Leaf(path=(), kind=LeafKind.NONE), leaf))

    assert inline_values(tree(1), inline_extra(tree(2))) == {1: 2}
    assert inline_values(tree(1), {}) == {1: 1}
    assert inline_extra(TreeSpec(leaves=())) == {}
    with pytest.raises(ManifestCorrupt):
        inline_values(tree(1), {INLINE: "no json"})
