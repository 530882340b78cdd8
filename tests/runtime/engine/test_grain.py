"""The position of a real grain iterator, as a part of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import everstep.runtime as es

grain: Any = pytest.importorskip("grain")


def batches() -> Any:
    return iter(grain.MapDataset.range(100).shuffle(seed=3).batch(4).to_iter_dataset())


def test_the_data_goes_on_where_the_step_was_saved(tmp_path: Path) -> None:
    data = batches()
    for _ in range(5):
        next(data)
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(5, es.Parts(model={"w": jnp.ones(2)}, data=data))
        # What is saved is the position at the call.
        following = [next(data).tolist() for _ in range(3)]
        later = batches()
        checkpoints.restore(es.Parts(model={"w": jnp.zeros(2)}, data=later))
    assert [next(later).tolist() for _ in range(3)] == following
