"""The controller as a process: one for a state folder, in the foreground or as a daemon.

Run as `python -m everstep.controller.cli.controller [--ready-fd N] [--idle-s F]`.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.controller.cli.failure import CommandFailed
from everstep.controller.local.errors import FolderBusy, RecordCorrupt
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.guard import ControllerLock, controller_pid, signal_controller
from everstep.controller.local.store import Store
from everstep.controller.ops.clock import SystemClock, pause
from everstep.controller.ops.settings import ENV_FOLDER, Settings

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

START_PATIENCE_S = 60.0
STOP_PATIENCE_S = 15.0
DAEMON_IDLE_S = 60.0
"""A daemon that nobody needs for this long ends; whoever needs one starts it."""


def run_controller(
    settings: Settings, *, ready_fd: int | None = None, idle_s: float | None = None
) -> int:
    """Be the controller of a state folder until told to end.

    Args:
        settings: of this process.
        ready_fd: gets a line once jobs are looked after.
        idle_s: end by itself when no job needs a controller for so long.

    Returns:
        The exit code: 1 when another controller is there.
    """
    from everstep.controller.local.tidy import tidy
    from everstep.controller.ops.logs import open_log

    folder = StateFolder(settings.folder)
    try:
        lock = ControllerLock(folder)
    except FolderBusy as error:
        whose = "" if error.pid is None else f" (process {error.pid})"
        print(f"error: {folder.root} has a controller already{whose}", file=sys.stderr)
        return 1
    log = open_log(level=settings.log_level)
    try:
        tidy(folder, log=log)
        asyncio.run(_serve(settings, folder, lock, log, ready_fd, idle_s))
    finally:
        lock.release()
    return 0


async def _serve(
    settings: Settings,
    folder: StateFolder,
    lock: ControllerLock,
    log: FilteringBoundLogger,
    ready_fd: int | None,
    idle_s: float | None,
) -> None:
    from everstep.controller.core.plan import plan
    from everstep.controller.local.watch import LocalWatch
    from everstep.controller.local.world import LocalWorld
    from everstep.controller.ops.clock import fresh_token
    from everstep.controller.reconcile.driver import Driver
    from everstep.controller.reconcile.reconciler import Reconciler

    clock = SystemClock()
    world = LocalWorld(folder, agent_command=settings.agent_command, clock=clock, log=log)
    with LocalWatch(world) as watch:
        reconciler = Reconciler(world, plan, clock=clock, fresh_token=fresh_token, log=log)
        driver = Driver(world, reconciler, watch, clock=clock, log=log)
        is_told = asyncio.Event()

        def on_signal() -> None:
            is_told.set()
            driver.stop()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, on_signal)
        log.info("controller started", pid=os.getpid(), folder=str(folder.root))
        if ready_fd is not None:
            os.write(ready_fd, b"ready\n")
            os.close(ready_fd)
        while not is_told.is_set():
            await driver.run(idle_s=idle_s)
            if not is_told.is_set() and _end_unneeded(folder, lock):
                break
    log.info("controller ended", why="told to" if is_told.is_set() else "no job needs it")


def _end_unneeded(folder: StateFolder, lock: ControllerLock) -> bool:
    """Let go of the folder unless a job came meanwhile.

    Under the folder's lock: a verb that writes a job either is seen here, or sees no controller
    afterwards and starts another one.
    """
    with folder.writing():
        if any(needs_controller(folder, name) for name in folder.job_names()):
            return False
        lock.release()
        return True


def needs_controller(folder: StateFolder, name: str) -> bool:
    """Whether something may have to be done for a job without anybody typing."""
    from everstep.controller.api.status import Phase

    try:
        record = Store(folder).read(name)
    except RecordCorrupt:
        return False
    if record.metadata.deleted_at is not None:
        return True
    phase = record.status.phase
    if phase is Phase.SUSPENDED:
        return not record.spec.suspend
    return phase not in (Phase.SUCCEEDED, Phase.FAILED)


def ensure_controller(settings: Settings) -> int | None:
    """Start a controller as a daemon if none runs.

    Returns:
        Its process id if it was started here, None if one was there.

    Raises:
        CommandFailed: it ended before it was ready, or was not ready in time.
    """
    folder = StateFolder(settings.folder)
    if controller_pid(folder) is not None:
        return None
    folder.make()
    ready_out, ready_in = os.pipe()
    try:
        process = _spawn_daemon(folder, ready_in)
    finally:
        os.close(ready_in)
    try:
        answered, _, _ = select.select([ready_out], [], [], START_PATIENCE_S)
        word = os.read(ready_out, 16) if answered else b""
    finally:
        os.close(ready_out)
    # It outlives this process, which therefore never waits for it.
    process.returncode = 0
    if word:
        return process.pid
    if controller_pid(folder) not in (None, process.pid):
        return None
    raise CommandFailed(
        f"error: the controller could not be started; see {folder.controller_log}\n"
        f"{_tail(folder.controller_log)}".rstrip()
    )


def stop_controller(folder: StateFolder) -> int | None:
    """End the controller and wait until it is gone; return its process id, None without one."""
    clock = SystemClock()
    pid = signal_controller(folder, signal.SIGTERM)
    deadline_s = clock.monotonic_s() + STOP_PATIENCE_S
    while pid is not None and controller_pid(folder) == pid:
        if clock.monotonic_s() >= deadline_s:
            # Stopped or stuck. It may be killed at any line, so this loses nothing.
            signal_controller(folder, signal.SIGKILL)
            deadline_s += STOP_PATIENCE_S
        pause(0.01)
    return pid


def kill_controller(folder: StateFolder) -> int | None:
    """SIGKILL the controller and wait until it is gone; return its process id, None without one."""
    clock = SystemClock()
    pid = signal_controller(folder, signal.SIGKILL)
    deadline_s = clock.monotonic_s() + STOP_PATIENCE_S
    while pid is not None and controller_pid(folder) == pid:
        if clock.monotonic_s() >= deadline_s:
            raise CommandFailed(f"error: process {pid} is still there after SIGKILL")
        pause(0.005)
    return pid


def _spawn_daemon(folder: StateFolder, ready_in: int) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "everstep.controller.cli.controller"),
        *("--ready-fd", str(ready_in)),
        *("--idle-s", str(DAEMON_IDLE_S)),
    ]
    with folder.controller_log.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(ready_in,),
            start_new_session=True,
            cwd=folder.root,
            env={**os.environ, ENV_FOLDER: str(folder.root)},
        )


def _tail(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-5:])
    except OSError:
        return ""


def main(arguments: list[str] | None = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="everstep-controller")
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--idle-s", type=float)
    found = parser.parse_args(arguments)
    return run_controller(Settings.read(), ready_fd=found.ready_fd, idle_s=found.idle_s)


if __name__ == "__main__":
    sys.exit(main())
