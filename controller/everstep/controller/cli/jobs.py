"""The verbs that change or show jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from everstep.controller.api.spec import API_VERSION, KIND, JobSpec, Metadata, MultiSliceJob
from everstep.controller.api.status import Phase
from everstep.controller.cli.awaiting import read_or_none, timeout_s, wait_for_job
from everstep.controller.cli.failure import CommandFailed, JobInvalid, UsageWrong
from everstep.controller.cli.words import SINGULAR
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.records import KIND as KIND_PLURAL
from everstep.controller.local.records import Outcome
from everstep.controller.local.store import Store
from everstep.controller.ops.clock import SystemClock, fresh_uid
from everstep.controller.ops.settings import Settings

REMOVAL_PATIENCE_S = 5.0
STARTED = f"phase={Phase.RUNNING.value},{Phase.SUCCEEDED.value}"
"""What `apply --wait` waits for: a short job may be over before anybody looks."""


def apply_file(
    settings: Settings, source: str, *, wait: bool = False, timeout: str | None = None
) -> tuple[str, ...]:
    """Apply every job of a file; nothing is written unless all can be accepted.

    Returns:
        The names of the jobs.
    """
    from everstep.controller.cli.jobfile import read_jobs

    # A bad option must not be found out after the job was created.
    timeout_s(timeout)
    jobs = read_jobs(source)
    apply_jobs(settings, jobs)
    if wait:
        for job in jobs:
            name = job.metadata.name
            wait_for_job(settings, name, STARTED, timeout=timeout, quiet=True)
    return tuple(job.metadata.name for job in jobs)


def apply_jobs(settings: Settings, jobs: Sequence[MultiSliceJob]) -> None:
    """Apply jobs that were judged, and see that a controller runs."""
    store = Store(StateFolder(settings.folder))
    for job in jobs:
        _judge_update(store, job)
    clock = SystemClock()
    for job in jobs:
        outcome, _ = store.apply(job, uid=fresh_uid(), now_s=clock.unix_s())
        print(f"{SINGULAR}/{job.metadata.name} {outcome.value}", flush=True)
    start_controller_if_needed(settings)


def start_controller_if_needed(settings: Settings) -> bool:
    """Start a controller unless one runs, and say so; return whether it was started here."""
    from everstep.controller.cli.controller import ensure_controller

    pid = ensure_controller(settings)
    if pid is not None:
        print(f"controller started (process {pid})", flush=True)
    return pid is not None


def only_job(store: Store, name: str | None) -> str:
    """Return the job that is meant: the named one, or the only one."""
    if name is not None:
        store.read(name)
        return name
    names = store.names()
    if len(names) > 1:
        raise UsageWrong(f"there are {len(names)} jobs ({', '.join(names)}); say which")
    for only in names:
        return only
    raise CommandFailed(f"error: no {KIND_PLURAL} in {store.folder.root}")


def scale_job(settings: Settings, name: str, slices: int) -> None:
    def change(spec: JobSpec) -> JobSpec:
        return replace(spec, slices=replace(spec.slices, desired=slices))

    _edit(settings, name, change, "scaled")


def suspend_job(
    settings: Settings, name: str, *, wait: bool = False, timeout: str | None = None
) -> None:
    _edit(settings, name, lambda spec: replace(spec, suspend=True), "suspended")
    if wait:
        wait_for_job(settings, name, "phase=Suspended", timeout=timeout, quiet=True)


def resume_job(settings: Settings, name: str) -> None:
    _edit(settings, name, lambda spec: replace(spec, suspend=False), "resumed")


def delete_job(
    settings: Settings,
    name: str,
    *,
    now: bool = False,
    wait: bool = True,
    timeout: str | None = None,
) -> None:
    from everstep.controller.local.capacity import kill, place_of

    folder = StateFolder(settings.folder)
    store = Store(folder)
    clock = SystemClock()
    uid = store.mark_deleted(name, now_s=clock.unix_s()).metadata.uid
    if now:
        kill(place_of(folder.job(name)), clock=clock)
    start_controller_if_needed(settings)
    if wait:
        from everstep.controller.cli.following import Follower

        def is_gone() -> bool:
            record = read_or_none(store, name)
            return record is None or record.metadata.uid != uid

        with Follower(folder, name) as follower:
            if not follower.until(is_gone, timeout_s(timeout)):
                raise CommandFailed(f"error: timed out waiting for the deletion of {name}")
            # Its files go right after; a controller that is killed now leaves them to the next one.
            follower.until(lambda: not folder.removed(uid).exists(), REMOVAL_PATIENCE_S)
    print(f'{SINGULAR} "{name}" deleted')


def get_jobs(settings: Settings, name: str | None, *, output: str, watch: bool) -> None:
    from everstep.controller.cli import showing

    if output not in showing.OUTPUTS:
        allowed = ", ".join(one for one in showing.OUTPUTS if one)
        raise UsageWrong(f"unable to match a printer to -o {output!r}, allowed: {allowed}")
    folder = StateFolder(settings.folder)
    store = Store(folder)
    printer = showing.Printer(output, is_list=name is None)
    names = store.names() if name is None else (name,)
    records = [store.read(one) for one in names]
    printer.show(records, SystemClock().unix_s())
    if not records and not watch and output in ("", "wide"):
        print(f"No resources found in {folder.root}.", file=sys.stderr)
    if not watch:
        return
    from everstep.controller.cli.following import Follower

    with Follower(folder, name) as follower:
        while True:
            follower.wait(None)
            names = store.names() if name is None else (name,)
            found = [record for one in names if (record := read_or_none(store, one)) is not None]
            printer.show_changed(found, SystemClock().unix_s())


def describe_job(settings: Settings, name: str) -> None:
    from everstep.controller.cli.describing import describe
    from everstep.controller.local.events import read_events

    folder = StateFolder(settings.folder)
    record = Store(folder).read(name)
    print(describe(record, read_events(folder.job(name)), SystemClock().unix_s()), end="")


def _edit(settings: Settings, name: str, change: Callable[[JobSpec], JobSpec], done: str) -> None:
    store = Store(StateFolder(settings.folder))

    def checked(spec: JobSpec) -> JobSpec:
        from everstep.controller.api.validate import validate

        changed = change(spec)
        problems = validate(_as_job(name, changed))
        if problems:
            raise JobInvalid(name, tuple(str(problem) for problem in problems))
        return changed

    outcome = store.edit(name, checked)
    is_same = outcome is Outcome.UNCHANGED
    print(f"{SINGULAR}/{name} {done}{' (no change)' if is_same else ''}", flush=True)
    start_controller_if_needed(settings)


def _judge_update(store: Store, job: MultiSliceJob) -> None:
    from everstep.controller.api.validate import check_update

    name = job.metadata.name
    found = read_or_none(store, name)
    if found is None:
        return
    old = replace(
        _as_job(name, found.spec),
        metadata=Metadata(name=name, namespace=found.metadata.namespace),
    )
    problems = check_update(old, job)
    if problems:
        raise JobInvalid(name, tuple(str(problem) for problem in problems))


def _as_job(name: str, spec: JobSpec) -> MultiSliceJob:
    return MultiSliceJob(
        api_version=API_VERSION, kind=KIND, metadata=Metadata(name=name), spec=spec
    )
