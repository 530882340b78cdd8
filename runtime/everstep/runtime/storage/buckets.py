"""A store in a bucket of objects: a folder is what the names of its objects begin with."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from everstep.runtime.errors import StorageRefused, StorageUnavailable, check
from everstep.runtime.storage.objects import Objects
from everstep.runtime.storage.store import Location, StorageMissing, checked

_DELETING = 8
_WRITING = 8
_ROUNDS = 3


class BucketStore:
    """See `Store`.

    A folder is there while an object is in it. A file whose name is that of a folder is refused
    where this object has seen the folder; the bucket itself would take both.
    """

    def __init__(self, objects: Objects, path: str, *, driver: str, bucket: str) -> None:
        """Use what begins with a path; empty for the whole bucket.

        Args:
            objects: of the bucket.
            path: of the run, without `/` at its ends.
            driver: the array library's name for this kind of store.
            bucket: its name, for that library.
        """
        self._objects = objects
        self._prefix = f"{path}/" if path else ""
        self._driver, self._bucket = driver, bucket
        self._folders: set[str] = set()
        """Known to be no files."""
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return f"{self._objects.uri}/{self._prefix}".rstrip("/")

    def probe(self) -> None:
        """Ask once whether the bucket answers.

        Raises:
            StorageRefused: there is no such bucket, it is forbidden, or the run's path is a file.
        """
        self._objects.list(self._prefix, is_deep=True, most=1)
        if self._prefix and self._objects.stat(self._prefix[:-1]) is not None:
            raise StorageRefused(self.uri, "an object", "a folder, or nothing yet")

    def location(self, path: str) -> Location:
        return Location(
            driver=self._driver,
            path=f"{self._prefix}{checked(path)}/",
            bucket=self._bucket,
            objects=self._objects,
        )

    def read(self, path: str) -> bytes:
        return self._objects.get(self._name(path))

    def list(self, folder: str) -> tuple[str, ...]:
        prefix = f"{self._name(folder)}/" if folder else self._prefix
        found = self._objects.list(prefix, is_deep=False)
        names = {name[len(prefix) :].rstrip("/") for name in (*found.objects, *found.folders)}
        # An object of the folder's own name is how other programs note an empty folder.
        return tuple(sorted(names - {""}))

    def exists(self, path: str) -> bool:
        name = self._name(path)
        if self._objects.list(f"{name}/", is_deep=True, most=1).objects:
            return True
        return self._objects.stat(name) is not None

    def write_durable(self, path: str, data: bytes) -> None:
        self._refuse_odd(path)
        self._objects.replace(self._name(path), data)

    def write_together(
        self, folder: str, contents: Mapping[str, bytes], *, unsynced: Sequence[str] = ()
    ) -> None:
        check(not unsynced, f"{self.uri}/{folder}: nothing in a bucket waits for a sync")
        with ThreadPoolExecutor(_WRITING, thread_name_prefix="everstep-write") as threads:
            writes = [
                threads.submit(self.write_durable, f"{folder}/{path}", data)
                for path, data in contents.items()
            ]
        for write in writes:
            write.result()
        self.settle(folder)

    def create_exclusive(self, path: str, data: bytes) -> bool:
        self._refuse_odd(path)
        name = self._name(path)
        won = self._objects.create(name, data)
        # That it was accepted is not enough: this is where a step begins to exist.
        try:
            return self._objects.get(name) == data
        except StorageMissing as error:
            if not won:
                return self.create_exclusive(path, data)
            raise StorageUnavailable(
                f"{self._objects.uri}/{name}: it was accepted, and is not there", retry_after_s=1.0
            ) from error

    def delete_tree(self, path: str) -> None:
        name = self._name(path)
        with ThreadPoolExecutor(_DELETING, thread_name_prefix="everstep-delete") as threads:
            for _ in range(_ROUNDS):
                below = self._objects.list(f"{name}/", is_deep=True).objects
                found = [*below, *([name] if self._objects.stat(name) is not None else [])]
                if not found:
                    break
                for done in [threads.submit(self._objects.delete, one) for one in found]:
                    done.result()
            else:
                raise StorageUnavailable(f"{self.uri}/{path}: somebody writes while it is deleted")
        with self._lock:
            self._folders = {f for f in self._folders if f != path and not f.startswith(f"{path}/")}

    def settle(self, folder: str) -> None:
        """What was accepted below the folder is there; names need no more."""
        self._objects.confirm(f"{self._name(folder)}/")

    def sweep(self, folder: str) -> None:
        checked(folder)

    def _name(self, path: str) -> str:
        return f"{self._prefix}{checked(path)}"

    def _refuse_odd(self, path: str) -> None:
        parts = checked(path).split("/")
        folders = ["/".join(parts[:count]) for count in range(1, len(parts))]
        with self._lock:
            is_folder = path in self._folders
            unknown = [folder for folder in folders if folder not in self._folders]
        if is_folder:
            raise StorageRefused(
                self._where(path),
                "a folder is where a file should be",
                "another folder for this run",
            )
        self._check_folders(unknown)

    def _check_folders(self, folders: Sequence[str]) -> None:
        for folder in folders:
            if self._objects.stat(self._name(folder)) is not None:
                raise StorageRefused(
                    self._where(folder),
                    "a file is where a folder should be",
                    "another folder for this run",
                )
            with self._lock:
                self._folders.add(folder)

    def _where(self, path: str) -> str:
        return f"{self.uri}/{path}"
