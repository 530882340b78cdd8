"""States are taken apart and put together; what cannot be stored is refused by name."""

from __future__ import annotations

import datetime as dt
import enum
import gc
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from everstep.runtime.engine.state import flatten, reflatten, unflatten
from everstep.runtime.errors import StateRefused
from everstep.runtime.layout.tree import KeyKind, LeafKind


class Empty(NamedTuple):
    pass


class Moments(NamedTuple):
    count: Any
    mu: Any


@jax.tree_util.register_dataclass
@dataclass
class Params:
    kernel: Any
    bias: Any


class Bag(dict[str, Any]):
    """A custom container of which jax knows children by position only."""


def bag_of(keys: Any, values: Any) -> Bag:
    return Bag(zip(keys, values, strict=True))


def children_of(bag: Bag) -> tuple[Any, Any]:
    return tuple(bag.values()), tuple(bag)


jax.tree_util.register_pytree_node(Bag, children_of, bag_of)


def names(state: Any) -> list[str]:
    return [leaf.name for leaf in flatten(state).tree.leaves]


def kinds(state: Any) -> list[LeafKind]:
    return [leaf.kind for leaf in flatten(state).tree.leaves]


STATES: dict[str, Any] = {
    "nested": {"a": [1, (2.5, "x")], "b": {"c": jnp.ones((2,))}},
    "keys with separators": {"a/b": {"": 1}, "..": 2, "a.b": 3, "é": 4, "e\u0301": 5, "A": 6},
    "numbers as keys": {0: 1, 10: 2, 2: 3},
    "named tuple": (Moments(1, jnp.zeros((3,))), Empty(), None),
    "dataclass": Params(jnp.ones((2, 2)), None),
    "custom node": {"full": Bag(x=1, y=2), "bare": Bag()},
    "empties": [None, {}, [], (), Empty(), {"a": {}, "b": []}],
    "only None": None,
    "only an empty dict": {},
    "a bare zero": jnp.zeros(()),
    "a bare False": False,
    "zero size": np.zeros((3, 0, 2), np.float32),
    "numpy": [np.float64(1.5), np.bool_(True), np.arange(3)],
    "deep": {"a": {"a": {"a": {"a": {"a": {"a": [0, {"a": 1}]}}}}}},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_a_state_is_put_together_as_it_was(state: Any) -> None:
    flat = flatten(state)
    found = unflatten(flat, flat.values)
    structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(state)]
    assert structures[0] == structures[1]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert type(a) is type(b)
        np.testing.assert_array_equal(a, b)
    assert len(set(names(state))) == len(flat.tree.leaves) == len(flat.values)
    again = reflatten(state, flat)
    assert again.tree == flat.tree


def test_leaves_are_named_as_people_would_write_them() -> None:
    state = {"opt": (Moments(1, [2]),), "p": Params(3, {7: 4, 8: None})}
    assert names(state) == [
        "['opt'][0].count",
        "['opt'][0].mu[0]",
        "['p'].kernel",
        "['p'].bias[7]",
        "['p'].bias[8]",
    ]
    assert names(5) == ["<root>"]


def test_kinds_and_positions_of_what_holds_nothing_are_kept() -> None:
    assert kinds([None, {}, (), Empty(), Bag(), 1]) == [
        LeafKind.NONE,
        *[LeafKind.EMPTY] * 4,
        LeafKind.SCALAR,
    ]


def test_text_and_number_as_keys_stay_apart() -> None:
    (text,) = flatten({"0": 1}).tree.leaves
    (number,) = flatten({0: 1}).tree.leaves
    assert (text.path[0].kind, number.path[0].kind) == (KeyKind.DICT, KeyKind.DICT_INT)
    assert text.name != number.name


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_are_stored_as_their_data_and_come_back_typed(impl: str) -> None:
    keys = jax.random.split(jax.random.key(5, impl=impl), 3)
    flat = flatten({"k": keys})
    (leaf,) = flat.tree.leaves
    assert (leaf.kind, leaf.dtype, leaf.impl) == (LeafKind.PRNG_KEY, "uint32", impl)
    found: Any = unflatten(flat, flat.values)
    assert found["k"].dtype == keys.dtype
    np.testing.assert_array_equal(
        jax.random.uniform(found["k"][1], (4,)), jax.random.uniform(keys[1], (4,))
    )
    shapes = flatten(jax.eval_shape(lambda: {"k": keys}))
    assert shapes.tree == flat.tree


def test_an_abstract_state_has_the_tree_of_the_concrete_one() -> None:
    def init() -> Any:
        return {"a": jnp.ones((3, 2), jnp.bfloat16), "k": jax.random.key(0), "none": None}

    assert flatten(jax.eval_shape(init)).tree.fingerprint == flatten(init()).tree.fingerprint


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"x", "bytes"),
        (Path("/"), "Path"),
        (Color.RED, "Color"),
        (dt.date(2026, 1, 1), "date"),
        (object(), "object"),
        ({1, 2}, "set"),
        (np.array(["x"]), "<U1"),
        (np.array([None]), "object"),
        (np.zeros(2, ">f4"), "byte order"),
        (np.ma.masked_array([1]), "masked"),
        (np.zeros(2, [("a", "i4")]), "'a'"),
        (10**5000, "digits"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(StateRefused, match=r"numeric dtype") as caught:
        flatten({"good": 1, "bad": [0, value]})
    assert caught.value.field == "['bad'][1]"
    assert words in str(caught.value)


@pytest.mark.parametrize("key", [True, 1.5, (1,), Color.RED], ids=repr)
def test_a_key_that_would_come_back_as_another_is_refused(key: Any) -> None:
    with pytest.raises(StateRefused, match="dict key"):
        flatten({"a": {key: 1}})


def test_keys_that_do_not_sort_are_refused() -> None:
    with pytest.raises(StateRefused, match="keys of one type"):
        flatten({0: 1, "0": 2})


def test_all_bad_leaves_are_named_at_once() -> None:
    with pytest.raises(StateRefused) as caught:
        flatten({"a": b"", "b": 1, "c": object()})
    assert "['a']" in caught.value.field
    assert "['c']" in caught.value.field
    assert "['b']" not in caught.value.field


def test_a_donated_array_is_refused_by_name() -> None:
    array = jnp.ones((3,))
    array.delete()
    with pytest.raises(StateRefused, match="donated") as caught:
        flatten({"x": array})
    assert caught.value.field == "['x']"


def test_a_state_inside_a_trace_is_refused() -> None:
    def step(x: jax.Array) -> jax.Array:
        flatten({"x": x})
        return x

    with pytest.raises(StateRefused, match="traced"):
        jax.jit(step)(jnp.ones(()))


BEFORE = {"a": jnp.ones((3,)), "n": 1, "h": np.ones(2), "none": None, "t": [1, 2]}


@pytest.mark.parametrize(
    ("change", "leaf", "words"),
    [
        ({"a": jnp.ones((4,))}, "['a']", "float32[3]"),
        ({"a": jnp.ones((3,), jnp.int32)}, "['a']", "int32[3]"),
        ({"a": np.ones(3, np.float32)}, "['a']", "numpy float32[3]"),
        ({"n": 1.0}, "['n']", "a Python float"),
        ({"h": np.ones(3)}, "['h']", "float64[2]"),
        ({"none": 1}, "['none']", "None"),
        ({"new": 1}, "['new']", "nothing"),
        ({"t": [1]}, "['t'][1]", "nothing"),
        ({"t": (1, 2)}, "state", "structure"),
    ],
)
def test_a_tree_that_changed_between_saves_is_refused_by_name(
    change: dict[str, Any], leaf: str, words: str
) -> None:
    with pytest.raises(StateRefused) as caught:
        reflatten({**BEFORE, **change}, flatten(BEFORE))
    assert caught.value.field == leaf
    assert words in str(caught.value)


def test_what_is_kept_between_saves_holds_on_to_no_array() -> None:
    state = {"a": jnp.ones((3,)), "n": 1, "none": None}
    kept = flatten(state).without_values()
    array = weakref.ref(state["a"])
    del state
    gc.collect()
    assert array() is None
    later = {"a": jnp.zeros((3,)), "n": 2, "none": None}
    assert reflatten(later, kept).tree == flatten(later).tree


def test_a_plain_value_may_change_between_saves() -> None:
    before = flatten(BEFORE)
    now = reflatten({**BEFORE, "n": 2**70, "t": [5, 6]}, before)
    values = {leaf.name: leaf.value for leaf in now.tree.leaves}
    assert values["['n']"] == str(2**70)
    assert values["['t'][1]"] == "6"
    assert now.tree.fingerprint == before.tree.fingerprint
    assert reflatten(BEFORE, before).tree is before.tree
