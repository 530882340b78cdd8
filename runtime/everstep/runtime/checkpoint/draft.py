"""Write a host's part of a checkpoint into its draft, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from everstep.runtime.checkpoint.orbax import array_names
from everstep.runtime.errors import StateRefused, check
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.dtypes import itemsize
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.storage import manifest as files
from everstep.runtime.storage.chunks import cells
from everstep.runtime.storage.store import Store
from everstep.runtime.storage.tensors import ArrayPlan, PartWriter, stored_dtype

IN_FLIGHT_BYTES = 256 << 20
"""So many bytes of a part are handed to storage before they are waited for."""
_FILE_BYTES = (64 << 20, 1 << 30)


def array_plan(
    tree: TreeSpec, names: Sequence[str | None], leaf: int, chunk: Sequence[int]
) -> ArrayPlan:
    """How a leaf is stored. Raises `StateRefused`, naming it, for one that cannot be."""
    spec = tree.leaves[leaf]
    name = names[leaf]
    if name is None:
        raise StateRefused(spec.name, spec.kind.value, "a leaf with bytes")
    try:
        stored_dtype(spec.dtype)
    except StateRefused as error:
        raise StateRefused(spec.name, error.found, error.expected) from error
    return ArrayPlan(name=name, dtype=spec.dtype, shape=spec.shape, chunk=tuple(chunk))


def write_regions(
    store: Store,
    *,
    draft: str,
    writer: int,
    tree: TreeSpec,
    chunks: Mapping[int, Sequence[int]],
    regions: Sequence[Region],
    read: Callable[[Region], NDArray[Any]],
    item: str = files.STATE,
) -> int:
    """Write regions of a held step, and last the record that says what was written.

    Args:
        store: of the run.
        draft: folder of the draft, from `begin`.
        writer: number of this writer in this draft; no two share one.
        tree: of the state.
        chunks: chunk shape by leaf, the same for all writers.
        regions: made of whole chunks.
        read: gives a region's values, or a view that does not change before the return.
        item: which named part of the step this is.

    Returns:
        Bytes of array data written.

    Raises:
        StorageRefused, StorageUnavailable: the part is not written; the draft is no checkpoint.
        StateRefused: names the leaf that cannot be stored.

    Durability: on return the part is on storage, record and names included. A part without its
    record was not finished and is never committed.
    Blocking: for the whole write; at most `IN_FLIGHT_BYTES`, or one region, are buffered.
    """
    names = array_names(tree)
    plans = {
        region.leaf: array_plan(tree, names, region.leaf, chunks[region.leaf]) for region in regions
    }
    for region in regions:
        _check_aligned(region.box, plans[region.leaf])
    total = sum(_size_bytes(region, plans) for region in regions)
    with PartWriter(
        store.location(f"{draft}/{item}"),
        files.writer_folder(writer),
        file_bytes=min(max(total // 8, _FILE_BYTES[0]), _FILE_BYTES[1]),
        in_flight_bytes=IN_FLIGHT_BYTES,
    ) as part:
        for region in regions:
            part.write(plans[region.leaf], region.box, read(region))
        part.flush()
    wanted = [
        (plans[region.leaf].name, list(cells(region.box, plans[region.leaf].chunk)))
        for region in regions
    ]
    record = files.PartRecord(
        writer=writer,
        fingerprint=tree.fingerprint,
        chunks={leaf: plan.chunk for leaf, plan in plans.items()},
        regions=tuple(regions),
        crcs=tuple(tuple(row) for row in part.checksums(wanted)),
        bytes_written=total,
    )
    store.settle(f"{draft}/{item}")
    store.write_durable(f"{draft}/{files.part_name(writer, item)}", msgspec.json.encode(record))
    return total


def _size_bytes(region: Region, plans: Mapping[int, ArrayPlan]) -> int:
    return region.box.size * itemsize(plans[region.leaf].dtype)


def _check_aligned(box: Box, plan: ArrayPlan) -> None:
    is_aligned = whole(plan.shape).contains(box) and all(
        a % c == 0 and (b % c == 0 or b == n)
        for a, b, c, n in zip(box.start, box.stop, plan.chunk, plan.shape, strict=True)
    )
    check(is_aligned, f"{plan.name}: {box} is not made of whole chunks {plan.chunk}")
    check(len(plan.chunk) == len(plan.shape) and all(c > 0 for c in plan.chunk), plan.name)
