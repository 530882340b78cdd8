"""What is saved and restored for the comparison: sizes, kinds of state, processes, places."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

MIB = 1 << 20
LARGE_BYTES = 4096 * MIB
"""From here on the sides are measured one after the other: their states do not fit together."""
ELSEWHERE = ("columns", "blocks", "whole")
"""Other layouts on the same processes, beside one process alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    size_bytes: int
    leaves: int = 16
    dtype: str = "f32"
    processes: int = 1
    place: str = "tmpfs"
    count: int = 5
    is_moved: bool = False
    """Restored in other layouts too, and by one process."""

    @property
    def key(self) -> str:
        """What `--only` looks in, as in `tmpfs-64MiB-bf16-2000leaves-4p`."""
        size = f"{self.size_bytes // MIB}MiB" if self.size_bytes >= MIB else "one"
        moved = "-moved" if self.is_moved else ""
        return f"{self.place}-{size}-{self.dtype}-{self.leaves}leaves-{self.processes}p{moved}"

    @property
    def name(self) -> str:
        size = f"{self.size_bytes // MIB} MiB" if self.size_bytes >= MIB else "1 element"
        processes = f", {self.processes} processes" if self.processes > 1 else ""
        leaves = "leaf" if self.leaves == 1 else "leaves"
        return f"{self.place}, {size} {self.dtype}, {self.leaves} {leaves}{processes}"

    @property
    def is_apart(self) -> bool:
        return self.size_bytes >= LARGE_BYTES

    @property
    def memory_bytes(self) -> int:
        """About what all sides take at once, on tmpfs with their files."""
        # States, held copies and what is being restored; files, of which a run has up to three.
        held, files = (2, 3) if self.is_apart else (8, 6)
        sides = 1 if self.is_apart else 5
        copies = held + (files if self.place == "tmpfs" else 0)
        return copies * self.size_bytes + sides * self.processes * 300 * MIB

    @property
    def about_s(self) -> float:
        """About how long it takes, on two cores."""
        one_turn_s = 25 * self.size_bytes / (1 << 30) + 0.012 * self.leaves
        moving_s = 15 * self.size_bytes / (1 << 30) + 1 if self.is_moved else 0.0
        return 20 + 12 * self.processes + (self.count + 1) * (one_turn_s + moving_s + 1)


def _f32(*sizes_mib: int) -> list[Case]:
    return [Case(size_bytes=size * MIB, place=place) for size in sizes_mib for place in PLACES]


PLACES = ("tmpfs", "disk")
ONE_ELEMENT = Case(size_bytes=4, leaves=1, processes=4, count=15)
USUAL = (
    ONE_ELEMENT,
    # The plots are of these.
    *_f32(16, 64, 256, 1024),
    *(Case(size_bytes=64 * MIB, leaves=2000, place=place) for place in PLACES),
    *(Case(size_bytes=1024 * MIB, dtype="bf16", place=place) for place in PLACES),
    *(Case(size_bytes=1024 * MIB, processes=4, place=place) for place in PLACES),
    *(Case(size_bytes=512 * MIB, processes=4, place=place, is_moved=True) for place in PLACES),
    Case(size_bytes=1024 * MIB, leaves=2000),
)


def _all() -> tuple[Case, ...]:
    product = itertools.product((64, 1024), (16, 2000), ("f32", "bf16"), (1, 4), PLACES)
    every = [
        Case(size_bytes=size * MIB, leaves=leaves, dtype=dtype, processes=processes, place=place)
        for size, leaves, dtype, processes, place in product
    ]
    large = [
        replace(case, place=place)
        for place in PLACES
        for case in (
            Case(size_bytes=LARGE_BYTES),
            Case(size_bytes=LARGE_BYTES, dtype="bf16"),
            Case(size_bytes=LARGE_BYTES, leaves=2000),
        )
    ]
    return tuple(dict.fromkeys((*USUAL, *every, *large)))


FULL = _all()
QUICK: Sequence[Case] = (
    Case(size_bytes=16 * MIB, count=1),
    Case(size_bytes=16 * MIB, count=1, place="disk"),
    Case(size_bytes=4, leaves=1, processes=2, count=1),
    Case(size_bytes=4 * MIB, leaves=2, processes=2, count=1, is_moved=True),
)
