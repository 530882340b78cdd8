"""What differs between two steps, leaf by leaf, without holding either in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.cli.opened import ItemReader, spans
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.compare import describe, fits
from everstep.runtime.layout.dtypes import numpy_dtype
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.scalars import inline_values
from everstep.runtime.layout.tree import Key, LeafKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One leaf that is not the same in both."""

    leaf: str
    kind: str
    """`only in A`, `only in B`, `other kind` or `values`."""
    words: str
    changed: int = 0
    """Elements whose bytes differ."""
    elements: int = 0
    largest: float | None = None
    """Largest absolute difference, where one can be taken."""


def compare_items(
    a: ItemReader, b: ItemReader, advance: Callable[[int], None]
) -> Iterator[Difference]:
    """Differences in the order of A's leaves, then what only B has.

    Elements are compared by their bytes: two NaN with the same payload are equal, 0.0 and -0.0
    are not.

    Raises:
        CheckpointInvalid: one of them is damaged.
    """
    in_b = {leaf.path: index for index, leaf in enumerate(b.tree.leaves)}
    plain_a, plain_b = inline_values(a.tree, a.extra), inline_values(b.tree, b.extra)
    seen: set[tuple[Key, ...]] = set()
    for index, leaf in enumerate(a.tree.leaves):
        other = in_b.get(leaf.path)
        seen.add(leaf.path)
        if other is None:
            yield Difference(leaf=leaf.name, kind="only in A", words=describe(leaf))
        elif not fits(leaf, b.tree.leaves[other]):
            words = f"{describe(leaf)} → {describe(b.tree.leaves[other])}"
            yield Difference(leaf=leaf.name, kind="other kind", words=words)
        elif leaf.kind is LeafKind.SCALAR:
            # By their exact text: nan is itself, and 1 is not True.
            before, after = repr(plain_a[index]), repr(plain_b[other])
            if before != after:
                yield Difference(
                    leaf=leaf.name,
                    kind="values",
                    words=f"{before} → {after}",
                    changed=1,
                    elements=1,
                )
        elif leaf.is_stored_as_bytes and 0 not in leaf.shape:
            found = _compare_arrays(a, index, b, other, advance)
            if found is not None:
                yield found
    for leaf in b.tree.leaves:
        if leaf.path not in seen:
            yield Difference(leaf=leaf.name, kind="only in B", words=describe(leaf))


def _compare_arrays(
    a: ItemReader, index: int, b: ItemReader, other: int, advance: Callable[[int], None]
) -> Difference | None:
    leaf = a.tree.leaves[index]
    changed, largest, elements = 0, None, 0
    for box in spans(leaf, a.chunks[index]):
        before, after = _read(a, index, box), _read(b, other, box)
        advance(before.nbytes)
        elements += before.size
        is_changed = _bytes_of(before) != _bytes_of(after)
        rows = is_changed.any(axis=-1)
        count = int(rows.sum())
        if count:
            changed += count
            distance = _distance(before.reshape(-1)[rows], after.reshape(-1)[rows])
            if distance is not None:
                largest = distance if largest is None else max(largest, distance)
    if not changed:
        return None
    share = f"{changed} of {elements} elements"
    words = share if largest is None else f"{share}, by at most {largest:.6g}"
    return Difference(
        leaf=leaf.name,
        kind="values",
        words=words,
        changed=changed,
        elements=elements,
        largest=largest,
    )


def _read(reader: ItemReader, leaf: int, box: Box) -> NDArray[Any]:
    out = np.empty(box.shape, numpy_dtype(reader.tree.leaves[leaf].dtype))
    reader.read_many([(Region(leaf, box), out)])
    return out


def _bytes_of(values: NDArray[Any]) -> NDArray[np.uint8]:
    """One row of bytes an element."""
    return values.reshape(-1).view(np.uint8).reshape(values.size, values.dtype.itemsize)


def _distance(before: NDArray[Any], after: NDArray[Any]) -> float | None:
    wide = np.complex128 if before.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        distances = np.abs(before.astype(wide) - after.astype(wide))
    finite = distances[np.isfinite(distances)]
    return float(finite.max()) if finite.size else None
