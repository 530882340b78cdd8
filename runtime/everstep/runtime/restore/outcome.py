"""What a set of reads fills, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from everstep.runtime.errors import StorageUnavailable
from everstep.runtime.layout.manifest import Region
from everstep.runtime.restore.places import part_of
from everstep.runtime.restore.reshard import Bad, Piece, SourceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A wanted region and the C-contiguous array that it is read into."""

    region: Region
    array: NDArray[Any]

    def part(self, region: Region) -> NDArray[Any]:
        """The elements of a region inside this one, as a view."""
        return part_of(self.array, region.box, self.region.box)


@dataclass(slots=True)
class Outcome:
    """Filled by several threads at once."""

    missing: list[Piece] = field(default_factory=list[Piece])
    """Exactly what was not filled with verified bytes."""
    bad: set[Bad] = field(default_factory=set[Bad])
    rejected: list[str] = field(default_factory=list[str])
    """Why, in words; one line per source and leaf."""
    bytes_by_kind: dict[SourceKind, int] = field(
        default_factory=lambda: dict.fromkeys(SourceKind, 0)
    )
    """Bytes that were put in place, by where they came from."""
    unavailable: StorageUnavailable | None = None
    """Storage did not answer, which says nothing about what is stored there."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_moved(self, kind: SourceKind, size_bytes: int) -> None:
        with self._lock:
            self.bytes_by_kind[kind] += size_bytes

    def note_missing(self, pieces: Iterable[Piece]) -> None:
        with self._lock:
            self.missing += pieces

    def reject(self, bad: Bad, words: str) -> None:
        with self._lock:
            self.bad.add(bad)
            if words not in self.rejected:
                self.rejected.append(words)
