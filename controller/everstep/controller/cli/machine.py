"""The verbs that do to jobs what a cluster does: preempt, kill, freeze, return."""

from __future__ import annotations

from everstep.controller.api.ids import SliceId
from everstep.controller.cli.failure import CommandFailed, UsageWrong
from everstep.controller.cli.jobs import only_job
from everstep.controller.cli.words import clock_time, parse_duration_s, parse_place
from everstep.controller.core.model import Capacity, NoticeClass
from everstep.controller.local import capacity
from everstep.controller.local.errors import NotFound, RecordCorrupt
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.store import Store
from everstep.controller.ops.clock import SystemClock
from everstep.controller.ops.settings import Settings


def preempt_slice(
    settings: Settings, slice_text: str, *, notice: str, planned: bool, job: str | None
) -> None:
    notice_s = parse_duration_s(notice, "--notice")
    folder, name, slice_id, _ = _find(settings, slice_text, job, whole_slice=True)
    given = capacity.give_notice(
        folder,
        name,
        slice_id,
        notice_s=notice_s,
        notice_class=NoticeClass.PLANNED if planned else NoticeClass.IMMINENT,
        now_s=SystemClock().unix_s(),
    )
    print(
        f"slice {slice_id} of {name} will be taken away at {clock_time(given.deadline_s)} "
        f"({max(0.0, given.deadline_s - SystemClock().unix_s()):.0f} s)"
    )


def kill_place(
    settings: Settings,
    place: str | None,
    *,
    everything: bool,
    controller: bool,
    job: str | None,
) -> None:
    chosen = [place is not None, everything, controller]
    if sum(chosen) == 0 or (place is not None and everything):
        raise UsageWrong("say what: SLICE, SLICE/HOST, --all or --controller")
    folder = StateFolder(settings.folder)
    if controller:
        from everstep.controller.cli.controller import kill_controller

        pid = kill_controller(folder)
        if pid is None:
            raise CommandFailed("error: no controller is running")
        print(f"controller killed (process {pid})")
    if everything:
        _kill_everything(folder, job)
    if place is not None:
        _, name, slice_id, host = _find(settings, place, job)
        clock = SystemClock()
        if host is None:
            capacity.take_away(folder, name, slice_id, clock=clock)
            print(f"slice {slice_id} of {name} killed; it is gone until: return {slice_id}")
        else:
            where = capacity.place_of(folder.job(name), slice_id, host)
            count = capacity.kill(where, clock=clock)
            print(f"host {slice_id}/{host} of {name} killed ({_processes(count)})")


def freeze_place(settings: Settings, place: str, *, job: str | None) -> None:
    folder, name, slice_id, host = _find(settings, place, job)
    where = capacity.place_of(folder.job(name), slice_id, host)
    count = capacity.freeze(where, clock=SystemClock())
    if not count:
        raise CommandFailed(f"error: {_words(slice_id, host)} of {name} has no process")
    print(f"{_words(slice_id, host)} of {name} frozen ({_processes(count)})")


def thaw_place(settings: Settings, place: str, *, job: str | None) -> None:
    folder, name, slice_id, host = _find(settings, place, job)
    count = capacity.thaw(capacity.place_of(folder.job(name), slice_id, host))
    if not count:
        raise CommandFailed(f"error: {_words(slice_id, host)} of {name} has no process")
    print(f"{_words(slice_id, host)} of {name} goes on ({_processes(count)})")


def return_slice(settings: Settings, slice_text: str, *, job: str | None) -> None:
    folder, name, slice_id, _ = _find(settings, slice_text, job, whole_slice=True)
    outcome = capacity.give_back(folder, name, slice_id, now_s=SystemClock().unix_s())
    said = {
        "returned": f"slice {slice_id} of {name} is available again",
        "withdrawn": f"the notice for slice {slice_id} of {name} is withdrawn",
        "unchanged": f"slice {slice_id} of {name} is available (no change)",
    }
    print(said[outcome])


def stop_all(settings: Settings, *, everything: bool) -> None:
    """End the controller; with `everything`, also every process of every job."""
    from everstep.controller.cli.controller import stop_controller

    folder = StateFolder(settings.folder)
    pid = stop_controller(folder)
    print("no controller is running" if pid is None else f"controller ended (process {pid})")
    if not everything:
        return
    store, clock = Store(folder), SystemClock()
    for name in store.names():
        try:
            record = store.read(name)
        except (NotFound, RecordCorrupt) as error:
            print(f"warning: {error}")
            continue
        for number in range(record.spec.slices.count_max):
            capacity.end_reclaimer(folder.job(name), SliceId(number))
        count = capacity.kill(capacity.place_of(folder.job(name)), clock=clock)
        print(f"{name}: {_processes(count)} ended")


def _kill_everything(folder: StateFolder, job: str | None) -> None:
    store, clock = Store(folder), SystemClock()
    names = store.names() if job is None else (only_job(store, job),)
    if not names:
        raise CommandFailed(f"error: no jobs in {folder.root}")
    for name in names:
        count_max = store.read(name).spec.slices.count_max
        # All at the same moment: first no slice can be had any more, then all processes end.
        capacity.take_all_away(folder, name, range(count_max), clock=clock)
        print(f"all slices of {name} killed; each is gone until: return SLICE")


def _find(
    settings: Settings, text: str, job: str | None, *, whole_slice: bool = False
) -> tuple[StateFolder, str, SliceId, int | None]:
    """Return what a place on the command line means.

    Raises:
        UsageWrong, CommandFailed, NotFound: no such place.
    """
    slice_id, host = parse_place(text)
    if whole_slice and host is not None:
        raise UsageWrong(f"found {text!r}, expected a whole SLICE, for example {slice_id}")
    folder = StateFolder(settings.folder)
    store = Store(folder)
    name = only_job(store, job)
    slices = store.read(name).spec.slices
    if slice_id >= slices.count_max:
        granted = capacity.load_capacity(folder.job(name), slice_id)
        if granted is None or granted.state is Capacity.AVAILABLE:
            raise CommandFailed(
                f"error: {name} has no slice {slice_id}; it has 0 to {slices.count_max - 1}"
            )
    if host is not None and host >= slices.hosts_per_slice:
        raise CommandFailed(
            f"error: slice {slice_id} of {name} has no host {host}; "
            f"it has 0 to {slices.hosts_per_slice - 1}"
        )
    return folder, name, slice_id, host


def _words(slice_id: SliceId, host: int | None) -> str:
    return f"slice {slice_id}" if host is None else f"host {slice_id}/{host}"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
