"""A store in this process's memory: for tests and simulations, with the same behaviour."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from everstep.runtime.errors import StorageRefused, check
from everstep.runtime.storage.store import Location, Space, StorageMissing, checked


class MemoryStore:
    """See `Store`. Durable for as long as the object lives; arrays go with it."""

    def __init__(self, name: str = "run") -> None:
        self._name = name
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._space = Space()

    @property
    def uri(self) -> str:
        return f"memory://{self._name}"

    def location(self, path: str) -> Location:
        return Location(driver="memory", path=checked(path) + "/", space=self._space)

    def read(self, path: str) -> bytes:
        with self._lock:
            self._refuse_folder(checked(path))
            if path not in self._files:
                raise StorageMissing(path, "nothing", "a file or folder here")
            return self._files[path]

    def list(self, folder: str) -> tuple[str, ...]:
        from everstep.runtime.storage import tensors

        prefix = checked(folder) + "/" if folder else ""
        with self._lock:
            names = {
                path[len(prefix) :].split("/", 1)[0]
                for path in self._files
                if path.startswith(prefix)
            }
        return tuple(sorted(names | tensors.children(self._space, prefix)))

    def exists(self, path: str) -> bool:
        folder, _, name = checked(path).rpartition("/")
        return name in self.list(folder)

    def write_durable(self, path: str, data: bytes) -> None:
        with self._lock:
            self._refuse_odd(checked(path))
            self._files[path] = bytes(data)

    def write_together(
        self, folder: str, contents: Mapping[str, bytes], *, unsynced: Sequence[str] = ()
    ) -> None:
        check(not unsynced, f"{self.uri}/{folder}: nothing in memory waits for a sync")
        for path, data in contents.items():
            self.write_durable(f"{folder}/{path}", data)

    def create_exclusive(self, path: str, data: bytes) -> bool:
        with self._lock:
            self._refuse_odd(checked(path))
            return self._files.setdefault(path, bytes(data)) == data

    def delete_tree(self, path: str) -> None:
        from everstep.runtime.storage import tensors

        prefix = checked(path) + "/"
        with self._lock:
            for name in [n for n in self._files if n == path or n.startswith(prefix)]:
                del self._files[name]
        tensors.erase(self.location(path))

    def settle(self, folder: str) -> None:
        checked(folder)

    def sweep(self, folder: str) -> None:
        checked(folder)

    def _refuse_folder(self, path: str) -> None:
        if any(name.startswith(path + "/") for name in self._files):
            raise StorageRefused(
                path, "a folder is where a file should be", "another folder for this run"
            )

    def _refuse_odd(self, path: str) -> None:
        self._refuse_folder(path)
        parts = path.split("/")
        if any("/".join(parts[:count]) in self._files for count in range(1, len(parts))):
            raise StorageRefused(
                path, "a file is where a folder should be", "another folder for this run"
            )
