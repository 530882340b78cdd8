"""Captured on one mesh, restored on another: every bit as it was, from any mixture of sources.

Real slots, a real shelf, real HTTP between "hosts" of one process; several CPU devices.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step
from everstep.runtime.engine.state import flatten
from everstep.runtime.errors import CheckpointInvalid, Fenced, StateRefused
from everstep.runtime.layout.dtypes import STORABLE, numpy_dtype
from everstep.runtime.layout.manifest import BLOCK_BYTES, Holding, Plot, Region
from everstep.runtime.layout.scalars import inline_extra
from everstep.runtime.restore.assemble import RestoredState, restore_state
from everstep.runtime.snapshot.capture import CapturePlan
from everstep.runtime.snapshot.regions import plot_of, region_array
from everstep.runtime.snapshot.shelf import Shelf
from everstep.runtime.snapshot.slots import SlotWriter
from many_devices import in_fresh_process
from peer_server import PeerServer

STEP = Step(12)


class Moments(NamedTuple):
    count: Any
    mu: Any


class Empty(NamedTuple):
    pass


def everything(region: Region) -> bool:
    del region
    return True


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a restore is told; the product gets it as an `Assignment`."""

    host: HostId
    incarnation: Incarnation
    token: str = "t"
    restore_step: Step | None = STEP
    holdings: tuple[Holding, ...] = ()
    storage: None = None


@dataclass
class Host:
    """A host that holds a part of the step: shelf, server, and what it was given to keep."""

    id: HostId
    shelf: Shelf
    server: PeerServer
    holdings: list[Holding] = field(default_factory=list[Holding])

    def own_slots(self) -> dict[str, memoryview]:
        return {h.id: self.shelf.view(h.id) for h in self.holdings}


@contextlib.contextmanager
def hosts_with(state: Any, keep: Sequence[Any] = (everything,)) -> Generator[list[Host]]:
    """One host per entry of `keep`, holding those regions of a captured state that it says."""
    flat = flatten(state)
    plan = CapturePlan(flat)
    memory = np.zeros(plan.plot.size_bytes, np.uint8)
    plan.capture(flat, _targets(memory, plan.plot))
    made: list[Host] = []
    with contextlib.ExitStack() as stack:
        for number, wants in enumerate(keep):
            id_ = HostId(SliceId(number), 0)
            shelf = Shelf(host=id_, slots=2, bytes_max=None, namespace=f"h{number}")
            stack.callback(shelf.close)
            regions = [Region(s.leaf, s.box) for s in plan.plot.shards]
            regions = [region for region in regions if wants(region)]
            plot = plot_of(plan.plot.tree, regions)
            writer = SlotWriter(shelf.allocate(plot), shelf.slot_size_bytes, plot)
            slot = shelf.grant()
            assert slot is not None
            writer.write(slot, [_region(memory, plan.plot, region) for region in regions])
            extra = {**inline_extra(flat.tree), "at": "here"}
            asyncio.run(shelf.complete(slot, STEP, Incarnation(1), extra))
            server = stack.enter_context(PeerServer(shelf, incarnation=2))
            host = Host(id_, shelf, server)
            host.holdings = list(shelf.inventory(server.address, server.port).holdings)
            made.append(host)
        yield made


def _targets(memory: np.ndarray, plot: Plot) -> list[np.ndarray]:
    writer = []
    for shard in plot.shards:
        raw = memory[shard.offset : shard.offset + shard.size_bytes]
        dtype = numpy_dtype(plot.tree.leaves[shard.leaf].dtype)
        writer.append(raw.view(dtype).reshape(shard.box.shape))
    return writer


def _region(memory: np.ndarray, plot: Plot, region: Region) -> np.ndarray:
    shards = [s for s in plot.shards if s.leaf == region.leaf]
    return region_array(memory, plot.tree, shards, region)


def restore(
    like: Any, hosts: Sequence[Host], *, own: Host | None = None, memory_bytes: int = 1 << 30
) -> RestoredState:
    order = Order(
        incarnation=Incarnation(2),
        host=own.id if own is not None else HostId(SliceId(99), 0),
        holdings=tuple(h for host in hosts for h in host.holdings),
    )
    return restore_state(
        flatten(like),
        None,
        assignment=order,
        own_slots=own.own_slots() if own is not None else {},
        memory_bytes=memory_bytes,
    )


def bits(value: Any) -> tuple[object, ...]:
    """Type, dtype, shape and bytes of a leaf: equal exactly when the leaves are."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ("key", str(value.dtype), bits(jax.random.key_data(value)))
    if isinstance(value, jax.Array):
        pieces = {str(s.index): np.asarray(s.data).tobytes() for s in value.addressable_shards}
        assert len({len(p) for p in pieces.values()}) <= 1
        return ("jax", str(value.dtype), value.shape, np.asarray(value).tobytes())
    if isinstance(value, np.ndarray | np.generic):
        return (type(value), str(value.dtype), value.shape, value.tobytes())
    return (type(value), repr(value))


def assert_same(found: Any, expected: Any) -> None:
    structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(expected)]
    assert structures[0] == structures[1]
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert bits(a) == bits(b), jax.tree_util.keystr(path)


def as_it_lies(leaf: Any) -> Any:
    return leaf.sharding


def all_on(sharding: Any) -> Any:
    def shard(leaf: Any) -> Any:
        del leaf
        return sharding

    return shard


def abstract(state: Any, shard: Any) -> Any:
    """The state's shapes on other shardings; plain values and host arrays are other ones."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shard(leaf))
        if isinstance(leaf, np.ndarray):
            return np.full_like(leaf, 99)
        if isinstance(leaf, np.generic):
            return type(leaf)(9)
        return type(leaf)("7" if isinstance(leaf, str) else 7)

    return jax.tree.map(one, state)


def mesh_of(*shape: int) -> Mesh:
    count = int(np.prod(shape))
    devices = np.array(jax.devices()[:count]).reshape(shape)
    return Mesh(devices, ("x", "y")[: len(shape)])


def random_array(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Any bit pattern that the dtype has: NaN payloads, −0.0 and subnormal numbers included."""
    count = int(np.prod(shape, dtype=int))
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn"):
        small = rng.integers(0, 2, shape)
        return small.astype(dtype)
    raw = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


# In fresh processes


def every_leaf_kind_comes_back() -> None:
    mesh = mesh_of(4, 2)
    rng = np.random.default_rng(1)
    rows, replicated = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    arrays: dict[str, Any] = {}
    for name in sorted(STORABLE - {"float64", "int64", "uint64", "complex128"}):
        for shape in ((), (8,), (8, 6), (0, 3)):
            sharding = rows if shape[:1] == (8,) else replicated
            value = random_array(rng, numpy_dtype(name), shape)
            arrays[f"{name}{shape}"] = jax.device_put(value, sharding)
    keys = jax.device_put(jax.random.split(jax.random.key(3), 8), rows)
    state = {
        "arrays": arrays,
        "a/b": {"b": jnp.arange(3), "": jnp.float32(-0.0)},
        "a": {"b/b": jnp.arange(4)},
        "numbered": {0: 1, 10: 2, 2: 3},
        "opt": (Moments(jnp.int32(16777217), jnp.ones((3, 5))), Empty(), None, [None, {}, []]),
        "keys": keys,
        "rbg": jax.random.key(1, impl="rbg"),
        "host": np.arange(12, dtype=np.float64).reshape(3, 4).T,
        "number": np.float64(0.1),
        "flag": np.bool_(True),
        "plain": [3, 2**70, True, 1.5, -0.0, 1 + 2j, "né\ud800", ""],
        "weak": jnp.asarray(2.5),
        "loose": jnp.arange(7, dtype=jnp.int8),
    }

    def shard(leaf: Any) -> Any:
        other = mesh_of(2, 4)
        is_wide = leaf.ndim and leaf.shape[0] == 8
        return NamedSharding(other, PartitionSpec("x") if is_wide else PartitionSpec())

    with hosts_with(state) as hosts:
        like = abstract(state, shard)
        found = restore(like, hosts, own=hosts[0])
        assert_same(found.state, state)
        assert found.extra["at"] == "here"
        assert found.figures.source == "memory"
        assert found.figures.peer_bytes == found.figures.storage_bytes == 0
        assert found.figures.own_bytes > 0
        over_http = restore(like, hosts)
        assert_same(over_http.state, state)
        assert over_http.figures.own_bytes == 0
        a = jax.random.normal(found.state["keys"][3], (10,))
        np.testing.assert_array_equal(a, jax.random.normal(keys[3], (10,)))


def any_mesh_to_any_mesh(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chance = random.Random(seed)
    jax.config.update("jax_enable_x64", True)
    names = sorted(STORABLE)

    def spec_for(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
        axes = [*mesh.axis_names, None]
        chance.shuffle(axes)
        parts: list[Any] = []
        for length in shape:
            axis = axes.pop() if axes else None
            fits = axis is not None and length % mesh.shape[axis] == 0
            parts.append(axis if fits else None)
        return PartitionSpec(*parts)

    def any_mesh() -> Mesh:
        return mesh_of(*chance.choice([(1,), (2,), (3,), (5,), (8,), (2, 2), (4, 2), (2, 3)]))

    for _ in range(12):
        old, new = any_mesh(), any_mesh()
        state: dict[str, Any] = {}
        targets: dict[str, Any] = {}
        for leaf in range(chance.randint(1, 6)):
            # Shapes on both sides of a block of checksums, whole and not whole numbers of rows.
            shape = chance.choice(
                [(8, 6), (7,), (), (40, 3, 5), (0, 4), (6, 120, 1000), (24, 90_000), (3_000_000,)]
            )
            dtype = numpy_dtype(chance.choice(names))
            value = random_array(rng, dtype, shape)
            name = f"{leaf}-{dtype.name}"
            state[name] = jax.device_put(value, NamedSharding(old, spec_for(shape, old)))
            to = NamedSharding(new, spec_for(shape, new))
            targets[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=to)
        share = chance.random()
        held = chance.choices([0, 1, 2], k=10_000)
        numbers = iter(range(10_000))
        owner: dict[Region, int] = {}

        def is_held_by(
            host: int,
            held: list[int] = held,
            owner: dict[Region, int] = owner,
            numbers: Iterator[int] = numbers,
            share: float = share,
        ) -> Any:
            def wants(region: Region) -> bool:
                if region not in owner:
                    owner[region] = held[next(numbers)]
                return owner[region] == host or (host == 0 and share > 0.5)

            return wants

        with hosts_with(state, [is_held_by(host) for host in range(3)]) as hosts:
            own = chance.choice([None, *hosts])
            memory_bytes = chance.choice([1, 3 << 20, 1 << 30])
            found = restore(targets, hosts, own=own, memory_bytes=memory_bytes)
            assert_same(found.state, state)
            for name, value in found.state.items():
                assert value.sharding == targets[name].sharding
            distinct = sum(
                np.asarray(s.data).nbytes
                for value in found.state.values()
                for s in {str(s.index): s for s in value.addressable_shards}.values()
            )
            figures = found.figures
            moved = figures.own_bytes + figures.peer_bytes
            assert moved == distinct, "no element is read twice, none is left out"
            assert figures.rejected == ()


def damage_is_read_around() -> None:
    mesh = mesh_of(2)
    state = {
        "a": jax.device_put(
            np.arange(2 * 3 * BLOCK_BYTES // 4, dtype=np.float32),
            NamedSharding(mesh, PartitionSpec("x")),
        ),
        "b": jnp.arange(5),
    }
    like = abstract(state, all_on(NamedSharding(mesh_of(1), PartitionSpec())))
    with hosts_with(state, [everything, everything]) as hosts:
        own, peer = hosts
        _damage(own, offset=BLOCK_BYTES + 17)
        found = restore(like, hosts, own=own)
        assert_same(found.state, state)
        assert found.figures.peer_bytes == BLOCK_BYTES, "one block is fetched, and no more"
        assert found.figures.own_bytes == 5 * BLOCK_BYTES + 20
        (words,) = found.figures.rejected
        assert "own memory" in words
        assert "['a']" in words
        assert "checksum" in words
        # The same block is bad in the only other source.
        _damage(peer, offset=BLOCK_BYTES + 17)
        with pytest.raises(CheckpointInvalid) as caught:
            restore(like, hosts, own=own)
        assert caught.value.leaf == "['a']"
        assert str(STEP) in str(caught.value)
        assert "checksum" in str(caught.value)


def _damage(host: Host, offset: int) -> None:
    """Flip one bit behind the shelf's back."""
    held = host.shelf._held[host.holdings[0].id]  # pyright: ignore[reportPrivateUsage]
    held.memory.bytes()[offset] ^= 1


def peers_misbehave() -> None:
    state = {"a": jnp.arange(3 * BLOCK_BYTES, dtype=jnp.float32), "b": jnp.arange(5)}
    like = abstract(state, as_it_lies)
    with hosts_with(state, [everything, everything]) as hosts:
        bad, good = hosts
        bad.server.hang_up_after = 1000
        found = restore(like, hosts)
        assert_same(found.state, state)
        assert any("0/0" in words for words in found.figures.rejected)
        bad.server.hang_up_after = None

        # The slot was overwritten between the join and the restore.
        gone = Host(bad.id, bad.shelf, bad.server, bad.holdings)
        bad.shelf._held.clear()  # pyright: ignore[reportPrivateUsage]
        found = restore(like, [gone, good])
        assert_same(found.state, state)
        assert any("no longer holds" in words for words in found.figures.rejected)

        # It has gone altogether.
        bad.server.stop()
        found = restore(like, [gone, good])
        assert_same(found.state, state)
        assert any("refused" in words for words in found.figures.rejected)

        # Its directive is late: it is asked again.
        good.server.not_yet_count = 3
        assert_same(restore(like, [good]).state, state)

        # It is older than this worker: of no use. It is newer: this worker must stop.
        good.server.incarnation = 1
        with pytest.raises(CheckpointInvalid, match="409"):
            restore(like, [good])
        good.server.incarnation = 3
        with pytest.raises(Fenced) as caught:
            restore(like, [good])
        assert (caught.value.own, caught.value.newest) == (2, 3)


def differences_are_refused() -> None:
    state = {"a": jnp.ones((3,)), "n": jnp.int32(16777217), "k": jax.random.key(0), "p": 1}
    with hosts_with(state) as hosts:

        def refused(like: Any) -> StateRefused:
            before = hosts[0].server.requests["bytes"]
            with pytest.raises(StateRefused) as caught:
                restore(like, hosts)
            assert hosts[0].server.requests["bytes"] == before, "no byte was read"
            return caught.value

        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.uint32):
            error = refused({**state, "n": jax.ShapeDtypeStruct((), dtype)})
            assert error.field == "['n']"
            assert error.found == "int32[]"
        error = refused({**state, "a": jnp.ones((4,)), "extra": jnp.ones(())})
        assert "['a']" in error.field
        assert "['extra']" in error.field
        assert "float32[3]" in str(error)
        assert "float32[4]" in str(error)
        assert "nothing" in str(error)
        missing = {k: v for k, v in state.items() if k != "p"}
        assert "['p']" in refused(missing).field
        assert "rbg" in str(refused({**state, "k": jax.random.key(0, impl="rbg")}))
        assert "['p']" in refused({**state, "p": 1.0}).field
        uneven = jax.ShapeDtypeStruct(
            (3,), jnp.float32, sharding=NamedSharding(mesh_of(2), PartitionSpec("x"))
        )
        assert "divi" in str(refused({**state, "a": uneven}))


def restored_arrays_do_not_depend_on_the_slot_and_can_be_donated() -> None:
    mesh = mesh_of(4)
    spread = NamedSharding(mesh, PartitionSpec())
    state = {"a": jax.device_put(np.arange(4096, dtype=np.float32), spread)}
    with hosts_with(state) as hosts:
        found = restore(abstract(state, all_on(spread)), hosts, own=hosts[0]).state
        for _ in range(2):
            _damage(hosts[0], offset=100)
        hosts[0].shelf.close()
        step = jax.jit(lambda a: a + 1, donate_argnums=0)
        again = found["a"]
        for _ in range(3):
            again = step(again)
        np.testing.assert_array_equal(np.asarray(again), np.arange(4096) + 3)
        for shard in again.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.arange(4096) + 3)


def small_leaves_come_in_few_requests() -> None:
    state = [jnp.full((3,), number, jnp.int32) for number in range(500)]
    with hosts_with(state) as hosts:
        found = restore(abstract(state, as_it_lies), hosts)
        assert_same(found.state, state)
        assert hosts[0].server.requests == {"manifest": 1, "bytes": 1}


def a_block_is_read_once_for_all_devices() -> None:
    column = NamedSharding(mesh_of(8), PartitionSpec(None, "x"))
    state = {"a": jnp.arange(512 * 4096, dtype=jnp.float32).reshape(512, 4096)}
    with hosts_with(state) as hosts:
        found = restore(abstract(state, all_on(column)), hosts)
        assert_same(found.state, state)
        asked = sum(stop - start for start, stop in hosts[0].server.ranges)
        assert asked == state["a"].nbytes


CASES = [
    every_leaf_kind_comes_back,
    damage_is_read_around,
    peers_misbehave,
    differences_are_refused,
    restored_arrays_do_not_depend_on_the_slot_and_can_be_donated,
    small_leaves_come_in_few_requests,
    a_block_is_read_once_for_all_devices,
]


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_eight_devices(case: Any) -> None:
    in_fresh_process(case)


@pytest.mark.processes
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_restore_undoes_capture_on_any_pair_of_meshes(seed: int) -> None:
    in_fresh_process(any_mesh_to_any_mesh, seed)


def test_the_names_of_headers_are_those_of_the_agents() -> None:
    from everstep.runtime.agent import wire
    from everstep.runtime.restore import peers

    assert wire.TOKEN_HEADER == peers.TOKEN_HEADER
    assert wire.INCARNATION_HEADER == peers.INCARNATION_HEADER
