"""A store on a POSIX file system, local or mounted. The reference for durability.

A file is written whole under a temporary name (`.<name>.<random>.tmp`), synced, then published by
`rename` or, where it must not exist, by `link`; then its directory is synced.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Concatenate, ParamSpec, Self, TypeVar

import tenacity

from everstep.runtime.backoff import random_exponential
from everstep.runtime.errors import StorageRefused, StorageUnavailable
from everstep.runtime.storage.retry import Verdict, judge
from everstep.runtime.storage.store import Location, StorageMissing, checked

_ATTEMPTS_MAX = 6
_TEMPORARY = ".tmp"
_SYNCING = 16
"""So many syncs wait at once."""

P = ParamSpec("P")
R = TypeVar("R")


class _Lost(StorageUnavailable):
    """What was written may be lost, and cannot be written again from here."""


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, StorageUnavailable) and not isinstance(error, _Lost)


def translated(error: OSError, path: str) -> StorageRefused | StorageUnavailable:
    """The error in our words. The caller raises it from the original."""
    judgement = judge(error.errno, error.strerror or str(error))
    match judgement.verdict:
        case Verdict.MISSING:
            return StorageMissing(path, judgement.found, judgement.remedy)
        case Verdict.REFUSED:
            return StorageRefused(path, judgement.found, judgement.remedy)
        case Verdict.PASSING:
            return StorageUnavailable(f"{path}: {judgement.found}", retry_after_s=1.0)


def _operation(
    method: Callable[Concatenate[PosixStore, str, P], R],
) -> Callable[Concatenate[PosixStore, str, P], R]:
    """Translate errors, and try again, a bounded number of times, what may pass."""

    @functools.wraps(method)
    def wrapped(self: PosixStore, path: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
        def attempt() -> R:
            try:
                return method(self, path, *args, **kwargs)
            except OSError as error:
                raise translated(error, error.filename or self.full(path)) from error

        try:
            return attempt()
        except StorageUnavailable as error:
            first = [error]

        def again() -> R:
            if first:
                raise first.pop()
            return attempt()

        # Only after a failure: the machinery takes longer than most operations do.
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(_ATTEMPTS_MAX),
            wait=random_exponential(0.02, 1.0),
            retry=tenacity.retry_if_exception(_may_pass),
            reraise=True,
        )
        return retrying(again)

    return wrapped


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(descriptor)


class PosixStore:
    """See `Store`. The folder need not exist; it is made when something is first written."""

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)

    @property
    def uri(self) -> str:
        return f"file://{self._root}"

    def full(self, path: str) -> str:
        return os.path.join(self._root, path) if path else self._root

    def location(self, path: str) -> Location:
        return Location(driver="file", path=self.full(checked(path)) + "/")

    @_operation
    def read(self, path: str) -> bytes:
        with open(self.full(checked(path)), "rb") as file:
            return file.read()

    @_operation
    def list(self, folder: str) -> tuple[str, ...]:
        try:
            names = os.listdir(self.full(checked(folder) if folder else ""))
        except FileNotFoundError:
            return ()
        return tuple(sorted(name for name in names if not _is_temporary(name)))

    @_operation
    def exists(self, path: str) -> bool:
        try:
            os.lstat(self.full(checked(path)))
        except FileNotFoundError:
            return False
        return True

    @_operation
    def write_durable(self, path: str, data: bytes) -> None:
        full = self.full(checked(path))
        self._make_folder(os.path.dirname(full))
        temporary = _write_temporary(full, data)
        try:
            os.rename(temporary, full)
        except BaseException:
            _forget(temporary)
            raise
        sync_directory(os.path.dirname(full))

    @_operation
    def write_together(
        self, folder: str, contents: Mapping[str, bytes], *, unsynced: Sequence[str] = ()
    ) -> None:
        top = self.full(checked(folder))
        made: dict[str, str] = {}
        with _Syncing() as syncing:
            try:
                for path, data in contents.items():
                    full = os.path.join(top, checked(path))
                    # All names are synced at the end.
                    os.makedirs(os.path.dirname(full), exist_ok=True)
                    made[full] = _write_temporary(full, data, is_synced=False)
                syncing.all(
                    [(_sync_file, temporary) for temporary in made.values()]
                    + [(_sync_of_others, os.path.join(top, path)) for path in unsynced]
                )
                while made:
                    full, temporary = next(iter(made.items()))
                    os.rename(temporary, full)
                    del made[full]
            finally:
                for temporary in made.values():
                    _forget(temporary)
            syncing.all([(sync_directory, one) for one in self._folders_to_settle(top)])

    @_operation
    def create_exclusive(self, path: str, data: bytes) -> bool:
        full = self.full(checked(path))
        folder = os.path.dirname(full)
        self._make_folder(folder)
        temporary = _write_temporary(full, data)
        try:
            # A sweeper may have taken the temporary file (then `link` says that it is missing):
            # it does so only where the entry exists.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(temporary, full)
        finally:
            _forget(temporary)
        with open(full, "rb") as file:
            is_ours = file.read() == data
        sync_directory(folder)
        return is_ours

    @_operation
    def delete_tree(self, path: str) -> None:
        full = self.full(checked(path))
        try:
            mode = os.lstat(full).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            _delete_folder(full)
        else:
            _forget(full)
        sync_directory(os.path.dirname(full))

    @_operation
    def settle(self, folder: str) -> None:
        with _Syncing() as syncing:
            folders = self._folders_to_settle(self.full(checked(folder)))
            syncing.all([(sync_directory, one) for one in folders])

    def _folders_to_settle(self, full: str) -> Sequence[str]:
        found = [directory for directory, _, _ in os.walk(full)]
        # From the folder up to the run: a name is durable when its parent is synced.
        while full != self._root:
            full = os.path.dirname(full)
            found.append(full)
        return found

    @_operation
    def sweep(self, folder: str) -> None:
        full = self.full(checked(folder))
        try:
            names = os.listdir(full)
        except FileNotFoundError:
            return
        for name in filter(_is_temporary, names):
            target = name[1:].rsplit(".", 2)[0]
            if os.path.lexists(os.path.join(full, target)):
                _forget(os.path.join(full, name))

    def _make_folder(self, full: str) -> None:
        """Make a folder and its parents, each name durable before it is relied on."""
        missing: list[str] = []
        while not os.path.isdir(full):
            missing.append(full)
            parent = os.path.dirname(full)
            if parent == full:
                break
            full = parent
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                _make_one(folder)
            sync_directory(os.path.dirname(folder))


def _make_one(folder: str) -> None:
    try:
        os.mkdir(folder)
    except FileNotFoundError as error:
        parent = os.path.dirname(folder)
        if not os.path.isdir(parent):
            raise
        # Its parent is there, and takes none: `proc` answers so.
        raise StorageRefused(
            folder,
            f"a folder that cannot be made: the file system of {parent} takes none "
            f"({errno.errorcode[errno.ENOENT]})",
            "a folder on a file system where folders can be made",
        ) from error


class _Syncing:
    """Syncs many at once: a journal that is asked by several commits once for them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_SYNCING, thread_name_prefix="everstep-sync")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def all(self, syncs: Sequence[tuple[Callable[[str], None], str]]) -> None:
        # All are waited for before an error is raised: nobody works behind the caller's back.
        tasks = [self._threads.submit(sync, path) for sync, path in syncs]
        wait(tasks)
        for task in tasks:
            task.result()


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(descriptor)


def _sync_of_others(path: str) -> None:
    """Sync what somebody else wrote. An error is final.

    The system tells a failed write once and then forgets it: a second sync of the same file would
    succeed over content that is lost, and nobody here can write that again.
    """
    try:
        _sync_file(path)
    except OSError as error:
        said = translated(error, path)
        raise _Lost(str(said)) if isinstance(said, StorageUnavailable) else said from error


def _write_temporary(full: str, data: bytes, *, is_synced: bool = True) -> str:
    folder, name = os.path.split(full)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}{_TEMPORARY}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            if is_synced:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        _forget(temporary)
        error.filename = full
        raise
    return temporary


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(_TEMPORARY)


def _forget(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _delete_folder(full: str) -> None:
    """Two who clean at once meet each other's gaps; a gap is what both want."""
    try:
        entries = list(os.scandir(full))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            _delete_folder(entry.path)
        else:
            _forget(entry.path)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(full)
