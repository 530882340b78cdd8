"""Where the arrays of a state are to lie."""

from __future__ import annotations

from typing import Any

import jax


def with_shardings(abstract: Any, shardings: list[Any]) -> Any:
    """The abstract state with each array's sharding attached; plain values stay."""
    leaves, structure = jax.tree.flatten(abstract)
    treedef: Any = structure
    return treedef.unflatten(
        leaf
        if sharding is None
        else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )
