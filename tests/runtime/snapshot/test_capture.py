"""Captured bytes are those of the moment of the capture, whatever happens to the arrays then."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from everstep.runtime.engine.state import flatten, reflatten
from everstep.runtime.errors import StateRefused
from everstep.runtime.layout.boxes import Box, uncovered, whole
from everstep.runtime.layout.dtypes import numpy_dtype
from everstep.runtime.layout.manifest import Plot, Region
from everstep.runtime.snapshot.capture import CapturePlan, PlotOutdated, capture, plan_plot
from everstep.runtime.snapshot.memfd import SharedMemory
from everstep.runtime.snapshot.regions import region_array
from everstep.runtime.snapshot.slots import SlotWriter
from many_devices import in_fresh_process


class Slots:
    """Two real slots, and what lies in them."""

    def __init__(self, plot: Plot) -> None:
        self.plot = plot
        self.memories = [SharedMemory(f"test-{i}", plot.size_bytes) for i in range(2)]
        fds = [memory.fd for memory in self.memories]
        self.writer = SlotWriter(fds, plot.size_bytes, plot)

    def leaf(self, slot: int, leaf: int) -> np.ndarray:
        shards = [s for s in self.plot.shards if s.leaf == leaf]
        region = Region(leaf, whole(self.plot.tree.leaves[leaf].shape))
        return region_array(self.memories[slot].bytes(), self.plot.tree, shards, region)


def donated_and_overwritten_arrays_do_not_change_what_was_captured() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    host = np.arange(1000)
    state: dict[str, Any] = {
        "a": jax.device_put(
            np.arange(4096, dtype=np.float32).reshape(64, 64),
            NamedSharding(mesh, PartitionSpec("x", "y")),
        ),
        "b": jax.device_put(
            np.arange(512, dtype=np.float32), NamedSharding(mesh, PartitionSpec("x"))
        ),
        "host": host,
    }
    step = jax.jit(
        lambda a, b: (a * 2 + 1, b - 1),
        donate_argnums=(0, 1),
        out_shardings=(state["a"].sharding, state["b"].sharding),
    )
    flat = flatten(state)
    plan = CapturePlan(flat)
    slots = Slots(plan.plot)
    for round_ in range(6):
        expected = [np.array(state["a"]), np.array(state["b"]), host.copy()]
        flat = reflatten(state, flat)
        before = [s.data.unsafe_buffer_pointer() for s in state["a"].addressable_shards]
        plan.capture(flat, slots.writer.targets(round_ % 2))
        old = state["a"]
        state["a"], state["b"] = step(state["a"], state["b"])
        host += 7
        jax.block_until_ready(state)
        assert old.is_deleted()
        after = [s.data.unsafe_buffer_pointer() for s in state["a"].addressable_shards]
        if round_ > 1:
            # Without the re-use of the buffer there would be nothing to protect against.
            assert before == after, "a capture must not keep the step from re-using its buffers"
        for leaf, values in enumerate(expected):
            np.testing.assert_array_equal(slots.leaf(round_ % 2, leaf), values)
    with pytest.raises(StateRefused, match="donated") as caught:
        plan.capture(flat, slots.writer.targets(0))
    assert caught.value.field == "['a']"


def replicas_within_a_host_are_copied_once() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    state = {
        "replicated": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, PartitionSpec())),
        "rows": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, PartitionSpec("x"))),
        "both": jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, PartitionSpec("x", "y"))),
        "empty": jnp.ones((0, 4)),
        "number": jnp.int8(3),
        "plain": 3,
    }
    flat = flatten(state)
    plot = plan_plot(flat)
    boxes: dict[int, list[Box]] = {}
    for shard in plot.shards:
        boxes.setdefault(shard.leaf, []).append(shard.box)
        dtype = numpy_dtype(plot.tree.leaves[shard.leaf].dtype)
        assert shard.size_bytes == shard.box.size * dtype.itemsize
        assert shard.offset % 64 == 0
    names = {leaf.name: index for index, leaf in enumerate(plot.tree.leaves)}
    assert {name: len(boxes.get(index, [])) for name, index in names.items()} == {
        "['both']": 4,
        "['empty']": 0,
        "['number']": 1,
        "['plain']": 0,
        "['replicated']": 1,
        "['rows']": 2,
    }
    for name in ("both", "replicated", "rows"):
        index = names[f"['{name}']"]
        assert uncovered(whole((8, 4)), boxes[index]) == []
    ends = sorted((s.offset, s.offset + s.size_bytes) for s in plot.shards)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert ends[-1][1] <= plot.size_bytes


def another_layout_is_noticed_before_anything_is_copied() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    flat = flatten({"a": jnp.ones((8,))})
    plan = CapturePlan(flat)
    slots = Slots(plan.plot)
    plan.capture(flat, slots.writer.targets(0))
    moved = flatten({"a": jax.device_put(jnp.zeros((8,)), rows)})
    with pytest.raises(PlotOutdated, match=r"\['a'\]"):
        plan.capture(moved, slots.writer.targets(0))
    np.testing.assert_array_equal(slots.leaf(0, 0), np.ones(8))
    with pytest.raises(PlotOutdated):
        capture(moved, plan.plot, bytearray(plan.plot.size_bytes))
    # An equal sharding that is another object is the same layout.
    again = NamedSharding(Mesh(np.array(jax.devices()).reshape(4), ("x",)), PartitionSpec("x"))
    wide = CapturePlan(moved)
    wide.check_layout(flatten({"a": jax.device_put(jnp.ones((8,)), again)}))


@pytest.mark.processes
@pytest.mark.parametrize(
    "case",
    [
        donated_and_overwritten_arrays_do_not_change_what_was_captured,
        replicas_within_a_host_are_copied_once,
        another_layout_is_noticed_before_anything_is_copied,
    ],
    ids=lambda case: case.__name__,
)
def test_on_four_devices(case: Any) -> None:
    in_fresh_process(case, devices=4)


def test_a_capture_into_plain_memory_needs_no_slots() -> None:
    flat = flatten({"a": jnp.arange(6), "n": np.float64(0.5)})
    plot = plan_plot(flat)
    memory = bytearray(plot.size_bytes)
    capture(flat, plot, memory)
    raw = np.frombuffer(memory, np.uint8)
    for index, expected in enumerate([np.arange(6, dtype=np.int32), np.float64(0.5)]):
        shards = [s for s in plot.shards if s.leaf == index]
        region = Region(index, whole(plot.tree.leaves[index].shape))
        np.testing.assert_array_equal(region_array(raw, plot.tree, shards, region), expected)


def test_an_abstract_state_cannot_be_captured() -> None:
    with pytest.raises(StateRefused, match="values") as caught:
        CapturePlan(flatten({"a": jax.ShapeDtypeStruct((3,), jnp.float32)}))
    assert caught.value.field == "['a']"


def test_a_state_without_any_array_has_a_slot_all_the_same() -> None:
    plot = plan_plot(flatten({"n": 1, "none": None}))
    assert plot.shards == ()
    assert plot.size_bytes > 0
