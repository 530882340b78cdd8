"""One controller for one state folder: the lock, and who holds it."""

from __future__ import annotations

import os

from everstep.controller.local import identity
from everstep.controller.local.errors import FolderBusy
from everstep.controller.local.folder import StateFolder, lock_holder, try_lock
from everstep.controller.ops.clock import pause


class ControllerLock:
    """Held by the controller as long as it lives; the kernel lets go of it when it dies."""

    def __init__(self, folder: StateFolder) -> None:
        """Take the lock and write this process's id into it.

        Raises:
            FolderBusy: another controller holds it; its process id is in the error.
        """
        self._path = folder.controller_lock
        folder.make()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _try_patiently(self._fd):
            os.close(self._fd)
            raise FolderBusy(self._path, lock_holder(self._path) or _written_pid(folder))
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another controller take over; also the file no longer names this process."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def controller_pid(folder: StateFolder) -> int | None:
    """Return the process that is the controller of a folder now, or None."""
    holder = lock_holder(folder.controller_lock)
    if holder is not None:
        return holder
    try:
        fd = os.open(folder.controller_lock, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        if try_lock(fd):
            return None
        # Held, and the kernel does not say by whom (a layered file system does that).
        return _written_pid(folder)
    finally:
        os.close(fd)


def signal_controller(folder: StateFolder, signum: int) -> int | None:
    """Send a signal to the controller of a folder; return its process id, None without one."""
    pid = controller_pid(folder)
    who = None if pid is None else identity.identify(pid)
    # Asked again after the identity: it is still the process that holds the lock.
    if who is None or controller_pid(folder) != who.pid or not identity.send(who, signum):
        return None
    return who.pid


def _try_patiently(fd: int) -> bool:
    # Whoever asks for the controller may hold the lock for an instant (`controller_pid`).
    for _ in range(20):
        if try_lock(fd):
            return True
        pause(0.01)
    return False


def _written_pid(folder: StateFolder) -> int | None:
    try:
        return int(folder.controller_lock.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None
