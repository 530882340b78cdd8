"""What every `Keeper` that outlives its incarnation does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from everstep.controller.api.ids import Step
from everstep.runtime.clock import SystemClock
from everstep.runtime.errors import StateRefused
from everstep.runtime.loop.folder import FolderKeeper
from everstep.runtime.loop.keeper import Keeper
from everstep.runtime.testing.memory_keeper import MemoryKeeper

Successor = Callable[[], Keeper]
"""The keeper of the next incarnation over the same steps."""


@pytest.fixture(params=["memory", "folder"])
def successor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Successor]:
    memory = MemoryKeeper()
    made: list[Keeper] = []

    def follow() -> Keeper:
        if made:
            made[-1].close()
        keeper: Keeper = memory
        if request.param == "folder":
            keeper = FolderKeeper(str(tmp_path / "run"), SystemClock())
        made.append(keeper)
        return keeper

    yield follow
    made[-1].close()


def fresh() -> dict[str, Any]:
    return {
        "w": jnp.arange(6.0).reshape(2, 3),
        "half": jnp.full((5,), 1 / 3, jnp.bfloat16),
        "key": jax.random.key(3),
        "count": 7,
        "name": "run",
        "none": None,
        "host": np.array([1.5, float("nan"), -0.0]),
    }


def restore(keeper: Keeper) -> tuple[Any, Step | None]:
    here = SingleDeviceSharding(jax.devices()[0])
    state = fresh()
    leaves = jax.tree.leaves(state)
    shardings = [here if isinstance(leaf, jax.Array) else None for leaf in leaves]
    return keeper.restore(state, shardings, fresh)


def bits(state: Any) -> list[bytes | object]:
    def of(leaf: Any) -> bytes | object:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf).tobytes() if hasattr(leaf, "dtype") else leaf

    return [of(leaf) for leaf in jax.tree.leaves(state)]


def test_nothing_kept_is_a_fresh_start(successor: Successor) -> None:
    state, step = restore(successor())
    assert step is None
    assert bits(state) == bits(fresh())


def test_the_newest_captured_step_comes_back_with_every_bit(successor: Successor) -> None:
    keeper = successor()
    state, _ = restore(keeper)
    for taken in (3, 6):
        changed = {**state, "w": state["w"] * taken, "count": taken}
        assert keeper.capture(Step(taken), changed, is_required=True)
    found, step = restore(successor())
    assert step == 6
    assert bits(found) == bits({**fresh(), "w": fresh()["w"] * 6, "count": 6})
    assert type(found["count"]) is int


def test_bytes_do_not_change_under_a_capture(successor: Successor) -> None:
    keeper = successor()
    state, _ = restore(keeper)
    before = bits(state)
    keeper.capture(Step(1), state, is_required=True)
    jax.jit(lambda w: w * 0, donate_argnums=0)(state["w"])
    found, _ = restore(successor())
    assert bits(found) == before


def test_another_tree_is_refused_at_the_capture_by_leaf(successor: Successor) -> None:
    keeper = successor()
    state, _ = restore(keeper)
    with pytest.raises(StateRefused, match=r"\['w'\]"):
        keeper.capture(Step(1), {**state, "w": jnp.zeros(3)}, is_required=True)


def test_a_step_reached_again_after_going_back_replaces_what_was_there(
    successor: Successor,
) -> None:
    keeper = successor()
    state, _ = restore(keeper)
    keeper.capture(Step(5), state, is_required=True)
    keeper = successor()
    state, _ = restore(keeper)
    keeper.capture(Step(5), {**state, "count": 99}, is_required=True)
    found, step = restore(successor())
    assert (step, found["count"]) == (5, 99)


def test_another_tree_is_refused_at_the_restore_by_every_bad_leaf(successor: Successor) -> None:
    keeper = successor()
    state, _ = restore(keeper)
    keeper.capture(Step(1), state, is_required=True)
    here = SingleDeviceSharding(jax.devices()[0])
    other = {**fresh(), "w": jnp.zeros(3), "half": jnp.zeros(5)}
    shardings = [here if isinstance(leaf, jax.Array) else None for leaf in jax.tree.leaves(other)]
    with pytest.raises(StateRefused, match=r"half.*w") as refused:
        successor().restore(other, shardings, lambda: other)
    assert "bfloat16" in str(refused.value)
