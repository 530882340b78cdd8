"""Whether a saved tree fits a wanted one, leaf by leaf, with all differences in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.runtime.errors import StateRefused
from everstep.runtime.layout.tree import Key, Leaf, LeafKind, TreeSpec

Path = tuple[Key, ...]
_BARE = (LeafKind.ARRAY, LeafKind.NUMPY)


def describe(leaf: Leaf) -> str:
    """A leaf's kind, dtype and shape, for people."""
    if leaf.kind in (LeafKind.NONE, LeafKind.EMPTY):
        return "None" if leaf.kind is LeafKind.NONE else "an empty container"
    if leaf.kind is LeafKind.SCALAR:
        return f"a Python {leaf.dtype}"
    shape = ",".join(map(str, leaf.shape))
    if leaf.kind is LeafKind.PRNG_KEY:
        return f"PRNG key data {leaf.impl}[{shape}]"
    return f"{'numpy ' if leaf.kind is LeafKind.NUMPY else ''}{leaf.dtype}[{shape}]"


def fits(saved: Leaf, wanted: Leaf) -> bool:
    """Whether the bytes of one leaf are those of the other.

    A device array and a host array of one dtype and shape are the same bytes.
    """
    is_same_kind = saved.kind is wanted.kind or (saved.kind in _BARE and wanted.kind in _BARE)
    return (
        is_same_kind
        and saved.dtype == wanted.dtype
        and saved.shape == wanted.shape
        and saved.impl == wanted.impl
    )


def match_leaves(saved: TreeSpec, wanted: TreeSpec) -> tuple[int, ...]:
    """For each wanted leaf, the index of the saved one.

    Raises:
        StateRefused: names every leaf that is missing, unexpected or different, with what was
            expected (the program's state) and what was found (the saved one).
    """
    by_path: dict[Path, int] = {leaf.path: index for index, leaf in enumerate(saved.leaves)}
    wanted_by_path = {leaf.path: leaf for leaf in wanted.leaves}
    found = {path: saved.leaves[index] for path, index in by_path.items()}
    bad = [
        path
        for path in {**wanted_by_path, **found}
        if path not in found
        or path not in wanted_by_path
        or not fits(found[path], wanted_by_path[path])
    ]
    if bad:
        refuse_difference(bad, found=found, expected=wanted_by_path)
    return tuple(by_path[leaf.path] for leaf in wanted.leaves)


def refuse_difference(
    paths: list[Path], *, found: Mapping[Path, Leaf], expected: Mapping[Path, Leaf]
) -> None:
    """Raise `StateRefused` for leaves that differ between two trees."""

    def words(tree: Mapping[Path, Leaf], path: Path) -> str:
        return describe(tree[path]) if path in tree else "nothing"

    names = [(expected.get(path) or found[path]).name for path in paths]
    raise StateRefused(
        ", ".join(names),
        "; ".join(words(found, path) for path in paths),
        "; ".join(words(expected, path) for path in paths),
    )
