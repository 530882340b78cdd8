"""What the kernel offers for keeping processes together: death signals, adoption, counting threads.

Linux only, like everything here. Nothing is remembered between calls.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from everstep.runtime.errors import InvariantViolated

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

# Loaded at import, so that a forked process needs neither the loader nor a lock to call it.
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise InvariantViolated(f"prctl({option}, {value}) failed: {os.strerror(number)}")


def die_with_parent(parent_pid: int) -> None:
    """Get SIGKILL when the parent ends; end now if it ended already.

    The kernel ties this to the parent's *thread* that forked: parents here fork from their main
    thread only.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def name_process(name: str) -> None:
    """Set what `ps` and `top` show, 15 letters at most. Never an error."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def thread_names() -> tuple[str, ...]:
    """Names of all threads of this process as the kernel knows them, Python's or not."""
    names: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue
    return tuple(names)


def children_of(pid: int) -> frozenset[int]:
    """Process ids of the direct children of a process; empty when it is gone."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found.update(int(child) for child in task.read_text().split())
        except OSError:
            continue
    return frozenset(found)


def end_strays(keep: frozenset[int]) -> int:
    """Kill and reap children of this process that are not in `keep`, and what they leave behind.

    Returns:
        How many were ended.

    Blocking: until each is reaped; a killed process that waits for a device may take a moment.
    """
    ended = 0
    while strays := children_of(os.getpid()) - keep:
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
            ended += 1
    return ended
