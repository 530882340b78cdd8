"""The leaves of a training state: paths, kinds, dtypes, shapes, and the inline values.

A `TreeSpec` is equal on all hosts of an incarnation and says nothing of how arrays are sharded.
Containers are not described beyond the path: the user's own `init_state` gives the structure, and
a restore matches leaves by path.
"""

from __future__ import annotations

import hashlib
from enum import Enum

import msgspec


class KeyKind(Enum):
    """How a container names its child."""

    DICT = "dict"
    DICT_INT = "dict-int"
    """A dict whose key is an integer; `Key.name` is its decimal form."""
    SEQUENCE = "sequence"
    """list or tuple; `Key.name` is the index."""
    ATTRIBUTE = "attribute"
    """namedtuple, dataclass, or a registered custom node."""


class Key(msgspec.Struct, frozen=True, array_like=True):
    kind: KeyKind
    name: str


class LeafKind(Enum):
    ARRAY = "array"
    """`jax.Array` of a numeric dtype."""
    PRNG_KEY = "prng-key"
    """Typed key array: stored as its uint32 key data; `Leaf.dtype` is `uint32`, `Leaf.shape` is
    the shape of the key data, `Leaf.impl` names the implementation."""
    NUMPY = "numpy"
    """Host numpy array or numpy scalar, equal on all hosts."""
    SCALAR = "scalar"
    """Python bool, int, float, complex or str; its value is inline."""
    NONE = "none"
    EMPTY = "empty"
    """An empty container (`{}`, `[]`, `()`), kept so that structure can be compared."""


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    path: tuple[Key, ...]
    kind: LeafKind
    dtype: str = ""
    """numpy / ml_dtypes name (`float32`, `bfloat16`, `int4`, …); for SCALAR the Python type's."""
    shape: tuple[int, ...] = ()
    impl: str | None = None
    value: str | None = None
    """SCALAR: exact; `repr` for int, bool, str; `float.hex` for float; two hex for complex.
    EMPTY: `list`, `tuple`, `dict` or `node`; it does not count when trees are compared."""

    @property
    def name(self) -> str:
        """For people: `params['layers'][0].kernel` style, unique within a tree."""
        parts: list[str] = []
        for key in self.path:
            if key.kind is KeyKind.ATTRIBUTE:
                parts.append(f".{key.name}" if parts else key.name)
            elif key.kind is KeyKind.DICT:
                parts.append(f"[{key.name!r}]")
            else:
                parts.append(f"[{key.name}]")
        return "".join(parts) or "<root>"

    @property
    def is_stored_as_bytes(self) -> bool:
        return self.kind in (LeafKind.ARRAY, LeafKind.PRNG_KEY, LeafKind.NUMPY)


class TreeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All leaves, in the order of jax's flattening (None and empty containers kept as leaves)."""

    leaves: tuple[Leaf, ...]

    @property
    def fingerprint(self) -> str:
        """Equal exactly when two states can restore each other (inline values do not count)."""
        digest = hashlib.sha256()
        for leaf in self.leaves:
            bare = msgspec.structs.replace(leaf, value=None)
            digest.update(msgspec.json.encode(bare))
        return digest.hexdigest()[:32]
