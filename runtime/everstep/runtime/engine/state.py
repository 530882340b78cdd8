"""A user's state taken apart into named leaves, and put together again.

The only place that knows jax's pytrees. What cannot be stored is refused here, with the leaf's
name, before the first snapshot; nothing is converted in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from everstep.runtime.errors import StateRefused
from everstep.runtime.layout.compare import refuse_difference
from everstep.runtime.layout.dtypes import STORABLE, dtype_name
from everstep.runtime.layout.flat import FlatState, TreeDef
from everstep.runtime.layout.scalars import Scalar, encode_scalar, scalar_type
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec

__all__ = ["FlatState", "flatten", "reflatten", "unflatten"]

_STORABLE_WORDS = (
    "a jax or numpy array of a numeric dtype, a typed PRNG key, a Python bool, int, float, "
    "complex or str, None, or an empty container"
)


def flatten(state: object) -> FlatState:
    """Name and classify every leaf of a state.

    Arrays may be abstract (`jax.ShapeDtypeStruct`): then the result can be a restore's target
    but not be copied.

    Raises:
        StateRefused: names every leaf that cannot be stored, what it is, and what could be.
    """
    try:
        pairs, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_has_no_children)
        treedef: TreeDef = jax.tree_util.tree_structure(state)
    except (TypeError, ValueError) as error:
        # Keys of several types in one dict cannot be sorted, and jax says no more than that.
        words = str(error).splitlines()[0]
        raise StateRefused("state", words, "a pytree whose dicts have keys of one type") from error
    leaves: list[Leaf] = []
    values: list[object] = []
    refused: list[tuple[str, str]] = []
    for jax_path, value in pairs:
        path, bad_key = _path(jax_path)
        if bad_key is not None:
            refused.append((jax.tree_util.keystr(jax_path), f"a dict key of {bad_key}"))
            continue
        found = _classify(path, value)
        if isinstance(found, str):
            refused.append((Leaf(path=path, kind=LeafKind.NONE).name, found))
            continue
        leaf, stored = found
        leaves.append(leaf)
        values.append(stored)
    if refused:
        _refuse(refused)
    return FlatState(tree=TreeSpec(leaves=tuple(leaves)), values=tuple(values), treedef=treedef)


def reflatten(state: object, before: FlatState) -> FlatState:
    """Take apart a later state of the same training, much faster than `flatten`.

    The values of `before` are not looked at; keep it `without_values`.

    Raises:
        StateRefused: the structure, a shape, a dtype or the kind of a leaf differs from before;
            all of them are named.

    **Blocking**: a few microseconds per leaf. Waits for no device.
    """
    found, treedef = jax.tree_util.tree_flatten(state)
    if treedef != before.treedef:
        _refuse_change(before, flatten(state))
    values: list[object] = []
    scalars: dict[int, str] = {}
    position = 0
    for index, leaf in enumerate(before.tree.leaves):
        if leaf.kind is LeafKind.NONE or leaf.kind is LeafKind.EMPTY:
            values.append(None)
            continue
        value: Any = found[position]
        position += 1
        if leaf.kind is LeafKind.ARRAY:
            is_same = isinstance(value, jax.Array) and (
                value.shape == leaf.shape and dtype_name(value.dtype) == leaf.dtype
            )
        else:
            again = _classify(leaf.path, value)
            is_same = not isinstance(again, str) and (_bare(again[0]) == _bare(leaf))
            if not isinstance(again, str):
                value = again[1]
                if again[0].value is not None and again[0].value != leaf.value:
                    scalars[index] = again[0].value
        if not is_same:
            _refuse_change(before, flatten(state))
        values.append(value)
    return FlatState(
        tree=_with_values(before.tree, scalars), values=tuple(values), treedef=before.treedef
    )


def unflatten(flat: FlatState, values: Sequence[object]) -> object:
    """Put a state together from stored values, in the order of `flat.tree.leaves`.

    Key data becomes typed keys again.
    """
    return flat.unflatten(
        [
            jax.random.wrap_key_data(value, impl=leaf.impl)  # type: ignore[arg-type]
            if leaf.kind is LeafKind.PRNG_KEY
            else value
            for leaf, value in zip(flat.tree.leaves, values, strict=True)
        ]
    )


def _has_no_children(node: object) -> bool:
    """Whether jax would drop this node: None, or a container of any class with nothing in it."""
    return not jax.tree_util.tree_leaves(node, is_leaf=lambda inner: inner is not node)


def _path(jax_path: Sequence[object]) -> tuple[tuple[Key, ...], str | None]:
    """Our form of a jax path; with the words for a key that would not come back as it was."""
    keys: list[Key] = []
    for entry in jax_path:
        match entry:
            case jax.tree_util.DictKey(key=name):
                # Exact types: True is 1 to a dict, and an enum's name is not the enum.
                if type(name) is str:
                    keys.append(Key(KeyKind.DICT, name))
                elif type(name) is int:
                    keys.append(Key(KeyKind.DICT_INT, str(name)))
                else:
                    return (), f"type {type(name).__name__} ({name!r})"
            case jax.tree_util.SequenceKey(idx=index):
                keys.append(Key(KeyKind.SEQUENCE, str(index)))
            case jax.tree_util.GetAttrKey(name=name):
                keys.append(Key(KeyKind.ATTRIBUTE, name))
            case jax.tree_util.FlattenedIndexKey(key=index):
                keys.append(Key(KeyKind.ATTRIBUTE, str(index)))
            case _:
                # A custom node may name its children with objects of its own.
                keys.append(Key(KeyKind.ATTRIBUTE, str(entry)))
    return tuple(keys), None


def _classify(path: tuple[Key, ...], value: Any) -> tuple[Leaf, object] | str:
    """The leaf and what is stored of it, or what it is in words when it cannot be stored."""
    if value is None:
        return Leaf(path=path, kind=LeafKind.NONE), None
    if isinstance(value, jax.core.Tracer):
        return "a traced value (state must not be saved inside jit, grad or vmap)"
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return _classify_array(path, value)
    if isinstance(value, np.ndarray | np.generic):
        return _classify_numpy(path, value)
    type_name = scalar_type(value)
    if type_name is not None:
        scalar: Scalar = value
        try:
            text = encode_scalar(scalar)
        except OverflowError as error:
            return str(error)
        return Leaf(path=path, kind=LeafKind.SCALAR, dtype=type_name, value=text), value
    if _has_no_children(value):
        return Leaf(path=path, kind=LeafKind.EMPTY, value=_container(value)), None
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _container(value: object) -> str:
    """What an empty container is: `node` for any that is no list, tuple or mapping."""
    if isinstance(value, list):
        return "list"
    if isinstance(value, tuple):
        return "node" if hasattr(value, "_fields") else "tuple"
    return "dict" if isinstance(value, Mapping) else "node"


def _classify_array(
    path: tuple[Key, ...], value: jax.Array | jax.ShapeDtypeStruct
) -> tuple[Leaf, object] | str:
    if isinstance(value, jax.Array) and value.is_deleted():
        return "a deleted array (it was donated to a computation)"
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        impl, data = _key_data(value)
        leaf = Leaf(
            path=path, kind=LeafKind.PRNG_KEY, dtype="uint32", shape=tuple(data.shape), impl=impl
        )
        return leaf, data
    name = value.dtype.name
    if name not in STORABLE:
        return f"an array of dtype {name}"
    return Leaf(path=path, kind=LeafKind.ARRAY, dtype=name, shape=tuple(value.shape)), value


def _key_data(
    key: jax.Array | jax.ShapeDtypeStruct,
) -> tuple[str, jax.Array | jax.ShapeDtypeStruct]:
    """Name of a typed key's implementation, and its data; abstract for an abstract key."""
    if isinstance(key, jax.Array):
        return str(jax.random.key_impl(key)), jax.random.key_data(key)
    # An abstract key has no implementation to ask for, so one is asked of a key like it.
    impl = str(jax.random.key_impl(jnp.empty((), key.dtype)))
    data = jax.eval_shape(jax.random.key_data, key)
    sharding = key_data_sharding(key.sharding, len(key.shape), len(data.shape))
    return impl, jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def key_data_sharding(
    sharding: jax.sharding.Sharding | None, key_ndim: int, data_ndim: int
) -> jax.sharding.Sharding | None:
    """How key data lies when its typed keys lie like this: its own dimensions are not split."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = tuple(sharding.spec)
        spec = (*spec, *(None,) * (key_ndim - len(spec)), *(None,) * (data_ndim - key_ndim))
        return jax.sharding.NamedSharding(
            sharding.mesh, jax.sharding.PartitionSpec(*spec), memory_kind=sharding.memory_kind
        )
    return sharding


def _classify_numpy(
    path: tuple[Key, ...], value: np.ndarray[Any, Any] | np.generic
) -> tuple[Leaf, object] | str:
    if isinstance(value, np.ma.MaskedArray):
        return "a masked array"
    dtype: np.dtype[Any] = value.dtype
    if dtype.name not in STORABLE:
        return f"a numpy array of dtype {dtype}"
    if not dtype.isnative:
        return f"a numpy array of dtype {dtype.name} in foreign byte order"
    leaf = Leaf(path=path, kind=LeafKind.NUMPY, dtype=dtype.name, shape=tuple(value.shape))
    return leaf, value


def _bare(leaf: Leaf) -> tuple[object, ...]:
    return (leaf.kind, leaf.dtype, leaf.shape, leaf.impl)


def _with_values(tree: TreeSpec, values: dict[int, str]) -> TreeSpec:
    """The tree with other inline values; the same object when none differs."""
    if not values:
        return tree
    leaves = list(tree.leaves)
    for index, text in values.items():
        old = leaves[index]
        leaves[index] = Leaf(path=old.path, kind=old.kind, dtype=old.dtype, value=text)
    return TreeSpec(leaves=tuple(leaves))


def _refuse(refused: list[tuple[str, str]]) -> None:
    names = ", ".join(name for name, _ in refused)
    found = (
        refused[0][1]
        if len(refused) == 1
        else "; ".join(f"{name}: {words}" for name, words in refused)
    )
    raise StateRefused(names, found, _STORABLE_WORDS)


def _refuse_change(before: FlatState, now: FlatState) -> None:
    """Say in what the state changed between two steps."""
    old = {leaf.path: leaf for leaf in before.tree.leaves}
    new = {leaf.path: leaf for leaf in now.tree.leaves}
    changed = [
        path
        for path in {**old, **new}
        if path not in old or path not in new or _bare(old[path]) != _bare(new[path])
    ]
    if not changed:
        # Equal leaves in other containers: a class changed, or a list became a tuple.
        raise StateRefused("state", str(now.treedef), f"the structure before, {before.treedef}")
    refuse_difference(changed, found=new, expected=old)
