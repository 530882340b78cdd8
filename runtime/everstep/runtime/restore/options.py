"""What a restore may do besides giving back exactly what was saved. Pure.

Leaves are called by the names that messages have (`['params'][0].kernel`), or by their keys with
slashes between (`params/0/kernel`). In a pattern `*` stands for any text and `?` for one letter;
a pattern that names a container means all that is in it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from everstep.runtime.errors import ConfigurationError
from everstep.runtime.layout.compare import Match, MatchRules, Path, match_some
from everstep.runtime.layout.tree import Leaf, LeafKind, TreeSpec

Initialiser = Callable[[Leaf], object]
"""Makes a leaf that was not saved: of the leaf's `shape` and `dtype`."""


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """As it is made: everything, exactly as it was saved."""

    only: tuple[str, ...] | None = None
    """Patterns of the leaves that are restored. The others stay as they are in `like`, and what
    was saved of them is not looked at."""
    cast: bool | tuple[str, ...] = False
    """Whether a leaf may have another dtype than was saved: all, or those of these patterns."""
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names under which leaves were saved, by the names that they have now."""
    missing: Initialiser | None = None
    """Makes the leaves that were not saved. Without it they are an error."""
    part: str = ""
    """Of which part of the state: all names begin with it."""

    @classmethod
    def given(
        cls,
        *,
        only: str | Sequence[str] | None = None,
        cast: bool | str | Sequence[str] = False,
        renamed: Mapping[str, str] | None = None,
        missing: Initialiser | None = None,
    ) -> RestoreOptions:
        """From what a user wrote.

        Raises:
            ConfigurationError: a value of another type; names it.
        """
        if renamed is not None and not _are_texts(_pairs(renamed)):
            raise ConfigurationError("renamed", renamed, "a dict from wanted names to saved ones")
        if missing is not None and not callable(missing):
            raise ConfigurationError("missing", missing, "a function from a leaf to its value")
        return cls(
            only=None if only is None else _patterns("only", only),
            cast=cast if isinstance(cast, bool) else _patterns("cast", cast),
            renamed=dict(renamed or {}),
            missing=missing,
        )

    @property
    def is_plain(self) -> bool:
        """Whether nothing was asked for besides what was saved."""
        return replace(self, part="") == RestoreOptions()

    def of_part(self, part: str) -> RestoreOptions:
        """The same for one named part, whose leaves are called `part/…` or `part['…']`."""
        return replace(self, part=part)

    def check(self, wanted: Mapping[str, TreeSpec]) -> None:
        """Refuse names and patterns that mean nothing.

        Args:
            wanted: the wanted trees by part; "" is a state without parts.

        Raises:
            ConfigurationError: names it, and the nearest that there are.
        """
        leaves = [(part, leaf) for part, tree in wanted.items() for leaf in tree.leaves]
        names = [name for part, leaf in leaves for name in _spell(part, leaf.path)]
        cast = () if isinstance(self.cast, bool) else self.cast
        for option, patterns in (("only", self.only or ()), ("cast", cast)):
            for pattern in patterns:
                if not any(_is_match(part, leaf, [_compiled(pattern)]) for part, leaf in leaves):
                    raise ConfigurationError(
                        option, pattern, f"the name of a leaf{_nearest(pattern, names)}"
                    )
        for name in self.renamed:
            if not any(name in _spell(part, leaf.path) for part, leaf in leaves):
                raise ConfigurationError(
                    "renamed", name, f"the name of a wanted leaf{_nearest(name, names)}"
                )

    def match(self, saved: TreeSpec, wanted: TreeSpec) -> tuple[Match, ...]:
        """Where each leaf of the part comes from.

        Raises:
            StateRefused: the trees differ in what these options do not allow; names all leaves.
            ConfigurationError: a renaming of what was not saved, or twice the same.
        """
        rules = MatchRules(
            is_wanted=None if self.only is None else self._is_chosen,
            may_cast=self._may_cast,
            renamed=self._renamed(saved, wanted),
            may_be_missing=self.missing is not None,
        )
        return match_some(saved, wanted, rules)

    def _is_chosen(self, leaf: Leaf) -> bool:
        return _is_match(self.part, leaf, self._chosen)

    def _may_cast(self, leaf: Leaf) -> bool:
        if isinstance(self.cast, bool):
            return self.cast
        return _is_match(self.part, leaf, self._castable)

    @cached_property
    def _chosen(self) -> list[re.Pattern[str]]:
        return [_compiled(pattern) for pattern in self.only or ()]

    @cached_property
    def _castable(self) -> list[re.Pattern[str]]:
        return [] if isinstance(self.cast, bool) else [_compiled(pattern) for pattern in self.cast]

    def _renamed(self, saved: TreeSpec, wanted: TreeSpec) -> dict[Path, Path]:
        """Saved paths by wanted paths; those of other parts are left out."""
        if not self.renamed:
            return {}
        names_wanted, names_saved = _by_name(self.part, wanted), _by_name(self.part, saved)
        paths: dict[Path, Path] = {}
        for new, old in self.renamed.items():
            if new not in names_wanted:
                continue
            if old not in names_saved:
                known = [name for leaf in saved.leaves for name in _spell(self.part, leaf.path)]
                raise ConfigurationError(
                    f"renamed {new}", old, f"the name of a saved leaf{_nearest(old, known)}"
                )
            for name, leaf in ((new, names_wanted[new]), (old, names_saved[old])):
                if leaf is None:
                    raise ConfigurationError(
                        f"renamed {new}", name, "one leaf: several are spelled like this"
                    )
            found_new, found_old = names_wanted[new], names_saved[old]
            if found_new is not None and found_old is not None:
                if found_new.path in paths:
                    raise ConfigurationError("renamed", new, "each leaf once")
                paths[found_new.path] = found_old.path
        self._check_doubled(paths, saved, wanted)
        return paths

    def _check_doubled(self, paths: Mapping[Path, Path], saved: TreeSpec, wanted: TreeSpec) -> None:
        """No saved leaf is taken for two wanted ones."""
        by_saved: dict[Path, str] = {}
        names = {leaf.path: leaf.name for leaf in saved.leaves}
        for leaf in wanted.leaves:
            if self.only is not None and not self._is_chosen(leaf):
                continue
            path = paths.get(leaf.path, leaf.path)
            if path in by_saved:
                raise ConfigurationError(
                    "renamed",
                    f"{names[path]} for {by_saved[path]} and {leaf.name}",
                    "each saved leaf once",
                )
            if path in names:
                by_saved[path] = leaf.name


EVERYTHING = RestoreOptions()


def is_wanted_value(leaf: Leaf, dtype: str, shape: Sequence[int]) -> bool:
    """Whether what an initialiser made is what the leaf is to be."""
    return leaf.dtype == dtype and leaf.shape == tuple(shape)


def needs_value(leaf: Leaf) -> bool:
    """Whether a leaf that is missing has to be made: nothing has no value."""
    return leaf.kind not in (LeafKind.NONE, LeafKind.EMPTY)


def _spell(part: str, path: Path) -> tuple[str, str]:
    """The two names of a leaf or container."""
    name = Leaf(path=path, kind=LeafKind.NONE).name if path else ""
    plain = "/".join(key.name for key in path)
    if not part:
        return name or "<root>", plain or "<root>"
    return f"{part}{name}", f"{part}/{plain}" if plain else part


def _by_name(part: str, tree: TreeSpec) -> dict[str, Leaf | None]:
    """Leaves by both of their names; None where a name is that of several."""
    found: dict[str, Leaf | None] = {}
    for leaf in tree.leaves:
        for name in dict.fromkeys(_spell(part, leaf.path)):
            found[name] = None if name in found else leaf
    return found


def _is_match(part: str, leaf: Leaf, patterns: Iterable[re.Pattern[str]]) -> bool:
    """Whether a pattern names the leaf, or a container that it is in."""
    for length in range(len(leaf.path), -1 if part else 0, -1):
        names = _spell(part, leaf.path[:length])
        if any(pattern.fullmatch(name) for pattern in patterns for name in names):
            return True
    return not leaf.path and any(pattern.fullmatch("<root>") for pattern in patterns)


def _compiled(pattern: str) -> re.Pattern[str]:
    # Not `fnmatch`: to it the brackets in the names of leaves are sets of letters.
    text = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(text, re.DOTALL)


def _patterns(option: str, given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    found: tuple[object, ...] = tuple(given) if isinstance(given, Iterable) else ()
    if not found or not _are_texts(found):
        raise ConfigurationError(option, given, "a pattern of leaf names, or several")
    return tuple(str(pattern) for pattern in found)


def _pairs(mapping: object) -> list[object]:
    if not isinstance(mapping, Mapping):
        return [None]
    return [text for pair in mapping.items() for text in pair]


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    near = near or [other for other in known if name.strip("*") in other][:3]
    return f"; the nearest: {', '.join(near)}" if near else ""
