"""Read every byte of a step and say what is not as it was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from everstep.runtime.cli.opened import ItemReader, OpenedStep, leaf_bytes, spans
from everstep.runtime.errors import CheckpointInvalid
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.dtypes import itemsize, numpy_dtype
from everstep.runtime.layout.manifest import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One region that cannot be read as what was written."""

    leaf: str
    why: str


def verify_item(reader: ItemReader, advance: Callable[[int], None]) -> list[Damage]:
    """Read all of an item's arrays.

    Args:
        reader: of the item.
        advance: called with the bytes that were read, again and again.

    Returns:
        What is damaged, chunk by chunk; empty when every checksum holds.
    """
    found: list[Damage] = []
    for index, leaf in enumerate(reader.tree.leaves):
        if not leaf.is_stored_as_bytes or 0 in leaf.shape:
            continue
        chunk = reader.chunks[index]
        for box in spans(leaf, chunk):
            problem = _read(reader, index, box)
            advance(box.size * itemsize(leaf.dtype))
            if problem is None:
                continue
            # Chunk by chunk, to name all that is bad and not only the first.
            named = [
                Damage(leaf=leaf.name, why=str(error))
                for part in spans(leaf, chunk, limit_bytes=1)
                if box.contains(part) and (error := _read(reader, index, part)) is not None
            ]
            found.extend(named or [Damage(leaf=leaf.name, why=str(problem))])
    return found


def verified_words(opened: OpenedStep, total_bytes: int) -> str:
    """What a verification without a damage has shown."""
    head = f"step {opened.step}: {total_bytes} bytes in {opened.leaves} leaves"
    bare = [name for reader in opened.items.values() for name in getattr(reader, "unverified", ())]
    if bare:
        return f"{head} can be read; {len(bare)} of them have no checksum, so no more is known"
    return f"{head} are as written"


def item_bytes(reader: ItemReader) -> int:
    """What `verify_item` will read."""
    return sum(leaf_bytes(leaf) for leaf in reader.tree.leaves)


def _read(reader: ItemReader, leaf: int, box: Box) -> CheckpointInvalid | None:
    out = np.empty(box.shape, numpy_dtype(reader.tree.leaves[leaf].dtype))
    try:
        reader.read_many([(Region(leaf, box), out)])
    except CheckpointInvalid as error:
        return error
    return None
