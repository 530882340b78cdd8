"""What a restore can read from, in two shapes: memory of hosts in blocks, storage in regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.layout.manifest import Region, SnapshotManifest
from everstep.runtime.restore.reshard import SourceKind


class MemorySource(Protocol):
    """The memory of one holding, on this host or another."""

    @property
    def kind(self) -> SourceKind: ...

    @property
    def name(self) -> str:
        """For people: whose memory this is."""
        ...

    def manifest(self) -> SnapshotManifest:
        """Fetched once, then remembered.

        Raises:
            PeerUnavailable: it cannot be had; the source is of no use.
        """
        ...

    def view(self, offset: int, size_bytes: int) -> NDArray[np.uint8] | None:
        """The bytes themselves, when they are in this process's reach; None when to be read."""
        ...

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the bytes from `offset` on.

        Raises:
            PeerUnavailable: the peer did not answer in time, or the holding is gone.
            StorageUnavailable: the own disk did not.
            Fenced: the peer is in a newer incarnation.
        """
        ...


class RegionSource(Protocol):
    """Storage. Verifies what it reads by itself."""

    @property
    def name(self) -> str: ...

    def chunk_of(self, leaf: int) -> tuple[int, ...]:
        """Shape of the chunks in which a leaf is stored: no less than one is ever read.

        Raises `CheckpointInvalid` or `Retryable`.
        """
        ...

    def read_many(self, reads: Sequence[tuple[Region, NDArray[Any]]]) -> None:
        """Raises `CheckpointInvalid` or `Retryable`; the arrays are then undefined."""
        ...


@dataclass(slots=True)
class OwnMemory:
    """A slot of this host that the worker inherited. Its manifest comes from the agent."""

    described_by: MemorySource
    """The same holding through the agent's server."""
    memory: memoryview
    kind: SourceKind = SourceKind.OWN
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"own memory ({self.described_by.name})"

    def manifest(self) -> SnapshotManifest:
        return self.described_by.manifest()

    def view(self, offset: int, size_bytes: int) -> NDArray[np.uint8] | None:
        return np.frombuffer(self.memory, np.uint8, size_bytes, offset)

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        out[:] = np.frombuffer(self.memory, np.uint8, out.size, offset)


class CopiedBytes(Protocol):
    """The part of `disk.copies.LocalBytes` that is read here."""

    def manifest(self) -> SnapshotManifest: ...

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None: ...


@dataclass(slots=True)
class LocalDisk:
    """What this host's disk holds of the step. Of the same content as the stored step.

    It only gives bytes: which step there is, and what it is made of, storage tells.
    """

    copied: CopiedBytes
    name: str
    kind: SourceKind = SourceKind.LOCAL

    def manifest(self) -> SnapshotManifest:
        return self.copied.manifest()

    def view(self, offset: int, size_bytes: int) -> NDArray[np.uint8] | None:
        """None: mapped files can fail in the middle of an instruction, and reads can be judged."""
        del offset, size_bytes
        return None

    def read_into(self, offset: int, out: NDArray[np.uint8]) -> None:
        self.copied.read_into(offset, out)
