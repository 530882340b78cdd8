"""What a controller does once at its start: it cleans what a SIGKILL left behind."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.controller.local import identity
from everstep.controller.local.errors import RecordCorrupt
from everstep.controller.local.files import is_temporary, remove
from everstep.controller.local.folder import JobFolder, StateFolder
from everstep.controller.local.processes import load_host, recorded_hosts
from everstep.controller.local.records import HostRecord, JobRecord, ReclaimerRecord, load

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


def tidy(folder: StateFolder, *, log: FilteringBoundLogger) -> None:
    """Clean the state folder and end processes that no record speaks of.

    The caller holds the controller's lock.
    """
    folder.make()
    with folder.writing():
        for path in list(folder.jobs.iterdir()):
            if path.name.startswith(".removed-"):
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_dir() and not (path / "job.json").exists():
                if not (path / "job.json.refused").exists():
                    # An apply that was killed before its record was there.
                    shutil.rmtree(path, ignore_errors=True)
        for name in folder.job_names():
            _tidy_job(folder.job(name))
        ended = _end_orphans(folder)
    if ended:
        log.warning("orphans ended", count=ended)


def _tidy_job(folder: JobFolder) -> None:
    for place in (folder.path, folder.hosts, folder.capacity, folder.reclaimers, folder.reports):
        if place.is_dir():
            for path in list(place.iterdir()):
                if is_temporary(path) and not _has_writer(path):
                    remove(path)
    if folder.reclaimers.is_dir():
        for path in list(folder.reclaimers.glob("*.json")):
            try:
                record = load(path, ReclaimerRecord)
            except RecordCorrupt:
                record = None
            if record is None or not identity.is_running(record.identity):
                remove(path)


def _has_writer(path: Path) -> bool:
    """Whether the process whose id is in a temporary file's name may still rename it."""
    # Ours are `.<name>.<pid>.<serial>.tmp`, those of agents `<name>.<pid>.tmp`.
    parts = path.name.split(".")
    at = -3 if path.name.startswith(".") else -2
    word = parts[at] if len(parts) >= -at else ""
    return word.isdigit() and identity.identify(int(word)) is not None


def _end_orphans(folder: StateFolder) -> int:
    """End every process that was started from this folder and has no living agent in it."""
    places: set[str] = set()
    for name in folder.job_names():
        places |= _living_places(folder.job(name))
    count = 0
    for who, mark in identity.find_marked(""):
        uid, slice_id, host, root = (mark.split(":", 3) + [""] * 4)[:4]
        if root != str(folder.root) or f"{uid}:{slice_id}:{host}:" in places:
            continue
        count += identity.send(who, signal.SIGKILL)
    return count


def _living_places(folder: JobFolder) -> set[str]:
    try:
        job = load(folder.record, JobRecord)
    except RecordCorrupt:
        job = None
        is_known = False
    else:
        is_known = True
    found: set[str] = set()
    for host in recorded_hosts(folder):
        record: HostRecord | None
        try:
            record = load_host(folder, host)
        except RecordCorrupt:
            # The agent may be well; it is found by its mark when the host is started anew.
            if job is not None:
                place = identity.Place(job_uid=job.metadata.uid, slice=host.slice, host=host.host)
                found.add(place.prefix)
            continue
        if record is None or not identity.is_running(record.identity):
            continue
        # While the job's own record cannot be read, its agents go on (G8).
        if not is_known or (job is not None and job.metadata.uid == record.job_uid):
            found.add(record.place.prefix)
    return found
