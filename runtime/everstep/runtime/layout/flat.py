"""A state taken apart: its leaves in order, and what is needed to put it together again.

`engine.state` makes one; `snapshot` copies out of it, `restore` fills one. It names no jax type, so
that rooms below `loop` can share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from everstep.runtime.layout.tree import LeafKind, TreeSpec


class TreeDef(Protocol):
    """The part of jax's `PyTreeDef` that is used here."""

    def unflatten(self, leaves: Iterable[object], /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """Invariant: `len(values) == len(tree.leaves)`."""

    tree: TreeSpec
    values: tuple[object, ...]
    """One per leaf of `tree`; None for the kinds NONE and EMPTY. Typed PRNG keys are here as
    their uint32 key data, Python scalars as they are."""
    treedef: TreeDef
    """Structure of the state, in which None and empty containers are containers."""

    def without_values(self) -> FlatState:
        """The same tree and structure, holding on to no array.

        For whoever keeps one from step to step: the arrays of an old step are device memory.
        """
        return FlatState(
            tree=self.tree, values=(None,) * len(self.tree.leaves), treedef=self.treedef
        )

    def unflatten(self, values: Sequence[object]) -> object:
        """Put a state of this structure together from values in the order of `tree.leaves`."""
        return self.treedef.unflatten(
            value
            for leaf, value in zip(self.tree.leaves, values, strict=True)
            if leaf.kind not in (LeafKind.NONE, LeafKind.EMPTY)
        )
