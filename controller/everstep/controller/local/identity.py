"""Who a process is: a number alone may belong to somebody else by now.

A process is identified by pid, start time and boot. Everything that an agent starts carries its
agent's mark in the environment, so that also a process that left its group and its session is
found. A signal goes through a pidfd that was opened before the identity was compared; so it can
never reach another process that got the number later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from everstep.controller.ops.clock import pause

MARK = "EVERSTEP_AGENT_OF"
"""Environment variable that all that an agent starts inherits.

Its value is `<job uid>:<slice>:<host>:<state folder>`.
"""


_KERNEL_THREAD = 0x00200000
"""`PF_KTHREAD` among the flags of `/proc/<pid>/stat`."""
_EXEC_LOOKS = 100
_EXEC_LOOK_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    pid: int
    start_ticks: int
    boot_id: str


@cache
def boot_id() -> str:
    """Return the id of this boot; it cannot change while this process lives."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def identify(pid: int) -> Identity | None:
    """Return who has this number now, or None when nobody has."""
    fields = _stat(pid)
    if fields is None:
        return None
    return Identity(pid=pid, start_ticks=int(fields[19]), boot_id=boot_id())


def is_running(who: Identity) -> bool:
    """Whether exactly this process is there and has not ended (a zombie has)."""
    fields = _stat(who.pid)
    if fields is None or int(fields[19]) != who.start_ticks or fields[0] in "ZX":
        return False
    return who.boot_id == boot_id()


@contextmanager
def held(who: Identity) -> Generator[int | None]:
    """Yield a pidfd of exactly this process, or None when it has ended."""
    try:
        pidfd = os.pidfd_open(who.pid)
    except (ProcessLookupError, ValueError):
        yield None
        return
    try:
        # The number cannot have been given away between these two lines without the start time
        # having changed.
        yield pidfd if is_running(who) else None
    finally:
        os.close(pidfd)


def send(who: Identity, signum: int) -> bool:
    """Send a signal to one process.

    Returns:
        False when it has ended already.
    """
    with held(who) as pidfd:
        if pidfd is None:
            return False
        return _pidfd_send(pidfd, signum)


def send_group(who: Identity, signum: int) -> bool:
    """Send a signal to the process group that a session leader leads.

    Returns:
        False when the process that led it has ended already: then nothing was sent.
    """
    with held(who) as pidfd:
        if pidfd is None:
            return False
        try:
            os.killpg(who.pid, signum)
        except ProcessLookupError:
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A host, all hosts of a slice, or all of a job: what a mark is looked for by."""

    job_uid: str
    slice: int | None = None
    host: int | None = None

    @property
    def prefix(self) -> str:
        parts = [self.job_uid]
        if self.slice is not None:
            parts.append(str(self.slice))
            if self.host is not None:
                parts.append(str(self.host))
        return ":".join(parts) + ":"


def mark_of(place: Place, state_folder: Path) -> str:
    """Return the mark of everything that the agent of one host starts."""
    return f"{place.prefix}{state_folder}"


def find_at(place: Place) -> frozenset[Identity]:
    """Find every process that was started at a place, whatever group or session it is in."""
    return frozenset(who for who, _ in find_marked(place.prefix))


def find_marked(prefix: str) -> tuple[tuple[Identity, str], ...]:
    """Find every process whose mark starts with this, with its mark."""
    wanted = f"{MARK}={prefix}".encode()
    found: list[tuple[Identity, str]] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        mark = _mark(entry.path, wanted)
        if mark is None:
            continue
        who = identify(int(entry.name))
        # Read again after the identity: the number may have changed hands in between.
        if who is not None and is_running(who) and _mark(entry.path, wanted) == mark:
            found.append((who, mark))
    return tuple(found)


def _mark(process: str, wanted: bytes) -> str | None:
    environ = _environ(process)
    if environ is None or wanted not in environ:
        return None
    for entry in environ.split(b"\0"):
        if entry.startswith(wanted):
            return entry.split(b"=", 1)[1].decode(errors="replace")
    return None


def _environ(process: str) -> bytes | None:
    """Return the environment of a process, or None when it has none that we may see.

    In the middle of an `exec` a process has neither environment nor command line for a moment; one
    that is overlooked then would outlive its slice. So it is looked at again.
    """
    try:
        for _ in range(_EXEC_LOOKS):
            # Without `Path`: this runs for every process of the machine.
            environ = _read(f"{process}/environ")
            if environ:
                return environ
            if _read(f"{process}/cmdline"):
                # It has become its program, maybe between the two lines.
                return _read(f"{process}/environ") or None
            fields = _stat(int(process.rsplit("/", 1)[1]))
            if fields is None or fields[0] in "ZX" or int(fields[6]) & _KERNEL_THREAD:
                return None
            pause(_EXEC_LOOK_S)
    except OSError:
        # It ended, or it is not ours to look at; then it is none of ours.
        return None
    return None


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as source:
        return source.read() or b""


def _pidfd_send(pidfd: int, signum: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    return True


def _stat(pid: int) -> list[str] | None:
    """Return the fields of `/proc/<pid>/stat` from the state on; the name may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as source:
            text = (source.read() or b"").decode(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()
