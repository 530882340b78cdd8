"""Index of a database of arrays, as bytes: the B+tree nodes of OCDBT. Pure.

The array library writes and merges such databases itself; what it does not have is a way to say
"these bytes lie there already". So the index of the files that are written straight from memory
is encoded here, in the format's published layout (version 0, not compressed), and read back by
the library, which checks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import google_crc32c

_MAGIC = bytes.fromhex("0cdb20de")
_INLINE, _STORED = 0, 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a value lies: a file, by its path below the database's folder, and bytes of it."""

    file: str
    offset: int
    length: int


Entry = tuple[bytes, bytes | Extent]
"""A key, and its value or where that lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """What a manifest says of a tree."""

    extent: Extent
    height: int
    key_count: int
    tree_bytes: int
    stored_bytes: int
    """Of values that are not in the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    key: bytes
    """First of the child's."""
    root: Root


def encode_tree(
    entries: Sequence[Entry], *, file: str, offset: int, node_bytes: int
) -> tuple[bytes, Root]:
    """Encode a tree.

    Args:
        entries: sorted by key, no key twice, at least one.
        file: where the nodes will lie.
        offset: from which byte.
        node_bytes: a node is closed at about so many; no entry may be larger.

    Returns:
        The bytes to be written there, and what the manifest says of them.
    """
    out = bytearray()

    def place(node: bytes) -> Extent:
        extent = Extent(file, offset + len(out), len(node))
        out.extend(node)
        return extent

    level = [
        _Child(key=group[0][0], root=_leaf_root(group, place(_leaf_node(group))))
        for group in _groups(entries, [_entry_bytes(entry) for entry in entries], node_bytes)
    ]
    height = 0
    while len(level) > 1:
        height += 1
        sizes = [len(child.key) + len(file) + 64 for child in level]
        level = [
            _Child(
                key=group[0].key,
                root=_parent_root(group, place(_parent_node(group, height)), height),
            )
            for group in _groups(level, sizes, node_bytes)
        ]
    return bytes(out), level[0].root


def _entry_bytes(entry: Entry) -> int:
    key, value = entry
    return len(key) + 32 + (len(value) if isinstance(value, bytes) else 0)


def _groups(items: Sequence[T], sizes: Sequence[int], limit: int) -> Iterator[Sequence[T]]:
    """Runs of at most `limit` bytes, and of two items at least where there are as many."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if total + size > limit and index - first >= 2:
            yield items[first:index]
            first, total = index, 0
        total += size
    yield items[first:]


def _leaf_root(entries: Sequence[Entry], extent: Extent) -> Root:
    return Root(
        extent=extent,
        height=0,
        key_count=len(entries),
        tree_bytes=extent.length,
        stored_bytes=sum(v.length for _, v in entries if isinstance(v, Extent)),
    )


def _parent_root(children: Sequence[_Child], extent: Extent, height: int) -> Root:
    return Root(
        extent=extent,
        height=height,
        key_count=sum(child.root.key_count for child in children),
        tree_bytes=extent.length + sum(child.root.tree_bytes for child in children),
        stored_bytes=sum(child.root.stored_bytes for child in children),
    )


def _leaf_node(entries: Sequence[Entry]) -> bytes:
    stored = [value for _, value in entries if isinstance(value, Extent)]
    inline = [value for _, value in entries if isinstance(value, bytes)]
    files = sorted({extent.file for extent in stored})
    number = {name: index for index, name in enumerate(files)}
    return _node(
        b"\0",
        _file_table(files),
        _varint(len(entries)),
        *_keys([key for key, _ in entries]),
        _varints(v.length if isinstance(v, Extent) else len(v) for _, v in entries),
        bytes(_STORED if isinstance(v, Extent) else _INLINE for _, v in entries),
        _varints(number[extent.file] for extent in stored),
        _varints(extent.offset for extent in stored),
        *inline,
    )


def _parent_node(children: Sequence[_Child], height: int) -> bytes:
    files = sorted({child.root.extent.file for child in children})
    number = {name: index for index, name in enumerate(files)}
    roots = [child.root for child in children]
    prefixes, suffixes, text = _keys([child.key for child in children])
    return _node(
        bytes([height]),
        _file_table(files),
        _varint(len(children)),
        prefixes,
        suffixes,
        # Keys below are whole: nothing of them is left out as common.
        _varints(0 for _ in children),
        text,
        _varints(number[root.extent.file] for root in roots),
        _varints(root.extent.offset for root in roots),
        _varints(root.extent.length for root in roots),
        _varints(root.key_count for root in roots),
        _varints(root.tree_bytes for root in roots),
        _varints(root.stored_bytes for root in roots),
    )


def _node(*parts: bytes) -> bytes:
    body = b"".join((b"\0\0", *parts))
    length = len(_MAGIC) + 8 + len(body) + 4
    whole = b"".join((_MAGIC, length.to_bytes(8, "little"), body))
    return whole + int(google_crc32c.value(whole)).to_bytes(4, "little")


def _file_table(files: Sequence[str]) -> bytes:
    # The part of a path that is a base of its own is empty: all lie below the database's folder.
    names = [name.encode() for name in files]
    prefixes, suffixes, text = _keys(names)
    return b"".join((_varint(len(names)), prefixes, suffixes, _varints(0 for _ in names), text))


def _keys(keys: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """Lengths shared with the key before, lengths of what is left, and what is left.

    Nothing is said to be shared: it would save a third of an index, and cost most of the time.
    """
    return bytes(max(len(keys) - 1, 0)), _varints(map(len, keys)), b"".join(keys)


def _varints(numbers: Iterator[int] | Sequence[int] | map[int]) -> bytes:
    return b"".join(map(_varint, numbers))


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SHORT[number]
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_SHORT = tuple(bytes([n]) for n in range(0x80))
