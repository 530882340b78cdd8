"""Builders of states and checkpoints: trees, random values of any dtype, whole saves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step
from everstep.runtime.checkpoint.commit import begin, commit
from everstep.runtime.checkpoint.draft import write_regions
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.dtypes import numpy_dtype
from everstep.runtime.layout.manifest import Holding, Region, Shard
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec
from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.reader import CheckpointReader, read_leaf
from everstep.runtime.storage.store import Store
from everstep.runtime.topology.ownership import plan_writes

Array = NDArray[Any]
Values = dict[int, Array]

_SMALL_RANGES = {
    "bool": (0, 2),
    "int2": (-2, 2),
    "uint2": (0, 4),
    "int4": (-8, 8),
    "uint4": (0, 16),
    "float4_e2m1fn": (0, 16),
}


def path(*names: str | int) -> tuple[Key, ...]:
    return tuple(
        Key(KeyKind.DICT, name) if isinstance(name, str) else Key(KeyKind.SEQUENCE, str(name))
        for name in names
    )


def array(*names: str | int, dtype: str = "float32", shape: Sequence[int] = (4, 6)) -> Leaf:
    return Leaf(path=path(*names), kind=LeafKind.ARRAY, dtype=dtype, shape=tuple(shape))


def tree_of(*leaves: Leaf) -> TreeSpec:
    return TreeSpec(leaves=leaves)


def host(slice_id: int, number: int = 0) -> HostId:
    return HostId(SliceId(slice_id), number)


def random_array(dtype: str, shape: Sequence[int], seed: int) -> Array:
    """Random bit patterns: every NaN payload, both zeros, every value of a small type."""
    dice = np.random.default_rng(seed)
    kind = numpy_dtype(dtype)
    if dtype in _SMALL_RANGES:
        low, high = _SMALL_RANGES[dtype]
        values = dice.integers(low, high, size=tuple(shape), dtype=np.int8)
        return values.view(kind) if dtype in ("bool", "float4_e2m1fn") else values.astype(kind)
    data = dice.integers(0, 256, size=math.prod(shape) * kind.itemsize, dtype=np.uint8)
    return data.view(kind).reshape(tuple(shape))


def random_values(tree: TreeSpec, seed: int = 0) -> Values:
    return {
        index: random_array(leaf.dtype, leaf.shape, seed * 1000 + index)
        for index, leaf in enumerate(tree.leaves)
        if leaf.is_stored_as_bytes
    }


def holding(owner: HostId, boxes: Sequence[tuple[int, Box]], tree: TreeSpec) -> Holding:
    return Holding(
        id="a",
        step=Step(1),
        incarnation=Incarnation(1),
        host=owner,
        address="127.0.0.1",
        port=1,
        fingerprint=tree.fingerprint,
        shards=tuple(Shard(leaf, box, 0, 0) for leaf, box in boxes),
    )


def by_rows(tree: TreeSpec, hosts: Sequence[HostId]) -> tuple[Holding, ...]:
    """Every leaf split along its first axis where that divides, else replicated."""
    boxes: dict[HostId, list[tuple[int, Box]]] = {owner: [] for owner in hosts}
    for index, leaf in enumerate(tree.leaves):
        if not leaf.is_stored_as_bytes:
            continue
        everything = whole(leaf.shape)
        for rank, owner in enumerate(hosts):
            box = everything
            if leaf.shape and leaf.shape[0] and leaf.shape[0] % len(hosts) == 0:
                rows = leaf.shape[0] // len(hosts)
                box = Box(
                    (rank * rows, *everything.start[1:]), ((rank + 1) * rows, *everything.stop[1:])
                )
            boxes[owner].append((index, box))
    return tuple(holding(owner, found, tree) for owner, found in boxes.items())


def write_draft(
    store: Store, draft: str, tree: TreeSpec, values: Mapping[int, Array], hosts: int = 2
) -> list[tuple[int, tuple[Region, ...]]]:
    """Let every host write its part; what the lead then knows."""
    members = [host(rank) for rank in range(hosts)]
    plan = plan_writes(tree, by_rows(tree, members), chunk_bytes_min=64)
    parts: list[tuple[int, tuple[Region, ...]]] = []
    for writer, member in enumerate(members):
        regions = plan.regions[member]
        write_regions(
            store,
            draft=draft,
            writer=writer,
            tree=tree,
            chunks=plan.chunks,
            regions=regions,
            read=lambda region: values[region.leaf][region.box.slices()],
        )
        parts.append((writer, regions))
    return parts


def save(
    store: Store,
    ledger: RunLedger,
    step: int,
    tree: TreeSpec,
    values: Mapping[int, Array],
    *,
    incarnation: int = 1,
    hosts: int = 2,
    extra: Mapping[str, str] | None = None,
) -> Commit:
    draft = begin(store, Step(step), Incarnation(incarnation), ledger=ledger)
    parts = write_draft(store, draft, tree, values, hosts)
    return commit(
        store,
        ledger,
        draft=draft,
        step=Step(step),
        incarnation=Incarnation(incarnation),
        tree=tree,
        parts=parts,
        extra=extra or {},
        now_s=1000.0 + step,
    )


def claimed(store: Store, incarnation: int = 1, job_uid: str = "job-a") -> RunLedger:
    ledger = RunLedger(store)
    ledger.claim(Incarnation(incarnation), job_uid)
    return ledger


def load(store: Store, commit_: Commit) -> Values:
    reader = CheckpointReader(store, commit_)
    return {
        index: read_leaf(reader, index)
        for index, leaf in enumerate(reader.tree.leaves)
        if leaf.is_stored_as_bytes
    }


def same_bits(left: Mapping[int, Array], right: Mapping[int, Array]) -> bool:
    return left.keys() == right.keys() and all(
        left[i].dtype == right[i].dtype
        and left[i].shape == right[i].shape
        and left[i].tobytes() == right[i].tobytes()
        for i in left
    )
