"""What a restore may do besides giving back what was saved; everything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import claimed, save
from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step
from everstep.runtime.agent.link import Source
from everstep.runtime.engine.state import flatten
from everstep.runtime.errors import ConfigurationError, StateRefused
from everstep.runtime.layout.casts import can_cast
from everstep.runtime.layout.dtypes import STORABLE, numpy_dtype
from everstep.runtime.layout.manifest import Holding
from everstep.runtime.layout.scalars import inline_extra
from everstep.runtime.restore.assemble import restore_state
from everstep.runtime.restore.options import RestoreOptions
from everstep.runtime.storage.open import open_store


def saved_state() -> dict[str, Any]:
    return {
        "params": {
            "layers": [{"kernel": jnp.arange(12.0).reshape(3, 4) / 7, "bias": jnp.ones(4)}],
            "scale": jnp.array([1, -2, 3], jnp.int8),
        },
        "opt": {"mu": jnp.full((3, 4), 2.5), "count": 9},
        "key": jax.random.key(3),
    }


@dataclass(frozen=True, kw_only=True)
class Order:
    storage: Source
    host: HostId
    incarnation: Incarnation
    restore_step: Step | None
    token: str = "t"
    holdings: tuple[Holding, ...] = ()


class Run:
    """One step that was saved."""

    def __init__(self, folder: Path) -> None:
        flat = flatten(saved_state())
        values = {
            index: np.asarray(value)
            for index, value in enumerate(flat.values)
            if flat.tree.leaves[index].is_stored_as_bytes
        }
        store = open_store(str(folder))
        save(store, claimed(store), 5, flat.tree, values, extra=inline_extra(flat.tree))
        self._source = Source(uri=str(folder), step=Step(5))

    def restore(self, like: Any, **options: Any) -> Any:
        given = RestoreOptions.given(**options)
        flat = flatten(like)
        given.check({"": flat.tree})
        order = Order(
            storage=self._source,
            host=HostId(SliceId(0), 0),
            incarnation=Incarnation(2),
            restore_step=Step(5),
        )
        return restore_state(
            flat, None, assignment=order, own_slots={}, memory_bytes=1 << 20, options=given
        ).state


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("options") / "run")


def zeros() -> dict[str, Any]:
    state = saved_state()
    return {
        **jax.tree.map(lambda x: x * 0, {k: state[k] for k in ("params", "opt")}),
        "key": state["key"],
    }


@pytest.mark.parametrize(
    "only", ["params", "['params']", "params*", ["params/layers", "params/scale"], "['params']['*"]
)
def test_a_part_of_the_tree_is_restored_alone(run: Run, only: str | Sequence[str]) -> None:
    found = run.restore({"params": zeros()["params"]}, only=only)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, {"params": saved_state()["params"]}))


def test_leaves_that_were_not_asked_for_stay_as_they_are(run: Run) -> None:
    like = {**zeros(), "mine": jnp.full(2, 5.0), "words": "mine"}
    found = run.restore(like, only="*kernel")
    np.testing.assert_array_equal(
        found["params"]["layers"][0]["kernel"], saved_state()["params"]["layers"][0]["kernel"]
    )
    assert float(found["opt"]["mu"].sum()) == 0
    assert found["mine"] is like["mine"]
    assert found["words"] == "mine"
    assert found["opt"]["count"] == 0


def test_brackets_in_a_pattern_are_no_set_of_letters(run: Run) -> None:
    with pytest.raises(ConfigurationError, match="only"):
        run.restore(zeros(), only="[p]arams")


def test_an_unexpected_leaf_of_the_part_that_was_asked_for_is_named(run: Run) -> None:
    like = {"params": {"layers": zeros()["params"]["layers"]}}
    with pytest.raises(StateRefused) as refused:
        run.restore(like, only="params")
    assert refused.value.field == "['params']['scale']"


def test_a_cast_happens_only_where_it_was_asked_for(run: Run) -> None:
    like = zeros()
    like["params"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), like["params"])
    with pytest.raises(StateRefused) as refused:
        run.restore(like)
    for leaf in ("kernel", "bias", "scale"):
        assert leaf in refused.value.field
    assert "float32[3,4]" in str(refused.value.found)
    assert "bfloat16[3,4]" in refused.value.expected
    with pytest.raises(StateRefused) as refused:
        run.restore(like, cast="*kernel")
    assert "kernel" not in refused.value.field
    found = run.restore(like, cast=True)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), saved_state()["params"])
    assert jax.tree.all(jax.tree.map(np.array_equal, found["params"], expected))
    np.testing.assert_array_equal(found["opt"]["mu"], saved_state()["opt"]["mu"])


def test_a_cast_that_would_change_values_is_refused_though_asked_for(run: Run) -> None:
    like = zeros()
    like["params"]["layers"][0]["bias"] = jnp.zeros(4, jnp.int32)
    with pytest.raises(StateRefused, match="bias"):
        run.restore(like, cast=True)


def test_casts_of_integers_keep_every_value() -> None:
    whole = [n for n in STORABLE if n.lstrip("u").startswith("int") or n == "bool"]
    for saved in whole:
        for wanted in whole:
            if can_cast(saved, wanted) and "int2" not in (saved + wanted) and saved != "bool":
                bits = int(saved.removeprefix("u").removeprefix("int"))
                low = 0 if saved.startswith("u") else -(2 ** (bits - 1))
                high = 2**bits - 1 if saved.startswith("u") else 2 ** (bits - 1) - 1
                for value in (low, high):
                    kept = np.array(value, numpy_dtype(saved)).astype(numpy_dtype(wanted))
                    assert int(kept) == value, (saved, wanted)


def test_renamed_leaves_come_from_their_old_names(run: Run) -> None:
    like = zeros()
    like["params"]["gain"] = like["params"].pop("scale")
    with pytest.raises(StateRefused):
        run.restore(like)
    found = run.restore(like, renamed={"params/gain": "['params']['scale']"})
    np.testing.assert_array_equal(found["params"]["gain"], saved_state()["params"]["scale"])


@pytest.mark.parametrize(
    ("renamed", "words"),
    [
        ({"params/gain": "params/scale"}, "nearest.*params/scale"),
        ({"params/scale": "params/scales"}, "nearest.*scale"),
        ({"params/layers/0/bias": "params/layers/0/kernel"}, "each saved leaf once"),
        ({"params/scale": "opt"}, "the name of a saved leaf"),
    ],
    ids=["unknown here", "unknown there", "doubled", "a container"],
)
def test_a_wrong_renaming_is_refused_with_what_there_is(
    run: Run, renamed: Mapping[str, str], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        run.restore(zeros(), renamed=renamed)


def test_what_was_not_saved_is_made_by_the_users_initialiser_only(run: Run) -> None:
    like = {**zeros(), "new": {"w": jnp.zeros((2, 3), jnp.bfloat16), "n": 0, "none": None}}
    with pytest.raises(StateRefused) as refused:
        run.restore(like)
    for leaf in ("w", "n", "none"):
        assert f"['new']['{leaf}']" in refused.value.field
    asked: list[str] = []

    def make(leaf: Any) -> Any:
        asked.append(leaf.name)
        return 4 if leaf.dtype == "int" else jnp.ones(leaf.shape, leaf.dtype)

    found = run.restore(like, missing=make)
    assert sorted(asked) == ["['new']['n']", "['new']['w']"]
    assert found["new"]["n"] == 4
    assert found["new"]["w"].dtype == jnp.bfloat16
    assert float(found["new"]["w"].sum()) == 6
    assert found["opt"]["count"] == 9


def test_what_the_initialiser_makes_must_be_what_is_wanted(run: Run) -> None:
    like = {**zeros(), "a": jnp.zeros(2), "b": 1, "k": jax.random.key(1)}
    with pytest.raises(StateRefused) as refused:
        run.restore(like, missing=lambda _: jnp.zeros(3))
    for leaf in ("a", "b", "k"):
        assert f"['{leaf}']" in refused.value.field


@pytest.mark.parametrize(
    "option",
    [{"only": 3}, {"only": ()}, {"cast": [1]}, {"renamed": {"a": 1}}, {"missing": 0}],
    ids=str,
)
def test_an_option_of_another_type_is_named(option: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        RestoreOptions.given(**option)


def test_in_a_state_of_parts_names_begin_with_the_part() -> None:
    tree = flatten({"w": jnp.zeros(2), "b": jnp.zeros(2)}).tree
    options = RestoreOptions.given(only="model/w", renamed={"model/w": "model/v"})
    options.check({"model": tree, "optimizer": tree})
    old = flatten({"v": jnp.zeros(2), "b": jnp.zeros(2)}).tree
    found = options.of_part("model").match(old, tree)
    assert [match.saved for match in found] == [None, 1]
    assert all(match.saved is None for match in options.of_part("optimizer").match(tree, tree))
    with pytest.raises(ConfigurationError, match=r"nearest.*model"):
        RestoreOptions.given(only="w").check({"model": tree})
