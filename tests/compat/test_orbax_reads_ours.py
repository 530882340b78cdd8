"""Orbax restores our checkpoints, bit for bit, with the same tree. The exceptions are listed.

The exceptions are those of `docs/reference/checkpoint-format.md`; each has a test here, so the page
and Orbax cannot drift apart unseen.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from checkpoints import claimed, save
from everstep.runtime.engine.state import flatten
from everstep.runtime.layout.dtypes import STORABLE
from everstep.runtime.storage.posix import PosixStore
from everstep.runtime.storage.tensors import STORED_AS_BYTES

pytestmark = pytest.mark.filterwarnings("ignore")

v0 = pytest.importorskip("orbax.checkpoint", minversion=None)


class Moments(NamedTuple):
    mu: Any
    nu: Any


class Nothing(NamedTuple):
    """As the state of an optimiser that has none."""


@jax.tree_util.register_pytree_node_class
class Stateless:
    def tree_flatten(self) -> tuple[tuple[()], None]:
        return (), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple[()]) -> Stateless:
        del aux, children
        return cls()

    def __repr__(self) -> str:
        return "Stateless()"


def write(root: Path, state: object, hosts: int = 2) -> Path:
    """Save a state as two hosts would; the checkpoint's folder."""
    flat = flatten(state)
    values = {
        index: np.asarray(value)
        for index, (leaf, value) in enumerate(zip(flat.tree.leaves, flat.values, strict=True))
        if leaf.is_stored_as_bytes
    }
    store = PosixStore(str(root))
    commit = save(store, claimed(store), 10, flat.tree, values, hosts=hosts)
    return root / commit.folder


def example() -> dict[str, Any]:
    dice = np.random.default_rng(0)
    return {
        "params": {
            "layers": [
                {"kernel": jnp.asarray(dice.normal(size=(8, 16)), jnp.float32)},
                {"kernel": jnp.asarray(dice.normal(size=(8, 16)), jnp.bfloat16)},
            ],
            "a/b": jnp.arange(6, dtype=jnp.int32),
            "é": jnp.arange(4, dtype=jnp.uint8),
        },
        "opt": (Moments(jnp.full((4,), -0.0), jnp.array([jnp.nan, jnp.inf])), {"n": None}),
        "host": np.arange(12, dtype=np.float64).reshape(3, 4),
        "step": 7,
        "rate": 0.1,
        "on": True,
        "name": "run é",
        "empty": {},
        "zero": jnp.zeros((3, 0, 2)),
    }


def bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(value)
    return array.dtype.name, array.shape, array.tobytes()


def flat_names(tree: Any) -> dict[str, Any]:
    """Leaves by their keys as text, whatever kind of container has them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    return {
        ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in keys): v
        for keys, v in pairs
    }


def load_v1(folder: Path, target: Any = None) -> Any:
    from orbax.checkpoint import v1

    path = str(folder)
    return v1.load(path, target) if target is not None else v1.load(path)


def load_v0(folder: Path, target: Any = None) -> Any:
    checkpointer = v0.StandardCheckpointer()
    try:
        return checkpointer.restore(folder / "state", target)
    finally:
        checkpointer.close()


def load_pytree(folder: Path, target: Any = None) -> Any:
    wanted = None
    if target is not None:
        wanted = v0.checkpoint_utils.construct_restore_args(target)
    with v0.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "state", item=target, restore_args=wanted)


def load_composite(folder: Path, target: Any = None) -> Any:
    """As a `CheckpointManager` does: a step's folder, and its items by name."""
    wanted = v0.args.Composite(state=v0.args.StandardRestore(target))
    with v0.Checkpointer(v0.CompositeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder, args=wanted)["state"]


LOADERS = [
    pytest.param(load_v1, id="v1"),
    pytest.param(load_v0, id="v0-standard"),
    pytest.param(load_pytree, id="v0-pytree"),
    pytest.param(load_composite, id="v0-composite"),
]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_state_loads_without_a_target_with_the_same_keys_and_bits(
    tmp_path: Path, loader: Any, hosts: int
) -> None:
    state = example()
    loaded = loader(write(tmp_path / "run", state, hosts))
    expected, found = flat_names(state), flat_names(loaded)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, jax.Array | np.ndarray):
            assert bits(found[name]) == bits(value), name
        else:
            assert found[name] == value, name
    assert loaded["empty"] == {}
    assert isinstance(loaded["params"]["layers"], list | tuple)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_state_loads_into_a_target_with_the_same_tree(tmp_path: Path, loader: Any) -> None:
    state = example()
    state["keys"] = {
        "one": jax.random.key(0),
        "many": jax.random.split(jax.random.key(1, impl="rbg"), 3),
    }
    if loader in (load_v0, load_composite):
        del state["name"]  # Its target takes no strings, whoever wrote the checkpoint.
    device = SingleDeviceSharding(jax.devices()[0])

    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
        return leaf

    target = jax.tree.map(abstract, state)
    loaded = loader(write(tmp_path / "run", state), target)
    assert str(jax.tree.structure(loaded)) == str(jax.tree.structure(state))
    for name in ("one", "many"):
        key, original = loaded["keys"][name], state["keys"][name]
        assert key.dtype == original.dtype
        assert bits(jax.random.key_data(key)) == bits(jax.random.key_data(original))
    del loaded["keys"], state["keys"]
    for found, value in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert (
            bits(found) == bits(value)
            if isinstance(value, jax.Array | np.ndarray)
            else found == value
        )


@pytest.mark.parametrize("loader", LOADERS)
def test_every_dtype_but_the_listed_ones_loads_as_itself(tmp_path: Path, loader: Any) -> None:
    from checkpoints import array, random_values, tree_of

    names = sorted(STORABLE)
    tree = tree_of(*(array(name, dtype=name, shape=(5, 6)) for name in names))
    values = random_values(tree, seed=5)
    store = PosixStore(str(tmp_path / "run"))
    commit = save(store, claimed(store), 1, tree, values)
    loaded = loader(tmp_path / "run" / commit.folder)
    for index, name in enumerate(names):
        dtype, shape, content = bits(loaded[name])
        assert (shape, content) == ((5, 6), values[index].tobytes()), name
        assert dtype == STORED_AS_BYTES.get(name, name)


def test_a_damaged_chunk_is_refused_by_orbax_as_well(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", {"w": jnp.arange(65536, dtype=jnp.float32)}, hosts=1)
    data = max((folder / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(Exception, match=r"(?i)digest|checksum|crc"):
        load_v1(folder)


# The exceptions.


def test_exception_typed_keys_without_a_target_are_their_key_data(tmp_path: Path) -> None:
    key = jax.random.key(3)
    loaded = load_v1(write(tmp_path / "run", {"key": key}))
    assert bits(loaded["key"]) == bits(jax.random.key_data(key))


def test_exception_a_large_int_is_text(tmp_path: Path) -> None:
    loaded = load_v1(write(tmp_path / "run", {"big": 2**70, "w": jnp.ones(2)}))
    assert loaded["big"] == str(2**70)


def test_exception_a_complex_number_is_an_array(tmp_path: Path) -> None:
    loaded = load_v1(write(tmp_path / "run", {"c": 1 - 2j, "w": jnp.ones(2)}))
    assert bits(loaded["c"]) == bits(np.complex128(1 - 2j))


def test_exception_integer_keys_are_text(tmp_path: Path) -> None:
    loaded = load_v1(write(tmp_path / "run", {"m": {0: jnp.ones(2), 10: jnp.zeros(3)}}))
    assert {key: value.shape for key, value in loaded["m"].items()} == {"0": (2,), "10": (3,)}


def test_exception_of_names_that_would_meet_one_is_escaped(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(3)}
    loaded = load_v1(write(tmp_path / "run", state))
    assert bits(loaded["a"]["b"]) == bits(state["a"]["b"])
    assert bits(loaded["a%2Eb"]) == bits(state["a.b"])


def test_empty_nodes_load_as_orbax_loads_its_own(tmp_path: Path) -> None:
    state = {
        "list": [],
        "tuple": (),
        "dict": {},
        "ordered": collections.OrderedDict[str, int](),
        "named": Nothing(),
        "node": Stateless(),
        "none": None,
        "deep": [[], (), {"x": {}}],
        "w": jnp.ones(2),
    }
    ours = write(tmp_path / "run", state)
    theirs = tmp_path / "theirs"
    with v0.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(theirs, state)
        plain = checkpointer.restore(theirs)
    for loader in (load_v1, load_v0):
        found = loader(ours)
        assert bits(found.pop("w")) == bits(state["w"])
        assert found == {name: plain[name] for name in plain if name != "w"}
        assert [type(found[name]) for name in ("list", "tuple", "dict")] == [list, tuple, dict]
        typed = loader(ours, state)
        assert str(jax.tree.structure(typed)) == str(jax.tree.structure(state))
