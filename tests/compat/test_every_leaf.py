"""Every kind of leaf through `es.Checkpoints`: in, out, in other layouts, and through Orbax, bit
for bit. What Orbax sees otherwise is what its page lists, no more and no less."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import everstep.runtime as es
from checkpoints import random_array
from everstep.runtime.layout.dtypes import STORABLE
from everstep.runtime.storage.tensors import STORED_AS_BYTES
from many_devices import in_fresh_process

PAGE = Path(__file__).parents[2] / "docs/reference/orbax-compatibility.md"
SHAPE = (8, 16)
LAYOUTS = {
    "rows": PartitionSpec("x"),
    "columns": PartitionSpec(None, "x"),
    "blocks": PartitionSpec("x", "y"),
    "other blocks": PartitionSpec("y", "x"),
    "all on one axis": PartitionSpec(("x", "y")),
    "replicated": PartitionSpec(),
    "partly replicated": PartitionSpec("y"),
}


class Moments(NamedTuple):
    mu: Any
    nu: Any


class Nothing(NamedTuple):
    """As the state of an optimiser that has none."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    scale: Any


@jax.tree_util.register_pytree_node_class
class Box:
    """A node of a user's own."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.inside,), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[Any]) -> Box:
        del aux
        return cls(children[0])


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def placed(value: Any, spec: PartitionSpec) -> Any:
    sharding = NamedSharding(mesh(), spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def plain_leaves() -> dict[str, Any]:
    """What is the same to Orbax. The name says what it is."""
    import optax

    payloads = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 0x7F800001] * 4, np.uint32)
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    return {
        "NaN payloads and minus zero": jnp.asarray(payloads.view(np.float32)),
        "uncommitted": jnp.arange(5),
        "on one device": jax.device_put(jnp.arange(6.0), jax.devices()[3]),
        "rank 0": jnp.asarray(2.5),
        "numpy": np.arange(12, dtype=np.int16).reshape(3, 4),
        "numpy, transposed": np.arange(12.0).reshape(3, 4).T,
        "numpy scalar": np.float32(1.5),
        "numpy bool": np.bool_(True),
        "Python bool": True,
        "Python int": -(2**63),
        "Python float": 0.1,
        "Python str": "é / . \n",
        "None": None,
        "empty dict": {},
        "empty list": [],
        "empty tuple": (),
        "key with / in it": {"a/b": jnp.ones(2)},
        "key with . in it": {"a.b": jnp.ones(2)},
        "key é": {"é": jnp.ones(2)},
        "tuple in list": [(jnp.ones(1), jnp.zeros(2)), [jnp.ones(3)]],
        "namedtuple": Moments(jnp.ones(2), jnp.zeros(3)),
        "dataclass": Layer(jnp.ones(2), jnp.zeros(1)),
        "own node": Box({"x": jnp.ones(4)}),
        "optax": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params),
    }


def odd_leaves() -> dict[str, Any]:
    """What Orbax sees otherwise, by the words of its page."""
    return {
        "an array of size zero": jnp.zeros((3, 0, 2)),
        "a Python int beyond 64 bits": 2**70,
        "a complex number of Python": 1 - 2j,
        "an integer key of a mapping": {3: jnp.ones(2), 10: jnp.zeros(1)},
        "an empty namedtuple, dataclass or node of your own": Nothing(),
        "two leaves that it would take for one": {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(3)},
    }


def keys() -> dict[str, Any]:
    many = jax.random.split(jax.random.key(1, impl="rbg"), 8)
    return {
        "one": jax.random.key(3),
        "many": jax.device_put(many, NamedSharding(mesh(), PartitionSpec("x"))),
    }


def bits(value: Any) -> Any:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return "key", str(jax.random.key_impl(value)), bits(jax.random.key_data(value))
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        return array.dtype.name, array.shape, array.tobytes()
    return type(value), value


def all_bits(tree: Any) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path), bits(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def by_text(tree: Any) -> dict[tuple[str, ...], Any]:
    """Leaves by their keys as text, whatever kind of container has them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    names = ("key", "idx", "name")
    return {
        tuple(str(next(getattr(k, n) for n in names if hasattr(k, n))) for k in path): leaf
        for path, leaf in pairs
    }


def check_in_out_and_in_other_layouts(run: str) -> None:
    jax.config.update("jax_enable_x64", True)
    values = {
        name: random_array(name, SHAPE, number) for number, name in enumerate(sorted(STORABLE))
    }
    arrays = {name: placed(value, LAYOUTS["rows"]) for name, value in values.items()}
    state = es.Parts(
        arrays=arrays, plain=plain_leaves(), odd=odd_leaves(), keys=keys(), host=values
    )
    with es.Checkpoints(run) as checkpoints:
        checkpoints.save(1, state).wait()
        restored = checkpoints.restore(state)
        for name in state:
            structure: Any = jax.tree.structure(restored[name])
            assert structure == jax.tree.structure(state[name]), name
            assert all_bits(restored[name]) == all_bits(state[name]), name
            for found, wanted in zip(
                jax.tree.leaves(restored[name]), jax.tree.leaves(state[name]), strict=True
            ):
                assert isinstance(found, jax.Array) == isinstance(wanted, jax.Array)
                if isinstance(wanted, jax.Array):
                    assert found.sharding.is_equivalent_to(wanted.sharding, wanted.ndim)
        for words, spec in LAYOUTS.items():
            sharding = NamedSharding(mesh(), spec)
            like = {
                name: jax.ShapeDtypeStruct(SHAPE, array.dtype, sharding=sharding)
                for name, array in arrays.items()
            }
            found = checkpoints.restore(es.Parts(arrays=like)).arrays
            for name, value in values.items():
                assert found[name].sharding == sharding, (words, name)
                assert bits(found[name]) == bits(value), (words, name)
                for shard in found[name].addressable_shards:
                    assert bits(np.asarray(shard.data)) == bits(value[shard.index]), (words, name)


def test_every_leaf_comes_back_bit_for_bit_in_any_layout(tmp_path: Path) -> None:
    in_fresh_process(check_in_out_and_in_other_layouts, str(tmp_path / "run"))


def check_through_orbax(run: str) -> None:
    from orbax.checkpoint import v1

    jax.config.update("jax_enable_x64", True)
    values = {
        name: random_array(name, SHAPE, number) for number, name in enumerate(sorted(STORABLE))
    }
    arrays = {name: placed(value, LAYOUTS["blocks"]) for name, value in values.items()}
    plain, odd, typed = plain_leaves(), odd_leaves(), keys()
    with es.Checkpoints(run) as checkpoints:
        checkpoints.save(1, es.Parts(arrays=arrays, plain=plain, odd=odd, keys=typed))
    (folder,) = Path(run).glob("step-*")
    one = SingleDeviceSharding(jax.devices()[0])

    def abstract(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one)

    loaded = v1.load_checkpointables(str(folder), {"arrays": None, "plain": None, "odd": None})
    with_keys = v1.load_checkpointables(str(folder), {"keys": jax.tree.map(abstract, typed)})
    assert all_bits(with_keys["keys"]) == all_bits(typed)
    differing = {
        name for name, value in values.items() if bits(loaded["arrays"][name]) != bits(value)
    }
    assert differing == set(STORED_AS_BYTES)
    for name in differing:
        assert bits(loaded["arrays"][name]) == ("uint8", SHAPE, values[name].tobytes())
    expected, found = by_text(plain), by_text(loaded["plain"])
    # An empty node within optax's state is None, as the page says.
    assert {path for path in found if found[path] is not None or path in expected} == set(expected)
    for path, value in expected.items():
        same = bits(found[path]) == bits(value)
        assert same or (path[0].startswith("empty") and found[path] == value), path
    check_odd(loaded["odd"])


def check_odd(found: Mapping[str, Any]) -> None:
    """Each is what the page says that it is."""
    assert np.asarray(found["an array of size zero"]).shape == (3, 0, 2)
    assert found["a Python int beyond 64 bits"] == str(2**70)
    assert bits(found["a complex number of Python"]) == bits(np.asarray(1 - 2j))
    assert set(found["an integer key of a mapping"]) == {"3", "10"}
    assert found["an empty namedtuple, dataclass or node of your own"] is None
    assert set(found["two leaves that it would take for one"]) == {"a", "a%2Eb"}


@pytest.mark.filterwarnings("ignore")
def test_what_orbax_sees_otherwise_is_what_is_listed(tmp_path: Path) -> None:
    in_fresh_process(check_through_orbax, str(tmp_path / "run"))
    table = PAGE.read_text().split("## Leaves that Orbax cannot hold")[1].split("\n\nObjects")[0]
    rows = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")][1:]
    dtypes = next(row for row in rows if row.startswith("`"))
    assert set(re.findall(r"`(\w+)`", dtypes)) == set(STORED_AS_BYTES)
    listed = {re.sub(r" \(.*\)$", "", row) for row in rows if row != dtypes}
    assert listed == set(odd_leaves())
