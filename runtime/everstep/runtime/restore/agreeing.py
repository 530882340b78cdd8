"""From what all processes want to who reads what, and to the digest that they compare."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from everstep.runtime.errors import CheckpointInvalid, Retryable
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.restore.division import Held, divide_reads, split_held
from everstep.runtime.restore.exchange import Exchange
from everstep.runtime.restore.handover import TOKEN_BYTES
from everstep.runtime.restore.passing import Stage
from everstep.runtime.restore.reshard import split_overlaps
from everstep.runtime.restore.sources import RegionSource


class Wants(NamedTuple):
    """One saved leaf, and the boxes of it that each process needs."""

    leaf: int
    everybody: Mapping[int, tuple[Box, ...]]


def begin_exchange(
    exchange: Exchange,
    stages: Sequence[Sequence[Wants]],
    storage: RegionSource,
    saved: TreeSpec,
    step: str,
    held: Mapping[int, Held] | None = None,
) -> bool:
    """Divide the reads, and begin to exchange.

    Args:
        exchange: fresh.
        stages: what is restored together, in order; leaves that are one process's own are in
            it with nobody who needs them.
        storage: what is read.
        saved: the tree that was saved.
        step: that is restored, in words.
        held: by process, what it reads from its own disk: nobody reads that for it.

    Returns:
        Whether anything is exchanged.
    """
    held = held or {}
    digest = hashlib.sha256(f"{step} {saved.fingerprint}".encode())
    digest.update(msgspec.msgpack.encode([(p, sorted(held[p].items())) for p in sorted(held)]))
    made: list[Stage] = []
    try:
        for wants in stages:
            chunks = {one.leaf: storage.chunk_of(one.leaf) for one in wants}
            needs = _needs(wants, exchange.process_count, held)
            digest.update(msgspec.msgpack.encode((sorted(chunks.items()), _listed(wants))))
            made.append(Stage(needs=needs, division=divide_reads(needs, chunks, saved)))
    except (CheckpointInvalid, Retryable):
        # It will fail again where it is read, and there it is told what becomes of it.
        return False
    return exchange.begin(digest.hexdigest()[:TOKEN_BYTES], made)


def _needs(
    wants: Sequence[Wants], process_count: int, held: Mapping[int, Held]
) -> dict[int, list[Region]]:
    """Disjoint regions by process, those of a leaf in the order in which they are read."""
    needs: dict[int, list[Region]] = {process: [] for process in range(process_count)}
    disjoint: dict[tuple[Box, ...], list[Box]] = {}
    for leaf, everybody in wants:
        for process, boxes in everybody.items():
            if boxes not in disjoint:
                pieces, _ = split_overlaps([Region(0, box) for box in boxes])
                disjoint[boxes] = sorted(piece.region.box for piece in pieces)
            own = held.get(process, {}).get(leaf, ())
            lacking = split_held(disjoint[boxes], own)[1] if own else disjoint[boxes]
            needs[process] += [Region(leaf, box) for box in lacking]
    return needs


def _listed(wants: Sequence[Wants]) -> list[object]:
    """The same wants in a form that is short and equal where they are equal."""
    # Leaves of one layout share the mapping, which then is told once.
    alike: defaultdict[int, list[int]] = defaultdict(list)
    distinct: dict[int, list[tuple[int, tuple[Box, ...]]]] = {}
    for leaf, everybody in wants:
        alike[id(everybody)].append(leaf)
        distinct[id(everybody)] = sorted(everybody.items())
    return [(leaves, distinct[key]) for key, leaves in alike.items()]
