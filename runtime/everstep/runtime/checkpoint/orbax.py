"""The layout that Orbax reads: names of arrays and the metadata files beside them. Pure.

Orbax joins a leaf's keys with dots to name its array, reads the tree back from `_METADATA`, and
knows mappings and sequences only. Where two leaves of ours would be one of Orbax's, one of them is
escaped, there and here, so that no two ever meet.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from everstep.runtime.errors import StateRefused
from everstep.runtime.layout.scalars import decode_scalar
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec

HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
JSON_HANDLER = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
INDICATOR = "orbax.checkpoint"
MARKER = "commit_success.txt"
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarArray:
    """A Python scalar that Orbax wants as an array of rank 0."""

    name: str
    dtype: str
    value: bool | int | float | complex


@dataclass(frozen=True, slots=True, kw_only=True)
class OrbaxFiles:
    files: dict[str, bytes]
    """By path in the item's folder."""
    scalars: tuple[ScalarArray, ...]


def orbax_keys(tree: TreeSpec) -> tuple[tuple[str, ...], ...]:
    """The keys under which Orbax knows each leaf; no two leaves have the same joined name.

    Raises:
        StateRefused: a key that is not text that can be stored (a lone surrogate).
    """
    for leaf in tree.leaves:
        for key in leaf.path:
            try:
                key.name.encode()
            except UnicodeEncodeError as error:
                raise StateRefused(
                    ascii(leaf.name), "a key that is not valid Unicode", "text as a key"
                ) from error
    escaped: set[int] = set()
    while True:
        keys = [_keys(leaf.path, index in escaped) for index, leaf in enumerate(tree.leaves)]
        more = _collisions(tree, keys, escaped)
        if not more:
            return tuple(keys)
        # It ends: each round escapes one more at least, and no two escaped ones are the same.
        escaped |= more


def array_names(tree: TreeSpec) -> tuple[str | None, ...]:
    """Name of each leaf's array; None for leaves without bytes."""
    return tuple(
        ".".join(keys) if leaf.is_stored_as_bytes else None
        for leaf, keys in zip(tree.leaves, orbax_keys(tree), strict=True)
    )


def layout(tree: TreeSpec, chunks: Mapping[int, Sequence[int]]) -> OrbaxFiles:
    """The files that make one item's arrays a tree of Orbax, by path below the item."""
    keys = orbax_keys(tree)
    entries: dict[str, Any] = {}
    arrays: list[Any] = []
    strings: dict[str, str] = {}
    scalars: list[ScalarArray] = []
    for index, (leaf, names) in enumerate(zip(tree.leaves, keys, strict=True)):
        name = ".".join(names)
        kind, is_empty = _value_type(leaf)
        value: dict[str, Any] = {"value_type": kind, "skip_deserialize": is_empty}
        if leaf.kind in (LeafKind.ARRAY, LeafKind.PRNG_KEY):
            value["write_shape"] = list(leaf.shape)
            arrays.append(_array_metadata(name, leaf, chunks[index]))
        elif leaf.kind is LeafKind.SCALAR:
            python = decode_scalar(leaf.dtype, leaf.value or "")
            if kind == "string":
                strings[name] = str(python)
            elif not isinstance(python, str):
                scalars.append(ScalarArray(name=name, dtype=_SCALARS[type(python)], value=python))
        entries[str(names)] = {
            "key_metadata": [
                {"key": text, "key_type": 1 if key.kind is KeyKind.SEQUENCE else 2}
                for key, text in zip(leaf.path, names, strict=True)
            ],
            "value_metadata": value,
        }
    files = {
        "_METADATA": _json(
            {
                "tree_metadata": entries,
                "use_ocdbt": True,
                "use_zarr3": True,
                "store_array_data_equal_to_fill_value": True,
                "custom_metadata": None,
            }
        ),
        "array_metadatas/process_0": _json({"array_metadatas": arrays}),
    }
    if strings:
        files["_strings.json"] = _json(strings)
    return OrbaxFiles(files=files, scalars=tuple(scalars))


def step_files(
    handlers: Mapping[str, str],
    *,
    begun_s: float,
    committed_s: float,
    custom: Any = None,
) -> dict[str, bytes]:
    """The files of a step beside its items, but the marker.

    Args:
        handlers: Orbax's handler by item, of those that it can read.
        begun_s: Unix seconds.
        committed_s: Unix seconds.
        custom: what the user said of the step, as JSON.
    """
    return {
        "_CHECKPOINT_METADATA": _json(
            {
                "item_handlers": dict(handlers),
                "metrics": {},
                "performance_metrics": {},
                "init_timestamp_nsecs": int(begun_s * 1e9),
                "commit_timestamp_nsecs": int(committed_s * 1e9),
                "custom_metadata": custom or {},
            }
        ),
        INDICATOR: b"",
    }


_SCALARS: dict[type, str] = {
    bool: "bool",
    int: "int64",
    float: "float64",
    complex: "complex128",
}


_EMPTY = {"list": "List", "tuple": "Tuple", "dict": "Dict", "node": "None"}
"""What Orbax itself writes: it knows no other node, and has None for it."""


def _value_type(leaf: Leaf) -> tuple[str, bool]:
    """Orbax's word for a leaf, and whether there is nothing to read for it."""
    match leaf.kind:
        case LeafKind.ARRAY | LeafKind.PRNG_KEY | LeafKind.NUMPY:
            # Also for device arrays: Orbax then loads without a target, as numpy. What a target
            # asks for it gives in any case. `jax.Array` without a target would need a file that
            # lists every device id of the run that saved.
            return "np.ndarray", False
        case LeafKind.NONE:
            return "None", True
        case LeafKind.EMPTY:
            return _EMPTY.get(leaf.value or "", "Dict"), True
        case LeafKind.SCALAR:
            value = decode_scalar(leaf.dtype, leaf.value or "")
            if isinstance(value, str) or (type(value) is int and value not in _INT64):
                return "string", False
            return ("np.ndarray" if isinstance(value, complex) else "scalar"), False


def _array_metadata(name: str, leaf: Leaf, chunk: Sequence[int]) -> dict[str, Any]:
    extended = {"random_key_impl": leaf.impl} if leaf.kind is LeafKind.PRNG_KEY else None
    return {
        "array_metadata": {
            "param_name": name,
            "write_shape": list(leaf.shape),
            "chunk_shape": list(chunk),
            "ext_metadata": extended,
        }
    }


def _keys(path: tuple[Key, ...], is_escaped: bool) -> tuple[str, ...]:
    if not is_escaped:
        return tuple(key.name for key in path)
    return tuple(_escape(key) for key in path)


def _escape(key: Key) -> str:
    """Injective over kind and name together, and free of dots."""
    text = re.sub(r"[%.~]", lambda match: f"%{ord(match[0]):02X}", key.name)
    return text if key.kind is KeyKind.DICT else f"{text}~{key.kind.value}"


def _collisions(tree: TreeSpec, keys: Sequence[tuple[str, ...]], escaped: set[int]) -> set[int]:
    """Leaves to escape next, of those that Orbax would take for one or put into one container."""
    by_name: dict[str, dict[_Path, set[int]]] = defaultdict(lambda: defaultdict(set))
    by_prefix: dict[tuple[str, ...], dict[_Path, set[int]]] = defaultdict(lambda: defaultdict(set))
    for index, leaf in enumerate(tree.leaves):
        by_name[".".join(keys[index])][leaf.path].add(index)
        for length in range(1, len(leaf.path) + 1):
            by_prefix[keys[index][:length]][leaf.path[:length]].add(index)
    found: set[int] = set()
    for owners in (*by_name.values(), *by_prefix.values()):
        if len(owners) > 1:
            # The plainest owner keeps its name as long as others can still give way.
            plainest = min(owners, key=lambda p: (_oddness(p), min(owners[p])))
            others = {i for owner, members in owners.items() if owner != plainest for i in members}
            found |= (others - escaped) or (owners[plainest] - escaped)
    return found


_Path = tuple[Key, ...]


def _oddness(path: _Path) -> int:
    return sum(key.kind is KeyKind.DICT_INT or bool(set(key.name) & set(".%~")) for key in path)


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)
