"""Processes that restore one array together, as threads: an exchange without JAX."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpoints import array, tree_of
from everstep.runtime.clock import SystemClock
from everstep.runtime.errors import ChecksumMismatch, PeerUnavailable
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.manifest import Region
from everstep.runtime.restore.agreeing import Wants, begin_exchange
from everstep.runtime.restore.exchange import Exchange
from everstep.runtime.restore.outcome import Target
from everstep.runtime.restore.places import part_of
from everstep.runtime.restore.refill import Sources, Tally, fill
from everstep.runtime.restore.reshard import SourceHolding, SourceKind
from everstep.runtime.storage.chunks import cells

KEY = "restore/1"


class Board:
    """A meeting of threads."""

    def __init__(self, process: int, process_count: int, told: Board | None = None) -> None:
        self.process, self.process_count = process, process_count
        self.told: dict[str, str] = {} if told is None else told.told
        self.changed: threading.Condition = threading.Condition() if told is None else told.changed

    def put(self, key: str, value: str) -> None:
        with self.changed:
            self.told[key] = value
            self.changed.notify_all()

    def get(self, key: str, timeout_s: float) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.told, timeout_s):
                raise PeerUnavailable(f"{key} was not told within {timeout_s:g} s")
            return self.told[key]


@dataclass
class CountedArrays:
    """Stored arrays that know how often each of their chunks was read."""

    arrays: Sequence[NDArray[Any]]
    chunks: Sequence[tuple[int, ...]]
    reads: Counter[tuple[int, tuple[int, ...]]] = field(
        default_factory=Counter[tuple[int, tuple[int, ...]]]
    )
    damaged: set[tuple[int, tuple[int, ...]]] = field(
        default_factory=set[tuple[int, tuple[int, ...]]]
    )
    name: str = "arrays"
    lock: threading.Lock = field(default_factory=threading.Lock)

    def chunk_of(self, leaf: int) -> tuple[int, ...]:
        return self.chunks[leaf]

    def read_many(self, reads: Sequence[tuple[Region, NDArray[Any]]]) -> None:
        for region, out in reads:
            for cell in cells(region.box, self.chunks[region.leaf]):
                if (region.leaf, cell) in self.damaged:
                    raise ChecksumMismatch("step 1", f"leaf {region.leaf}", "good", f"bad {cell}")
                with self.lock:
                    self.reads[region.leaf, cell] += 1
            stored = self.arrays[region.leaf]
            out[...] = part_of(stored, region.box, whole(stored.shape))


@dataclass
class Result:
    arrays: dict[tuple[int, Box], NDArray[Any]]
    tally: Tally


Everybody = Sequence[Mapping[int, tuple[Box, ...]]]
"""By leaf: the boxes that each process needs."""


@dataclass
class Rig:
    """Some processes over some arrays."""

    stored: CountedArrays
    everybody: Everybody
    process_count: int
    deadline_s: float = 20.0
    memory_bytes: int = 1 << 30
    stages: Sequence[Sequence[int]] = ()
    """Leaves that are restored together; all of them when empty."""
    dtype: str | None = None
    """Of what is wanted, when it is not what was stored."""

    def __post_init__(self) -> None:
        self.board = Board(0, self.process_count)
        self.tree = tree_of(
            *(
                array("leaf", at, dtype=stored.dtype.name, shape=stored.shape)
                for at, stored in enumerate(self.stored.arrays)
            )
        )
        self.stages = self.stages or [range(len(self.stored.arrays))]

    def exchange(self, process: int, key: str = KEY) -> Exchange:
        return Exchange(
            Board(process, self.process_count, self.board),
            key=key,
            address="127.0.0.1",
            deadline_s=self.deadline_s,
            clock=SystemClock(),
        )

    def begin(self, exchange: Exchange) -> bool:
        stages = [[Wants(leaf, self.everybody[leaf]) for leaf in stage] for stage in self.stages]
        return begin_exchange(exchange, stages, self.stored, self.tree, "1")

    def restore(self, process: int) -> Result:
        """One process's whole restore."""
        with self.exchange(process) as exchange:
            is_exchanged = self.begin(exchange)
            result = Result({}, Tally())
            for number, stage in enumerate(self.stages):
                begin = partial(exchange.stage, number) if is_exchanged else None
                targets = [
                    Target(
                        region=Region(leaf, box),
                        array=np.full(box.shape, 7, self.dtype or self.stored.arrays[leaf].dtype),
                    )
                    for leaf in stage
                    for box in self.everybody[leaf].get(process, ())
                ]
                sources = Sources(
                    memories={},
                    storages={0: self.stored},
                    holdings=[SourceHolding(index=0, kind=SourceKind.STORAGE, shards=None)],
                )
                fill(
                    targets,
                    sources,
                    self.tree,
                    result.tally,
                    memory_bytes=self.memory_bytes,
                    passing=begin,
                )
                result.arrays |= {(t.region.leaf, t.region.box): t.array for t in targets}
            exchange.finish()
            return result

    def restore_all(self, processes: Sequence[int] | None = None) -> dict[int, Result]:
        members = range(self.process_count) if processes is None else processes
        with ThreadPoolExecutor(len(members)) as pool:
            futures: dict[int, Future[Result]] = {p: pool.submit(self.restore, p) for p in members}
            return {process: future.result() for process, future in futures.items()}

    def check(self, results: Mapping[int, Result]) -> None:
        """Everybody has every element that it needs."""
        for process, result in results.items():
            wanted = {
                (leaf, box)
                for leaf, needs in enumerate(self.everybody)
                for box in needs.get(process, ())
            }
            assert result.arrays.keys() == wanted
            for (leaf, box), found in result.arrays.items():
                stored = self.stored.arrays[leaf]
                expected = part_of(stored, box, whole(stored.shape))
                if self.dtype is not None:
                    expected = expected.astype(self.dtype)
                np.testing.assert_array_equal(found, expected)
