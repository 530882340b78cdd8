"""Whether a saved tree fits a wanted one, leaf by leaf, with all differences in words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from everstep.runtime.errors import StateRefused
from everstep.runtime.layout.casts import can_cast
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
    found = match_some(saved, wanted)
    return tuple(match.saved for match in found if match.saved is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Where a wanted leaf comes from."""

    saved: int | None = None
    """Index in the saved tree; None when it does not come from there."""
    is_missing: bool = False
    """Wanted, and not saved: somebody has to make it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRules:
    """What may differ between a saved tree and a wanted one. Nothing, as it is made."""

    is_wanted: Callable[[Leaf], bool] | None = None
    """Of the leaves of both trees, those that take part; all when None."""
    may_cast: Callable[[Leaf], bool] = lambda _: False
    """Whether a wanted leaf may have another dtype than the saved one."""
    renamed: Mapping[Path, Path] = field(default_factory=dict[Path, Path])
    """Saved path by wanted path, where they differ."""
    may_be_missing: bool = False


def match_some(
    saved: TreeSpec, wanted: TreeSpec, rules: MatchRules | None = None
) -> tuple[Match, ...]:
    """Where each wanted leaf comes from.

    Raises:
        StateRefused: as `match_leaves`, for all that the rules do not allow.
    """
    rules = rules or MatchRules()
    is_wanted = rules.is_wanted or (lambda _: True)
    by_path: dict[Path, int] = {leaf.path: index for index, leaf in enumerate(saved.leaves)}
    expected: dict[Path, Leaf] = {}
    found: dict[Path, Leaf] = {}
    bad: list[Path] = []
    matches: list[Match] = []
    used: set[Path] = set()
    for leaf in wanted.leaves:
        if not is_wanted(leaf):
            used.add(leaf.path)
            matches.append(Match())
            continue
        path = rules.renamed.get(leaf.path, leaf.path)
        used.add(path)
        expected[leaf.path] = leaf
        index = by_path.get(path)
        matches.append(Match(saved=index, is_missing=index is None))
        if index is None:
            if not rules.may_be_missing:
                bad.append(leaf.path)
            continue
        found[leaf.path] = saved.leaves[index]
        if not _may_become(saved.leaves[index], leaf, rules):
            bad.append(leaf.path)
    for leaf in saved.leaves:
        if leaf.path not in used and is_wanted(leaf):
            # Under its own name: nothing that is wanted has it, unless by another's.
            found[leaf.path] = leaf
            bad.append(leaf.path)
    if bad:
        refuse_difference(bad, found=found, expected=expected)
    return tuple(matches)


def _may_become(saved: Leaf, wanted: Leaf, rules: MatchRules) -> bool:
    if fits(saved, wanted):
        return True
    is_array = saved.kind in _BARE and wanted.kind in _BARE
    is_same_shape = is_array and saved.shape == wanted.shape
    return is_same_shape and can_cast(saved.dtype, wanted.dtype) and rules.may_cast(wanted)


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
