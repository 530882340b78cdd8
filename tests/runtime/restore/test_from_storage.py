"""Restored from a real checkpoint, alone and together with memory."""

from __future__ import annotations

import asyncio
import contextlib
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
from everstep.runtime.errors import CheckpointInvalid, StateRefused
from everstep.runtime.layout.flat import FlatState
from everstep.runtime.layout.manifest import Holding, Region
from everstep.runtime.layout.scalars import inline_extra
from everstep.runtime.restore.assemble import RestoredState, restore_state
from everstep.runtime.snapshot.capture import CapturePlan
from everstep.runtime.snapshot.regions import plot_of
from everstep.runtime.snapshot.shelf import Shelf
from everstep.runtime.snapshot.slots import SlotWriter
from everstep.runtime.storage.open import open_store
from peer_server import PeerServer

HOST = HostId(SliceId(0), 0)


@dataclass(frozen=True, kw_only=True)
class Order:
    host: HostId
    incarnation: Incarnation
    token: str
    restore_step: Step | None
    storage: Source | None
    holdings: tuple[Holding, ...] = ()


def state_of(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.normal(size=(64, 48)).astype(np.float32)),
        "b": jnp.asarray(rng.integers(0, 9, (48,)), jnp.int8),
        "k": jax.random.key(seed),
        "n": seed,
        "none": None,
        "host": rng.normal(size=(3, 2)),
        "empty": jnp.zeros((0, 2)),
    }


def committed(folder: Path, flat: FlatState, step: int = 5) -> Source:
    store = open_store(str(folder))
    values = {
        index: np.asarray(value)
        for index, value in enumerate(flat.values)
        if flat.tree.leaves[index].is_stored_as_bytes
    }
    save(store, claimed(store), step, flat.tree, values, extra=inline_extra(flat.tree))
    return Source(uri=str(folder), step=Step(step))


def restore(like: Any, storage: Source | None, holdings: tuple[Holding, ...] = ()) -> RestoredState:
    order = Order(
        host=HOST,
        incarnation=Incarnation(2),
        token="t",
        restore_step=Step(5),
        storage=storage,
        holdings=holdings,
    )
    return restore_state(flatten(like), None, assignment=order, own_slots={}, memory_bytes=1 << 20)


def assert_same(found: Any, expected: Any) -> None:
    a, b = flatten(found), flatten(expected)
    assert a.tree == b.tree
    for leaf, x, y in zip(a.tree.leaves, a.values, b.values, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=leaf.name)


def test_a_checkpoint_comes_back_from_storage_alone(tmp_path: Path) -> None:
    state = state_of(3)
    found = restore(state_of(4), committed(tmp_path / "run", flatten(state)))
    assert_same(found.state, state)
    assert found.state["n"] == 3
    assert found.figures.source == "storage"
    assert found.figures.storage_bytes == 64 * 48 * 4 + 48 + 8 + 48


def test_what_memory_lacks_comes_from_storage(tmp_path: Path) -> None:
    state = state_of(3)
    flat = flatten(state)
    storage = committed(tmp_path / "run", flat)
    plan = CapturePlan(flat)
    regions = [Region(s.leaf, s.box) for s in plan.plot.shards][:2]
    plot = plot_of(flat.tree, regions)
    shelf = Shelf(host=HostId(SliceId(1), 0), slots=2, bytes_max=None, namespace="x")
    with contextlib.closing(shelf), PeerServer(shelf, incarnation=2) as server:
        writer = SlotWriter(shelf.allocate(plot), shelf.slot_size_bytes, plot)
        slot = shelf.grant()
        assert slot is not None
        writer.write(slot, [np.asarray(flat.values[region.leaf]) for region in regions])
        extra = inline_extra(flat.tree)
        asyncio.run(shelf.complete(slot, Step(5), Incarnation(1), extra))
        holdings = shelf.inventory(server.address, server.port).holdings
        found = restore(state_of(4), storage, holdings)
        assert_same(found.state, state)
        assert found.figures.source == "mixed"
        assert found.figures.peer_bytes == sum(s.size_bytes for s in plot.shards)

        # The peer goes: all of it comes from storage, and the report says why.
        server.stop()
        found = restore(state_of(4), storage, holdings)
        assert_same(found.state, state)
        assert found.figures.source == "storage"
        assert any("host 1/0" in words for words in found.figures.rejected)


def test_damage_on_storage_is_never_restored(tmp_path: Path) -> None:
    state = state_of(3)
    storage = committed(tmp_path / "run", flatten(state))
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and p.stat().st_size > 4000]
    assert files
    for file in files:
        whole = file.read_bytes()
        middle = len(whole) // 2
        file.chmod(0o644)
        file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(CheckpointInvalid):
        restore(state_of(4), storage)


def test_a_step_that_was_not_committed_is_named(tmp_path: Path) -> None:
    storage = committed(tmp_path / "run", flatten(state_of(3)), step=4)
    with pytest.raises(CheckpointInvalid, match="step 5"):
        restore(state_of(4), Source(uri=storage.uri, step=Step(5)))


def test_another_tree_is_refused_with_all_its_leaves(tmp_path: Path) -> None:
    storage = committed(tmp_path / "run", flatten(state_of(3)))
    wanted = {**state_of(4), "w": jnp.zeros((64, 48), jnp.bfloat16), "new": 1}
    with pytest.raises(StateRefused) as caught:
        restore(wanted, storage)
    assert "['w']" in caught.value.field
    assert "['new']" in caught.value.field
