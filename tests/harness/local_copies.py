"""Local copies without a training: contents, writers, and hands that damage files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from checkpoints import Values, array, host, random_values, tree_of
from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.disk.copies import LocalCopy, find_copies
from everstep.runtime.disk.record import CopyRecord
from everstep.runtime.disk.tier import Content, DiskTier
from everstep.runtime.errors import CheckpointInvalid
from everstep.runtime.layout.boxes import whole
from everstep.runtime.layout.checksums import first_bad_block
from everstep.runtime.layout.manifest import Region
from everstep.runtime.snapshot.regions import plot_of, shard_array

RUN = "run-a"
TREE = tree_of(array("w", shape=(600, 512)), array("b", dtype="int8", shape=(7,)))


def content_of(values: Values) -> Content:
    plot = plot_of(TREE, [Region(i, whole(leaf.shape)) for i, leaf in enumerate(TREE.leaves)])
    memory = np.zeros(plot.size_bytes, np.uint8)
    for shard in plot.shards:
        shard_array(memory, TREE, shard)[...] = values[shard.leaf]
    return Content(plot=plot, memory=memory)


def tier_of(folder: Path, *, owner: str = "one", run: str = RUN, latest: int = 1) -> DiskTier:
    return DiskTier(str(folder), run=run, owner=owner, latest=latest)


def write(
    tier: DiskTier, step: int, *, digest: str = "sha256:a", durable: int | None = None
) -> CopyRecord:
    """Write the copy of a step, whose values are drawn from its number."""
    return tier.write(
        {"state": content_of(random_values(TREE, step))},
        step=Step(step),
        incarnation=Incarnation(3),
        host=host(0),
        digest=digest,
        step_durable=None if durable is None else Step(durable),
    )


def read(copy: LocalCopy) -> Values:
    """All values of a copy, verified block by block as a restore does."""
    opened = copy.open("state")
    try:
        manifest = opened.manifest()
        memory = np.empty(manifest.plot.size_bytes, np.uint8)
        opened.read_into(0, memory)
    finally:
        opened.close()
    for shard, crcs in zip(manifest.plot.shards, manifest.crcs, strict=True):
        data = memory[shard.offset : shard.offset + shard.size_bytes]
        if (bad := first_bad_block(data, crcs, 0)) is not None:
            raise CheckpointInvalid(copy.folder, f"shard {shard}", "its checksum", f"block {bad}")
    shards = manifest.plot.shards
    return {shard.leaf: shard_array(memory, TREE, shard) for shard in shards}


def steps_in(folder: Path, run: str = RUN) -> list[int]:
    return [copy.record.step for copy in find_copies(str(folder), run)[0]]


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file, counted from its start."""
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def files_of(folder: Path) -> list[Path]:
    """Every file of every copy, sorted; not the locks."""
    return sorted(
        Path(base, name)
        for base, _, names in os.walk(folder)
        for name in names
        if name.endswith((".bytes", ".json"))
    )
