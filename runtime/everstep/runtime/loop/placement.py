"""Which sharding each leaf of a state gets, and how a fresh state is built on it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from everstep.runtime.errors import StateRefused

REPLICATED_BYTES_SAID = 16 << 20
log = logging.getLogger("everstep")


def abstract_of(init: Any) -> Any:
    """What `init` would give, without computing it; a tree that is there already is itself."""
    return jax.eval_shape(init) if callable(init) else init


def is_array(leaf: Any) -> bool:
    """Whether a leaf lives on devices once it is placed. Plain values and strings do not."""
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def resolve_shardings(shardings: Any, abstract: Any, mesh: Mesh) -> list[Any]:
    """One sharding a leaf of `abstract`, in order; None for leaves that are no device array.

    Args:
        shardings: a tree, a prefix of one, or a function from the abstract tree to one. None, as a
            whole or for a leaf, means replicated over `mesh`.

    Raises:
        StateRefused: a leaf cannot be divided as asked; all such leaves are named, with sizes.
    """
    if callable(shardings) and not isinstance(shardings, Sharding):
        shardings = shardings(abstract)
    leaves, structure = jax.tree.flatten(abstract)
    treedef: Any = structure
    if shardings is None:
        wanted: list[Any] = [None] * len(leaves)
    else:
        spread = jax.tree.broadcast(shardings, abstract, is_leaf=lambda x: x is None)
        wanted = treedef.flatten_up_to(spread)
    replicated = NamedSharding(mesh, PartitionSpec())
    resolved: list[Any] = []
    silent_bytes = 0
    for leaf, sharding in zip(leaves, wanted, strict=True):
        if not is_array(leaf):
            resolved.append(None)
        elif sharding is None:
            silent_bytes += 0 if shardings is not None else _size_bytes(leaf)
            resolved.append(replicated)
        else:
            resolved.append(sharding)
    _refuse_indivisible(abstract, resolved)
    if silent_bytes > REPLICATED_BYTES_SAID:
        log.warning(
            "no shardings given: %d MiB are replicated on each of %d devices",
            silent_bytes >> 20,
            mesh.size,
        )
    return resolved


def _refuse_indivisible(abstract: Any, shardings: list[Any]) -> None:
    bad: list[str] = []
    named = jax.tree_util.tree_leaves_with_path(abstract)
    for (path, leaf), sharding in zip(named, shardings, strict=True):
        if sharding is None:
            continue
        try:
            sharding.shard_shape(tuple(leaf.shape))
        except ValueError as error:
            name = jax.tree_util.keystr(path)
            bad.append(f"{name} {tuple(leaf.shape)}: {' '.join(str(error).split())}")
    if bad:
        raise StateRefused(
            "shardings", "; ".join(bad), "every sharded dimension divisible by its mesh axes"
        )


def _size_bytes(leaf: Any) -> int:
    size: int = math.prod(leaf.shape) * leaf.dtype.itemsize
    return size


def build_fresh(init: Any, abstract: Any, shardings: list[Any]) -> Any:
    """Evaluate a function `init` once, or place a tree that is there already."""
    treedef = jax.tree.structure(abstract)
    if callable(init):
        build: Callable[[], Any] = init
        state = jax.jit(build, out_shardings=jax.tree.unflatten(treedef, shardings))()
        # Every process compiled and ran the same program; waiting here keeps its cost in the
        # restore, where people look for it.
        return jax.block_until_ready(state)
    leaves = jax.tree.leaves(init)
    placed = [_place(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)]
    return jax.tree.unflatten(treedef, placed)


def _place(leaf: Any, sharding: Any) -> Any:
    if sharding is None:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise StateRefused("init", "a ShapeDtypeStruct", "a function or real arrays to start from")
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _place(jax.random.key_data(leaf), NamedSharding(sharding.mesh, PartitionSpec()))
        return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(leaf)))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
