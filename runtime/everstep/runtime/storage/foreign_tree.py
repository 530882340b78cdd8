"""What Orbax keeps of a tree beside its arrays, read as leaves of ours. Pure.

Orbax knows mappings and sequences only: a namedtuple, a dataclass and a custom node are mappings to
it, an integer key is text, and an empty node of a class that it does not know is None. So its tree
says less than a state's own; `fitted` gives it the words of a wanted state where the two agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from everstep.runtime.errors import ManifestCorrupt
from everstep.runtime.layout.scalars import Scalar, encode_scalar
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec

TREE_FILE = "_METADATA"
ARRAYS_FOLDER = "array_metadatas"
STRINGS_FILE = "_strings.json"

_EMPTY = {"Dict": "dict", "List": "list", "Tuple": "tuple", "NamedTuple": "node"}
_SEQUENCE = 1
_PYTHON = {"bool": bool, "int64": int, "float64": float, "complex128": complex}


class _Key(msgspec.Struct, frozen=True):
    key: str
    key_type: int


class _Value(msgspec.Struct, frozen=True):
    value_type: str
    skip_deserialize: bool = False


class _Entry(msgspec.Struct, frozen=True):
    key_metadata: tuple[_Key, ...]
    value_metadata: _Value


class _Tree(msgspec.Struct, frozen=True):
    tree_metadata: dict[str, _Entry]
    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    store_array_data_equal_to_fill_value: bool = False
    custom_metadata: Any = None


class _Extended(msgspec.Struct, frozen=True):
    random_key_impl: str | None = None


class _Array(msgspec.Struct, frozen=True):
    param_name: str
    ext_metadata: _Extended | None = None


class _ArrayEntry(msgspec.Struct, frozen=True):
    array_metadata: _Array


class _Arrays(msgspec.Struct, frozen=True):
    array_metadatas: tuple[_ArrayEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignLeaf:
    """One entry of Orbax's tree, before anything is known of its array."""

    path: tuple[Key, ...]
    value_type: str
    is_elsewhere: bool
    """Its value is in the file of structure that old versions wrote."""

    @property
    def array(self) -> str:
        """Orbax's name of its array."""
        return ".".join(key.name for key in self.path)

    @property
    def where(self) -> str:
        """For people."""
        return Leaf(path=self.path, kind=LeafKind.NONE).name

    @property
    def is_text(self) -> bool:
        return self.value_type == "string"

    @property
    def is_empty(self) -> bool:
        return self.value_type == "None" or self.value_type in _EMPTY

    @property
    def has_array(self) -> bool:
        return not self.is_empty and not self.is_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTree:
    """`_METADATA`. What older versions did not write has their meaning of its absence."""

    leaves: tuple[ForeignLeaf, ...]
    is_ocdbt: bool | None
    """None: it is not said, and the files tell."""
    is_zarr3: bool
    is_whole: bool
    """Every chunk is stored; else one that is missing is one of zeros."""
    custom_metadata: Any


def decode_tree(data: bytes, *, where: str) -> ForeignTree:
    """Read `_METADATA`.

    Raises:
        ManifestCorrupt: it does not decode.
    """
    try:
        found = msgspec.json.decode(data, type=_Tree)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestCorrupt(where, TREE_FILE, "Orbax's description of a tree", str(error)) from (
            error
        )
    leaves = tuple(
        ForeignLeaf(
            path=tuple(_key(key) for key in entry.key_metadata),
            value_type=entry.value_metadata.value_type,
            is_elsewhere=entry.value_metadata.skip_deserialize
            and entry.value_metadata.value_type != "None"
            and entry.value_metadata.value_type not in _EMPTY,
        )
        for entry in found.tree_metadata.values()
    )
    # Saves of a part at a time leave an empty node where others have put children since.
    parents = {leaf.path[:length] for leaf in leaves for length in range(len(leaf.path))}
    return ForeignTree(
        leaves=tuple(leaf for leaf in leaves if not (leaf.is_empty and leaf.path in parents)),
        is_ocdbt=found.use_ocdbt,
        is_zarr3=found.use_zarr3,
        is_whole=found.store_array_data_equal_to_fill_value,
        custom_metadata=found.custom_metadata,
    )


def decode_key_kinds(data: bytes, *, where: str, name: str) -> dict[str, str]:
    """Read one file of `array_metadatas`: kinds of typed PRNG keys, by name of the array.

    Raises:
        ManifestCorrupt: it does not decode.
    """
    try:
        found = msgspec.json.decode(data, type=_Arrays)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestCorrupt(where, name, "Orbax's description of arrays", str(error)) from error
    kinds: dict[str, str] = {}
    for entry in found.array_metadatas:
        array = entry.array_metadata
        if array.ext_metadata is not None and array.ext_metadata.random_key_impl is not None:
            kinds[array.param_name] = array.ext_metadata.random_key_impl
    return kinds


def decode_strings(data: bytes, *, where: str) -> dict[str, str]:
    """Read `_strings.json`.

    Raises:
        ManifestCorrupt: it does not decode.
    """
    try:
        return msgspec.json.decode(data, type=dict[str, str])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestCorrupt(where, STRINGS_FILE, "Orbax's texts", str(error)) from error


def empty_leaf(found: ForeignLeaf) -> Leaf:
    if found.value_type == "None":
        return Leaf(path=found.path, kind=LeafKind.NONE)
    return Leaf(path=found.path, kind=LeafKind.EMPTY, value=_EMPTY[found.value_type])


def text_leaf(found: ForeignLeaf, text: str) -> Leaf:
    return Leaf(path=found.path, kind=LeafKind.SCALAR, dtype="str", value=encode_scalar(text))


def array_leaf(found: ForeignLeaf, dtype: str, shape: Sequence[int], key_kind: str | None) -> Leaf:
    """A leaf with an array; a Python scalar has its value still to come (`with_scalar`)."""
    if key_kind is not None:
        kind = LeafKind.PRNG_KEY
    elif found.value_type == "jax.Array":
        kind = LeafKind.ARRAY
    else:
        kind = LeafKind.NUMPY
    return Leaf(path=found.path, kind=kind, dtype=dtype, shape=tuple(shape), impl=key_kind)


def is_python(found: ForeignLeaf, leaf: Leaf) -> bool:
    """Whether what Orbax calls a scalar is one of Python's: numpy's have other dtypes."""
    return found.value_type == "scalar" and not leaf.shape and leaf.dtype in _PYTHON


def python_type(dtype: str) -> str | None:
    """The type of Python whose values are kept as this dtype."""
    found = _PYTHON.get(dtype)
    return None if found is None else found.__name__


def with_scalar(leaf: Leaf, value: Scalar) -> Leaf:
    """The same leaf as a Python scalar of this value."""
    return Leaf(
        path=leaf.path,
        kind=LeafKind.SCALAR,
        dtype=type(value).__name__,
        value=encode_scalar(value),
    )


def fitted(
    saved: TreeSpec, stored: Mapping[int, Leaf], scalars: Mapping[int, Scalar], wanted: TreeSpec
) -> TreeSpec:
    """The saved tree in the words of a wanted one, where they name the same thing.

    Paths are compared by their keys' text. Nothing is converted: a leaf takes another word only
    where that word says the same bytes. All else stays as it is, and a comparison names it.

    Args:
        saved: the tree as Orbax's files tell it.
        stored: by leaf with an array of rank 0, the leaf as an array.
        scalars: the values of those that a type of Python can hold.
        wanted: the tree that a program asks for.
    """
    by_names: dict[tuple[str, ...], Leaf | None] = {}
    for leaf in wanted.leaves:
        names = _names(leaf.path)
        # Two keys with one text (0 and "0") are one to Orbax; it cannot have saved both.
        by_names[names] = None if names in by_names else leaf
    leaves: list[Leaf] = []
    for index, leaf in enumerate(saved.leaves):
        other = by_names.get(_names(leaf.path))
        if other is None:
            leaves.append(leaf)
            continue
        again = _adapted(leaf, stored.get(index), scalars.get(index), other)
        leaves.append(msgspec.structs.replace(again, path=other.path))
    return TreeSpec(leaves=tuple(leaves))


def _adapted(leaf: Leaf, array: Leaf | None, scalar: Scalar | None, wanted: Leaf) -> Leaf:
    if leaf.kind is LeafKind.NONE and wanted.kind is LeafKind.EMPTY:
        # Orbax writes None for an empty node of any class that is no list, tuple or mapping.
        return wanted
    if array is None:
        return leaf
    if wanted.kind in (LeafKind.ARRAY, LeafKind.NUMPY):
        return msgspec.structs.replace(array, kind=wanted.kind)
    if (
        wanted.kind is LeafKind.SCALAR
        and scalar is not None
        and wanted.dtype == type(scalar).__name__
    ):
        return with_scalar(leaf, scalar)
    return leaf


def _key(key: _Key) -> Key:
    return Key(KeyKind.SEQUENCE if key.key_type == _SEQUENCE else KeyKind.DICT, key.key)


def _names(path: Sequence[Key]) -> tuple[str, ...]:
    return tuple(key.name for key in path)
