"""Every operation on a folder by the system calls of this process, seen before it is done.

What the engine does to a file system goes through `os`, but for the index that the array library
merges at a commit, which is one operation here. Whoever watches may count, note, wait, raise, or
end the process.
"""

from __future__ import annotations

import builtins
import contextlib
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from everstep.runtime.checkpoint import commit

CHANGES = ("create", "write", "sync", "rename", "link", "unlink", "mkdir", "rmdir", "merge")
READS = ("open", "read", "list", "stat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    kind: str
    path: str
    """Absolute; of a descriptor, what was opened."""
    data: bytes = b""
    """What is written."""
    target: str = ""
    """The new name."""

    @property
    def is_change(self) -> bool:
        return self.kind in CHANGES


Watch = Callable[[Operation], None]


@contextlib.contextmanager
def watched(root: str, watch: Watch) -> Generator[None]:
    """Call `watch` before each operation on what is below a folder, from whatever thread."""
    real: dict[str, Any] = {}
    opened: dict[int, str] = {}

    def see(kind: str, path: Any, **more: Any) -> None:
        full = os.path.abspath(os.fspath(path)) if isinstance(path, str | os.PathLike) else ""
        if full == root or full.startswith(root + os.sep):
            watch(Operation(kind=kind, path=full, **more))

    def replace(name: str, with_: Callable[..., Any], module: Any = os) -> None:
        real[name] = getattr(module, name)
        setattr(module, name, with_)

    def open_(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        see("create" if flags & os.O_CREAT else "open", path)
        descriptor: int = real["open"](path, flags, *rest, **named)
        opened[descriptor] = os.path.abspath(os.fspath(path))
        return descriptor

    def close(descriptor: int) -> None:
        opened.pop(descriptor, None)
        real["close"](descriptor)

    def write(descriptor: int, data: Any) -> int:
        see("write", opened.get(descriptor), data=bytes(data))
        count: int = real["write"](descriptor, data)
        return count

    def writev(descriptor: int, buffers: Any) -> int:
        see("write", opened.get(descriptor), data=b"".join(map(bytes, buffers)))
        count: int = real["writev"](descriptor, buffers)
        return count

    def fsync(descriptor: int) -> None:
        see("sync", opened.get(descriptor))
        real["fsync"](descriptor)

    def preadv(descriptor: int, *rest: Any) -> int:
        see("read", opened.get(descriptor))
        count: int = real["preadv"](descriptor, *rest)
        return count

    def of_two(kind: str) -> Callable[..., None]:
        def call(source: Any, target: Any, **named: Any) -> None:
            see(kind, source, target=os.path.abspath(target))
            real[kind](source, target, **named)

        return call

    def of_one(name: str, kind: str) -> Callable[..., Any]:
        def call(path: Any = ".", *rest: Any, **named: Any) -> Any:
            see(kind, path)
            return real[name](path, *rest, **named)

        return call

    def open_file(file: Any, *rest: Any, **named: Any) -> Any:
        see("open", file)
        return real["builtin"](file, *rest, **named)

    def merge(arrays: Any, *rest: Any) -> Any:
        see("merge", arrays.path)
        return real["merge"](arrays, *rest)

    calls: dict[str, Callable[..., Any]] = {
        "open": open_,
        "close": close,
        "write": write,
        "writev": writev,
        "fsync": fsync,
        "preadv": preadv,
    }
    for name, call in calls.items():
        replace(name, call)
    for name in ("rename", "link"):
        replace(name, of_two(name))
    for name, kind in (
        *((name, name) for name in ("unlink", "mkdir", "rmdir")),
        *(("listdir", "list"), ("scandir", "list"), ("lstat", "stat")),
    ):
        replace(name, of_one(name, kind))
    replace("merge", merge, commit)
    real["builtin"] = builtins.open
    builtins.open = open_file
    try:
        yield
    finally:
        builtins.open = real.pop("builtin")
        setattr(commit, "merge", real.pop("merge"))  # noqa: B010 - it is no name of the module's own
        for name, call in real.items():
            setattr(os, name, call)
