"""Orbax restores from the bucket what we committed there, by its own client of the same server."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import everstep.runtime as es
from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.storage.open import open_store
from object_fixtures import BUCKET, use
from object_server import ObjectServer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

v0: Any = pytest.importorskip("orbax.checkpoint")

STATE = {
    "w": jnp.arange(3000, dtype=jnp.float32).reshape(30, 100),
    "b": {"c": jnp.arange(7, dtype=jnp.bfloat16), "d": jnp.asarray(-3, jnp.int32)},
}


@pytest.fixture
def uri(monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    # Orbax's way to a bucket tells at each call that there are no credentials.
    logging.getLogger("gcsfs").setLevel(logging.ERROR)
    with ObjectServer() as server:
        server.make_bucket(BUCKET)
        use(server.url, monkeypatch)
        yield f"gs://{BUCKET}/run"


def test_a_checkpoint_in_a_bucket_comes_back_and_orbax_reads_it(uri: str) -> None:
    with es.Checkpoints(uri) as checkpoints:
        checkpoints.save(1, STATE).wait()
    with es.Checkpoints(uri) as checkpoints:
        assert checkpoints.steps() == (1,)
        assert_same(checkpoints.restore(STATE))
    (commit,) = list_commits(open_store(uri))
    abstract = jax.tree.map(v0.utils.to_shape_dtype_struct, STATE)
    with v0.StandardCheckpointer() as reader:
        assert_same(reader.restore(f"{uri}/{commit.folder}/state", abstract))
    with v0.Checkpointer(v0.CompositeCheckpointHandler()) as reader:
        args = v0.args.Composite(state=v0.args.StandardRestore(abstract))
        assert_same(reader.restore(f"{uri}/{commit.folder}", args=args)["state"])


def assert_same(restored: Any) -> None:
    # Raises where the tree is another.
    pairs = jax.tree.leaves(
        jax.tree.map(lambda one, other: (one, other), restored, STATE),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    assert len(pairs) == 3
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_a_run_of_orbax_in_a_bucket_is_read_and_gone_on_with(uri: str) -> None:
    with v0.CheckpointManager(uri) as orbax_run:
        orbax_run.save(3, args=v0.args.StandardSave(STATE))
        orbax_run.wait_until_finished()
    with es.Checkpoints(uri) as checkpoints:
        assert checkpoints.steps() == (3,)
        assert_same(checkpoints.restore(STATE))
        checkpoints.save(4, STATE).wait()
        assert checkpoints.steps() == (3, 4)
