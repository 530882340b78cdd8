"""The seam to durable storage: small files by path, and a place where arrays are kept.

All paths are relative to one run and use `/`. A path is made by us, never by a user; an odd one is
our own bug. Readers and writers in other processes and on other hosts see the same store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from everstep.runtime.errors import InvariantViolated, StorageRefused
from everstep.runtime.storage.objects import Objects


class StorageMissing(StorageRefused):
    """There is nothing at this path. An answer, not a failure to answer."""


class Space:
    """Identity of one in-memory place for arrays; compared by identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where the arrays of a store lie, in words that the array library understands."""

    driver: str
    """`file`, `memory` or `gcs`."""
    path: str
    """Folder, absolute for `file`; always ends with `/`."""
    space: Space | None = field(default=None, compare=False)
    bucket: str | None = None
    objects: Objects | None = field(default=None, compare=False)
    """Of the bucket: our own way to it, beside the array library's."""

    def below(self, name: str) -> Location:
        return replace(self, path=f"{self.path}{name}/")

    def as_base(self) -> dict[str, str]:
        """As the array library wants it."""
        base = {"driver": self.driver, "path": self.path}
        return base if self.bucket is None else {**base, "bucket": self.bucket}


class Store(Protocol):
    """Small files of one run.

    Every method raises `StorageRefused` when storage says no (the path, why, and what would do)
    and `StorageUnavailable` when it did not answer after a bounded number of tries.
    Blocking: until storage answers; call from any thread but never from an event loop.
    """

    @property
    def uri(self) -> str:
        """Of the run's folder, for messages."""
        ...

    def read(self, path: str, /) -> bytes:
        """The whole file. Raises `StorageMissing` when there is none."""
        ...

    def list(self, folder: str, /) -> tuple[str, ...]:
        """Names directly in a folder, sorted; none when the folder is missing.

        Files that are still being written are not in it.
        """
        ...

    def exists(self, path: str, /) -> bool:
        """Whether a file or a folder is there."""
        ...

    def write_durable(self, path: str, /, data: bytes) -> None:
        """Write a file, or replace it as a whole.

        Durability: on return the content is on storage and so is its name. After a crash at any
        point the old file, or the new one, is there whole.
        """
        ...

    def write_together(
        self, folder: str, /, contents: Mapping[str, bytes], *, unsynced: Sequence[str] = ()
    ) -> None:
        """Write files below a folder, or replace them, and do all of `settle`, at once.

        Many that wait for storage together wait about as long as one.

        Args:
            folder: that holds all of them.
            contents: by path below the folder.
            unsynced: files below the folder that somebody wrote there and did not sync.

        Durability: on return these contents, those of the unsynced files and all names below the
        folder are on storage. After a crash within, any of the files may be there, each whole.
        """
        ...

    def create_exclusive(self, path: str, /, data: bytes) -> bool:
        """Create a file that must not exist. True when it now holds exactly `data`.

        So it is also True for an earlier attempt whose answer was lost; two writers who must be
        told apart put something of their own into `data`. False when it holds anything else.

        Durability: as `write_durable`. No reader ever sees a part of it.
        """
        ...

    def delete_tree(self, path: str, /) -> None:
        """Delete a file or a folder with all that is in it. Nothing there is no error.

        Durability: on return all is gone; after a crash within, a part may be left.
        """
        ...

    def settle(self, folder: str, /) -> None:
        """Make the names of everything below a folder durable, and the folder's own name.

        Durability: on return the directories are on storage; the content of files is the business
        of those who wrote them.
        """
        ...

    def sweep(self, folder: str, /) -> None:
        """Remove what killed writers left of `create_exclusive` in a folder, where it lost."""
        ...

    def location(self, path: str, /) -> Location:
        """Where the arrays below this folder are kept."""
        ...


def checked(path: str) -> str:
    """The path itself, if it stays inside the run."""
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") or part.startswith(".") for part in parts):
        raise InvariantViolated(f"not a path inside a run: {path!r}")
    return path
