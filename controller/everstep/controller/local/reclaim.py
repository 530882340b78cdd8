"""The reclaimer: takes one slice away at the deadline of its notice, and is gone.

A process of its own, so that a notice is kept when the controller is not there. It ends early when
its notice was withdrawn, moved or overtaken.

Run as `python -m everstep.controller.local.reclaim STATE JOB SLICE NOTICE`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from everstep.controller.api.ids import SliceId
from everstep.controller.local import identity
from everstep.controller.local.capacity import load_capacity, take_away
from everstep.controller.local.errors import LocalError
from everstep.controller.local.files import remove, write_soft
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.records import NoticeRecord, ReclaimerRecord, encode, load
from everstep.controller.ops.clock import SystemClock, pause

LOOK_AGAIN_S = 1.0
"""The end of the wait is exact; in between the notice is looked at, in case nobody ended us."""


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    root, job, number, notice_id = words
    state, slice_id = StateFolder(Path(root)), SliceId(int(number))
    try:
        reclaim(state, job, slice_id, notice_id)
    except LocalError as error:
        # The job went away, or its record is garbage: the controller has said so already.
        sys.stderr.write(f"reclaimer of slice {slice_id} of {job}: {error}\n")
        return 1
    return 0


def reclaim(state: StateFolder, job: str, slice_id: SliceId, notice_id: str) -> None:
    """Wait for the deadline of a notice and take the slice, if the notice still stands."""
    clock = SystemClock()
    folder = state.job(job)
    if not _register(state, job, slice_id, notice_id):
        return
    try:
        while True:
            notice = _standing(state, job, slice_id, notice_id)
            if notice is None:
                return
            left_s = notice.deadline_s - clock.unix_s()
            if left_s <= 0:
                take_away(state, job, slice_id, clock=clock, notice_id=notice_id)
                return
            pause(min(left_s, LOOK_AGAIN_S))
    finally:
        record = load(folder.reclaimer(slice_id), ReclaimerRecord)
        if record is not None and record.pid == os.getpid():
            remove(folder.reclaimer(slice_id))


def _register(state: StateFolder, job: str, slice_id: SliceId, notice_id: str) -> bool:
    """Record this process; False when another reclaimer is at it already."""
    folder = state.job(job)
    with state.writing():
        if _standing(state, job, slice_id, notice_id) is None:
            return False
        path = folder.reclaimer(slice_id)
        found = load(path, ReclaimerRecord)
        if (
            found is not None
            and found.notice_id == notice_id
            and identity.is_running(found.identity)
        ):
            return False
        own = identity.identify(os.getpid())
        if own is None:
            return False
        record = ReclaimerRecord(
            slice=slice_id,
            notice_id=notice_id,
            pid=own.pid,
            start_ticks=own.start_ticks,
            boot_id=own.boot_id,
        )
        write_soft(path, encode(record))
        return True


def _standing(
    state: StateFolder, job: str, slice_id: SliceId, notice_id: str
) -> NoticeRecord | None:
    found = load_capacity(state.job(job), slice_id)
    notice = None if found is None else found.notice
    return notice if notice is not None and notice.id == notice_id else None


if __name__ == "__main__":
    sys.exit(main())
