"""The named parts of a step, and what each kind of them becomes on storage.

Arrays in a tree go the way of the engine: planned, shared among processes, checked chunk by
chunk. Everything else is a few files that one process writes: JSON, bytes, the state of a data
iterator, or what the user's own handler makes of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from everstep.runtime.checkpoint import orbax
from everstep.runtime.errors import ConfigurationError, StateRefused
from everstep.runtime.storage.manifest import PYTREE, STATE, digest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_RESERVED = frozenset({"everstep", "commit_success", "metrics"})
JSON_FILE = "metadata"
"""Orbax's name of the file of a JSON item."""
BYTES_FILE = "data"


class Parts(Mapping[str, Any]):
    """Named parts of a step: `es.Parts(model=…, optimizer=…, dataset=…)`.

    A part is a tree of arrays; `es.Json(value)`; `bytes`; anything with `get_state` and
    `set_state` (a data iterator); or a `es.PartHandler`.
    """

    def __init__(self, **parts: Any) -> None:
        """Name the parts.

        Raises:
            ConfigurationError: there are none, or a name cannot be a folder's.
        """
        if not parts:
            raise ConfigurationError("es.Parts", "no part", "one at least")
        for name in parts:
            if not _NAME.fullmatch(name) or name in _RESERVED:
                raise ConfigurationError(
                    "es.Parts",
                    name,
                    "letters, digits, _ and - (64 at most), and none of "
                    + ", ".join(sorted(_RESERVED)),
                )
        self._parts = parts

    def __getitem__(self, name: str) -> Any:
        return self._parts[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._parts:
            raise AttributeError(f"no part {name!r}; there are {', '.join(self._parts)}")
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"Parts({', '.join(self._parts)})"


class Json:
    """A part that is a JSON value; Orbax reads it as its own JSON item."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class PartFiles(Protocol):
    """Where a handler puts its files, and finds them again: names in a folder of their own."""

    def write(self, name: str, data: bytes) -> None:
        """Durability: on return the file is on storage."""
        ...

    def read(self, name: str) -> bytes:
        """The file, verified. Raises `KeyError` when there is none of that name."""
        ...

    def names(self) -> tuple[str, ...]:
        """Of all files of the part that were written so far."""
        ...


@runtime_checkable
class PartHandler(Protocol):
    """What a user writes for a part of a kind of his own."""

    def describe(self) -> str:
        """A name of the kind, kept with the part. Called before `save` returns."""
        ...

    def write(self, files: PartFiles) -> None:
        """Write the part. Called in the background: what it reads must not change."""
        ...

    def read(self, files: PartFiles) -> Any:
        """Make the part anew. What it returns is what `restore` gives."""
        ...


@runtime_checkable
class _Iterator(Protocol):
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


Write = Callable[[PartFiles], None]


class FilePart:
    """A part of files that is ready to be written."""

    def __init__(
        self, handler: str, write: Write, *, orbax_handler: str | None, is_everywhere: bool = False
    ) -> None:
        self.handler = handler
        self.write = write
        self.orbax_handler = orbax_handler
        self.is_everywhere = is_everywhere
        """Every process writes its own; else process 0 alone."""


def as_parts(state: Any) -> Mapping[str, Any]:
    """What was given to `save` or `restore`, by item."""
    return state if isinstance(state, Parts) else {STATE: state}


def file_part(name: str, value: Any, process: int, process_count: int) -> FilePart | None:
    """What a part that is no tree of arrays becomes; None for a tree.

    What can change is copied here, so what is written is what was given.

    Raises:
        StateRefused: it cannot be written.
    """
    if isinstance(value, Json):
        return _json_part(name, value.value)
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return FilePart("bytes", lambda files: files.write(BYTES_FILE, data), orbax_handler=None)
    if not is_leaf(value):
        return None  # Whatever methods its class has, jax knows it as a tree.
    if isinstance(value, PartHandler):
        return FilePart(str(value.describe()), value.write, orbax_handler=None)
    if isinstance(value, _Iterator):
        text = _state_text(name, value.get_state())
        file = iterator_file(process, process_count)
        return FilePart(
            "iterator",
            lambda files: files.write(file, text),
            orbax_handler=None,
            is_everywhere=True,
        )
    return None


def is_leaf(value: Any) -> bool:
    return jax.tree_util.all_leaves([value])


def _json_part(name: str, value: Any) -> FilePart:
    try:
        data = json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise StateRefused(name, str(error), "a value that JSON holds") from error
    return FilePart(
        "json", lambda files: files.write(JSON_FILE, data), orbax_handler=orbax.JSON_HANDLER
    )


def _state_text(name: str, state: Any) -> bytes:
    if isinstance(state, bytes):
        return b"b" + state
    try:
        return b"j" + json.dumps(state).encode()
    except (TypeError, ValueError) as error:
        raise StateRefused(
            name, f"get_state gave {type(state).__name__}: {error}", "bytes or a JSON value"
        ) from error


def iterator_file(process: int, process_count: int) -> str:
    return f"process_{process}-of-{process_count}"


def read_part(
    name: str, like: Any, handler: str, files: PartFiles, process: int, process_count: int
) -> Any:
    """A part that is no tree of arrays, from its files.

    Args:
        name: of the part.
        like: what the user gave to `restore` in its place.
        handler: what wrote it.
        files: the part's.
        process: this process's number.
        process_count: how many there are now.

    Raises:
        StateRefused: it is of another kind than what is wanted.
    """
    if isinstance(like, PartHandler):
        _expect(name, handler, str(like.describe()))
        return like.read(files)
    if isinstance(like, _Iterator):
        _expect(name, handler, "iterator")
        wanted = iterator_file(process, process_count)
        if wanted not in files.names():
            raise StateRefused(
                name, ", ".join(files.names()), f"{wanted}: as many processes as saved it"
            )
        data = files.read(wanted)
        like.set_state(data[1:] if data[:1] == b"b" else json.loads(data[1:]))
        return like
    if handler == "json":
        return json.loads(files.read(JSON_FILE))
    if handler == "bytes":
        return files.read(BYTES_FILE)
    raise StateRefused(
        name, f"a part written by {handler!r}", "the handler that wrote it, in its place in `like`"
    )


def _expect(name: str, found: str, expected: str) -> None:
    if found != expected:
        kind = "a tree of arrays" if found == PYTREE else repr(found)
        raise StateRefused(name, f"a part written as {kind}", f"one written by {expected!r}")


class Recorded:
    """`PartFiles` over a draft: writes, and notes the digest of every file."""

    def __init__(self, write: Callable[[str, bytes], None]) -> None:
        self._write = write
        self.digests: dict[str, str] = {}

    def write(self, name: str, data: bytes) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name) or name in self.digests:
            raise ConfigurationError("a part's file", name, "a plain name, once")
        self._write(name, data)
        self.digests[name] = digest(data)

    def read(self, name: str) -> bytes:
        raise KeyError(name)

    def names(self) -> tuple[str, ...]:
        return tuple(self.digests)


def fingerprint(text: str) -> str:
    """A short name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
