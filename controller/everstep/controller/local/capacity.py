"""What the machine grants for each slice, and how it takes it away.

A notice is given here, a slice is taken here, and capacity comes back here. People's verbs and the
reclaimers call this; the controller only looks, and takes over a reclaimer that was killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable

from everstep.controller.api.ids import SliceId
from everstep.controller.core.model import Capacity, NoticeClass
from everstep.controller.local import identity
from everstep.controller.local.errors import LocalError, NotFound, RecordCorrupt
from everstep.controller.local.files import remove, write_durable
from everstep.controller.local.folder import JobFolder, StateFolder
from everstep.controller.local.identity import Place
from everstep.controller.local.records import (
    KIND,
    CapacityRecord,
    JobRecord,
    NoticeRecord,
    ReclaimerRecord,
    encode,
    load,
)
from everstep.controller.ops.clock import Clock, pause

END_PATIENCE_S = 10.0
"""How long processes may take to be gone after SIGKILL: the kernel frees their memory first."""


def load_capacity(folder: JobFolder, slice_id: SliceId) -> CapacityRecord | None:
    """Read what is granted for a slice; None means that it always was available."""
    return load(folder.slice_capacity(slice_id), CapacityRecord)


def give_notice(
    state: StateFolder,
    job: str,
    slice_id: SliceId,
    *,
    notice_s: float,
    notice_class: NoticeClass,
    now_s: float,
) -> NoticeRecord:
    """Announce that a slice will be taken away, and start the process that does it.

    A notice that repeats an earlier one keeps its id; the earlier of the deadlines counts.

    Raises:
        LocalError: the slice is gone already.

    Durability: on return the notice survives a crash of the machine, and the deadline is kept
    even if no controller runs.
    """
    folder = state.job(job)
    with state.writing():
        found = load_capacity(folder, slice_id)
        if found is not None and found.state is Capacity.GONE:
            raise LocalError(f"slice {slice_id} of {job} is gone already")
        deadline_s = now_s + notice_s
        earlier = None if found is None else found.notice
        if earlier is not None and earlier.deadline_s <= deadline_s:
            notice = earlier
        else:
            notice = NoticeRecord(
                id=earlier.id if earlier else f"local-{slice_id}-{round(now_s * 1000)}",
                deadline_s=deadline_s,
                first_seen_s=earlier.first_seen_s if earlier else now_s,
                notice_class=notice_class,
            )
        since_s = now_s if found is None else found.since_s
        record = CapacityRecord(state=Capacity.AVAILABLE, notice=notice, since_s=since_s)
        write_durable(folder.slice_capacity(slice_id), encode(record))
        if notice is not earlier:
            # It sleeps until a deadline that is no longer the right one.
            end_reclaimer(folder, slice_id)
    # It may have been killed, or not: another one finds the first and ends.
    spawn_reclaimer(state, job, slice_id, notice)
    return notice


def take_away(
    state: StateFolder,
    job: str,
    slice_id: SliceId,
    *,
    clock: Clock,
    notice_id: str | None = None,
) -> bool:
    """Take a slice away as if its machine had gone: no capacity, no process.

    Args:
        state: the state folder.
        job: name of the job.
        slice_id: the slice.
        clock: for the wait until its processes are gone.
        notice_id: only if this notice stands; None takes it whatever was announced.

    Returns:
        Whether it was taken: False when the notice does not stand any more.

    Durability: the slice is Gone on disk before its first process is killed, so that no controller
    starts it anew in between.
    """
    folder = state.job(job)
    with state.writing():
        found = load_capacity(folder, slice_id)
        notice = None if found is None else found.notice
        if notice_id is not None and (notice is None or notice.id != notice_id):
            return False
        _mark_gone(folder, slice_id, clock.unix_s())
    kill(place_of(folder, slice_id), clock=clock)
    return True


def take_all_away(state: StateFolder, job: str, slice_ids: Iterable[int], *, clock: Clock) -> None:
    """Take slices away together, as when a whole zone goes; see `take_away`."""
    folder = state.job(job)
    place = place_of(folder)
    with state.writing():
        for slice_id in slice_ids:
            _mark_gone(folder, SliceId(slice_id), clock.unix_s())
    kill(place, clock=clock)


def _mark_gone(folder: JobFolder, slice_id: SliceId, now_s: float) -> None:
    found = load_capacity(folder, slice_id)
    since_s = found.since_s if found and found.state is Capacity.GONE else now_s
    record = CapacityRecord(state=Capacity.GONE, since_s=since_s)
    write_durable(folder.slice_capacity(slice_id), encode(record))


def give_back(state: StateFolder, job: str, slice_id: SliceId, *, now_s: float) -> str:
    """Make a slice available again, or withdraw its notice.

    Returns:
        What happened: `returned`, `withdrawn` or `unchanged`.
    """
    folder = state.job(job)
    with state.writing():
        found = load_capacity(folder, slice_id)
        if found is None or (found.state is Capacity.AVAILABLE and found.notice is None):
            return "unchanged"
        is_gone = found.state is Capacity.GONE
        since_s = now_s if is_gone else found.since_s
        write_durable(folder.slice_capacity(slice_id), encode(CapacityRecord(since_s=since_s)))
        end_reclaimer(folder, slice_id)
    return "returned" if is_gone else "withdrawn"


def place_of(folder: JobFolder, slice_id: int | None = None, host: int | None = None) -> Place:
    """Return a place of the job that has this folder now.

    Raises:
        NotFound: there is no such job.
    """
    record = load(folder.record, JobRecord)
    if record is None:
        raise NotFound(KIND, folder.path.name)
    return Place(job_uid=record.metadata.uid, slice=slice_id, host=host)


def kill(place: Place, *, clock: Clock) -> int:
    """Kill every process at a place and wait until they are gone; return how many it were.

    Raises:
        LocalError: some are still there after `END_PATIENCE_S`.

    Blocking: some milliseconds as a rule, `END_PATIENCE_S` at most.
    """
    seen: set[identity.Identity] = set()
    deadline_s = clock.monotonic_s() + END_PATIENCE_S
    pause_s = 0.001
    while living := identity.find_at(place):
        if clock.monotonic_s() >= deadline_s:
            pids = ", ".join(str(who.pid) for who in living)
            raise LocalError(f"processes {pids} are still there after SIGKILL")
        for who in living:
            identity.send(who, signal.SIGKILL)
        seen |= living
        pause(pause_s)
        pause_s = min(pause_s * 2, 0.02)
    return len(seen)


def freeze(place: Place, *, clock: Clock) -> int:
    """Stop (SIGSTOP) every process at a place; return how many they are."""
    seen: set[identity.Identity] = set()
    deadline_s = clock.monotonic_s() + END_PATIENCE_S
    while clock.monotonic_s() < deadline_s:
        # Until none is new: a process that was not stopped yet may have forked meanwhile.
        new = identity.find_at(place) - seen
        if not new:
            break
        for who in new:
            identity.send(who, signal.SIGSTOP)
        seen |= new
    return len(seen)


def thaw(place: Place) -> int:
    """Let every process at a place go on; return how many they are."""
    return sum(identity.send(who, signal.SIGCONT) for who in identity.find_at(place))


def spawn_reclaimer(state: StateFolder, job: str, slice_id: SliceId, notice: NoticeRecord) -> None:
    """Start the process that takes the slice at the deadline, controller or not."""
    command = (
        *(sys.executable, "-m", "everstep.controller.local.reclaim"),
        *(str(state.root), job, str(slice_id), notice.id),
    )
    log = state.controller_log
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.posix_spawn(
        sys.executable,
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def end_reclaimer(folder: JobFolder, slice_id: SliceId) -> None:
    """End the reclaimer of a slice and remove its record."""
    path = folder.reclaimer(slice_id)
    try:
        record = load(path, ReclaimerRecord)
    except RecordCorrupt:
        # Whoever it is, it finds at its deadline that its notice does not stand.
        record = None
    if record is not None and record.pid != os.getpid():
        identity.send(record.identity, signal.SIGKILL)
    remove(path)
