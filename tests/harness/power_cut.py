"""What a folder looks like after a power cut, from the operations that were done on it before.

What was not synced may be there, or not. A file's content is durable when the file was synced, a
name when its folder was. Three worlds stand for all: everything arrived (as after a kill), nothing
did that was not synced, and all names did but no content that was not synced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from watched_disk import Operation


class World(Enum):
    ALL = "all arrived"
    SYNCED = "only what was synced"
    NAMES = "all names, and the content that was synced"


@dataclass(slots=True)
class _File:
    content: bytes = b""
    durable: bytes = b""


@dataclass(slots=True)
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict[str, "_File | _Folder"])
    durable: dict[str, _File | _Folder] = field(default_factory=dict[str, "_File | _Folder"])


class Disk:
    """A folder, replayed. All that is there at the beginning is durable."""

    def __init__(self, root: str, before: Path) -> None:
        """Begin.

        Args:
            root: where the folder was when it was watched.
            before: what was in it.
        """
        self._root = root
        self._top = self._read(before)
        self._by_path: dict[str, _File] = {}
        """Also of files that have lost their name while they are written."""

    def do(self, operation: Operation, after: Path) -> None:
        """Do what was seen.

        Args:
            operation: in its turn.
            after: the folder as it was at last; there the array library's merge is looked at.
        """
        path = operation.path
        match operation.kind:
            case "create":
                folder, name = self._place(path)
                made = folder.names.setdefault(name, _File())
                assert isinstance(made, _File)
                made.content = b""
                self._by_path[path] = made
            case "write":
                self._by_path[path].content += operation.data
            case "sync":
                at = self._at(path)
                if isinstance(at, _File):
                    at.durable = at.content
                else:
                    at.durable = dict(at.names)
            case "link" | "rename":
                folder, name = self._place(path)
                other, new = self._place(operation.target)
                if operation.kind == "link" and new in other.names:
                    return
                other.names[new] = folder.names[name]
                if operation.kind == "rename":
                    del folder.names[name]
            case "unlink" | "rmdir":
                folder, name = self._place(path)
                folder.names.pop(name, None)
            case "mkdir":
                folder, name = self._place(path)
                folder.names.setdefault(name, _Folder())
            case "merge":
                path = path.rstrip("/")
                self._merge(path, after / os.path.relpath(path, self._root))
            case _:
                raise AssertionError(operation.kind)

    def cut(self, where: Path, world: World) -> None:
        """Lay out what is there after a power cut now."""
        self._lay(self._top, where, world)

    def _lay(self, folder: _Folder, where: Path, world: World) -> None:
        where.mkdir(parents=True, exist_ok=True)
        names = folder.durable if world is World.SYNCED else folder.names
        for name, at in names.items():
            if isinstance(at, _Folder):
                self._lay(at, where / name, world)
            else:
                (where / name).write_bytes(at.content if world is World.ALL else at.durable)

    def _merge(self, path: str, found: Path) -> None:
        """What the array library wrote, of which nothing is synced yet."""
        folder = self._at(path)
        assert isinstance(folder, _Folder)
        folder.names["manifest.ocdbt"] = _File(content=(found / "manifest.ocdbt").read_bytes())
        data = _Folder()
        for name in os.listdir(found / "d"):
            data.names[name] = _File(content=(found / "d" / name).read_bytes())
        folder.names["d"] = data

    def _whole(self, file: Path) -> _File:
        content = file.read_bytes()
        return _File(content=content, durable=content)

    def _at(self, path: str) -> _File | _Folder:
        if path == self._root:
            return self._top
        folder, name = self._place(path)
        return folder.names[name]

    def _place(self, path: str) -> tuple[_Folder, str]:
        parts = os.path.relpath(path, self._root).split(os.sep)
        folder = self._top
        for part in parts[:-1]:
            below = folder.names[part]
            assert isinstance(below, _Folder)
            folder = below
        return folder, parts[-1]

    def _read(self, where: Path) -> _Folder:
        made = _Folder()
        for found in where.iterdir():
            made.names[found.name] = self._read(found) if found.is_dir() else self._whole(found)
        made.durable = dict(made.names)
        return made
