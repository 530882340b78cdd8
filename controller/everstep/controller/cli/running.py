"""`run` and `top`: following one job, drawn on a terminal, in lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from everstep.controller.api.status import JobStatus, Phase
from everstep.controller.cli import jobs
from everstep.controller.cli.awaiting import FINISHED, read_or_none
from everstep.controller.cli.failure import EXIT_FAILED, EXIT_INTERRUPTED, CommandFailed
from everstep.controller.cli.following import Follower
from everstep.controller.local import capacity
from everstep.controller.local.errors import RecordCorrupt
from everstep.controller.local.events import read_events
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.guard import controller_pid
from everstep.controller.local.observe import load_report
from everstep.controller.local.processes import load_host, recorded_hosts
from everstep.controller.local.store import Store
from everstep.controller.ops.clock import SystemClock
from everstep.controller.ops.settings import Settings

if TYPE_CHECKING:
    from rich.live import Live

    from everstep.controller.cli.picture import Look

DRAW_EVERY_S = 0.1
"""A terminal that is redrawn more often than this only costs."""
LINE_EVERY_S = 5.0
SUSPEND_PATIENCE_S = 300.0


def run_file(settings: Settings, source: str) -> int:
    """Apply a job, follow it to its end, and end what was started for it.

    Returns:
        The exit code: 0 when it succeeded, 1 when it failed, 130 when it was interrupted; then its
        newest step is held and durable, and all its processes have ended.
    """
    from everstep.controller.cli.jobfile import read_jobs

    found = read_jobs(source)
    if len(found) != 1:
        raise CommandFailed(f"error: {source} has {len(found)} jobs; run takes one")
    name = found[0].metadata.name
    try:
        jobs.apply_jobs(settings, found)
        status = _follow(settings, name)
    except KeyboardInterrupt:
        # Also while it is being applied: the job may be there already.
        return _interrupt(settings, name)
    if status is None:
        print(f"{name} was deleted")
        return EXIT_FAILED
    print(f"{name} {status.phase.value}: {status.message}")
    if status.phase is Phase.FAILED:
        print(f"see: everstep local logs {name}; everstep local describe {name}")
    return 0 if status.phase is Phase.SUCCEEDED else EXIT_FAILED


def watch_job(settings: Settings, name: str | None) -> None:
    """Follow a job until it is finished, or the reader has seen enough."""
    chosen = jobs.only_job(Store(StateFolder(settings.folder)), name)
    _follow(settings, chosen)


def look_at(folder: StateFolder, name: str) -> Look | None:
    """Return what is known of a job now; None when it does not exist."""
    from everstep.controller.cli.picture import Look

    record = read_or_none(Store(folder), name)
    if record is None:
        return None
    job = folder.job(name)
    reports = []
    for host in recorded_hosts(job):
        try:
            found = load_host(job, host)
        except RecordCorrupt:
            continue
        report = None if found is None else load_report(job, found)
        if report is not None:
            reports.append(report)
    return Look(
        record=record,
        reports=tuple(reports),
        events=read_events(job),
        has_controller=controller_pid(folder) is not None,
        now_s=SystemClock().unix_s(),
    )


def _follow(settings: Settings, name: str) -> JobStatus | None:
    """Show a job until it is finished; None when it was deleted meanwhile."""
    folder = StateFolder(settings.folder)
    if not sys.stdout.isatty():
        return _follow_in_lines(folder, name)
    from rich.console import Console
    from rich.live import Live

    with Follower(folder, name) as follower, Live(console=Console(), auto_refresh=False) as live:
        return _follow_drawn(folder, name, follower, live)


def _follow_drawn(
    folder: StateFolder, name: str, follower: Follower, live: Live
) -> JobStatus | None:
    from everstep.controller.cli.picture import draw

    drawn_s = 0.0
    while True:
        look = look_at(folder, name)
        if look is None:
            return None
        live.update(draw(look), refresh=True)
        drawn_s = time.monotonic()
        if look.record.status.phase in FINISHED:
            return look.record.status
        while (left_s := drawn_s + DRAW_EVERY_S - time.monotonic()) > 0:
            follower.wait(left_s)
        follower.wait(None)


def _follow_in_lines(folder: StateFolder, name: str) -> JobStatus | None:
    from everstep.controller.cli.picture import event_line, line

    told = ""
    told_s = 0.0
    events_told = 0
    with Follower(folder, name) as follower:
        while True:
            look = look_at(folder, name)
            if look is None:
                return None
            for event in look.events[events_told:]:
                print(event_line(name, event), flush=True)
            events_told = len(look.events)
            status = look.record.status
            members = [s.id for s in status.slice_statuses if s.rank is not None]
            now = f"{status.phase} {status.incarnation} {members}"
            is_over = status.phase in FINISHED
            if now != told or is_over or time.monotonic() - told_s >= LINE_EVERY_S:
                print(line(look), flush=True)
                told, told_s = now, time.monotonic()
            if is_over:
                return status
            follower.wait(None)


def _interrupt(settings: Settings, name: str) -> int:
    """Suspend a job that its user interrupted; asked again, end its processes at once."""
    folder = StateFolder(settings.folder)
    if read_or_none(Store(folder), name) is None:
        return EXIT_INTERRUPTED
    print(f"\nsuspending {name}: its newest step is held first; Ctrl-C again ends it at once")
    try:
        jobs.suspend_job(settings, name)
        _wait_until_suspended(folder, name)
    except KeyboardInterrupt:
        count = capacity.kill(capacity.place_of(folder.job(name)), clock=SystemClock())
        print(f"\n{name}: {count} processes killed; it goes on from its last checkpoint")
        return EXIT_INTERRUPTED
    print(f"{name} is suspended; go on with: everstep local resume {name}")
    return EXIT_INTERRUPTED


def _wait_until_suspended(folder: StateFolder, name: str) -> None:
    store = Store(folder)

    def is_over() -> bool:
        record = read_or_none(store, name)
        if record is None:
            return True
        has_ended = record.status.phase in (Phase.SUSPENDED, *FINISHED)
        return has_ended and not recorded_hosts(folder.job(name))

    with Follower(folder, name) as follower:
        if not follower.until(is_over, SUSPEND_PATIENCE_S):
            raise CommandFailed(f"error: {name} is still not suspended; see describe {name}")
