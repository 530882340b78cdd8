"""The verbs that change or show jobs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from everstep.controller.api.spec import API_VERSION, KIND, JobSpec, Metadata, MultiSliceJob
from everstep.controller.api.status import Phase
from everstep.controller.cli.failure import CommandFailed, JobInvalid, UsageWrong
from everstep.controller.cli.words import parse_duration_s
from everstep.controller.local.errors import NotFound
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.records import KIND as KIND_PLURAL
from everstep.controller.local.records import JobRecord, Outcome
from everstep.controller.local.store import Store
from everstep.controller.ops.clock import SystemClock, fresh_uid
from everstep.controller.ops.settings import Settings

SINGULAR = "multislicejob.everstep.dev"
REMOVAL_PATIENCE_S = 5.0
FINISHED = (Phase.SUCCEEDED, Phase.FAILED)


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
    _timeout_s(timeout)
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
            if not follower.until(is_gone, _timeout_s(timeout)):
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


@dataclass(frozen=True, slots=True)
class Awaited:
    """What `wait --for` waits for."""

    text: str
    is_met: Callable[[JobRecord | None], bool]
    is_hopeless: Callable[[JobRecord | None], bool]


def wait_for_job(
    settings: Settings,
    name: str,
    condition: str,
    *,
    timeout: str | None,
    quiet: bool = False,
) -> None:
    """Wait for something about a job.

    Raises:
        CommandFailed: not within the time, or it cannot happen any more.
    """
    from everstep.controller.cli.following import Follower

    awaited = parse_condition(condition)
    timeout_s = _timeout_s(timeout)
    folder = StateFolder(settings.folder)
    store = Store(folder)
    if condition != "delete":
        store.read(name)
    seen: list[JobRecord | None] = [None]

    def is_decided() -> bool:
        seen[0] = read_or_none(store, name)
        return awaited.is_met(seen[0]) or awaited.is_hopeless(seen[0])

    with Follower(folder, name) as follower:
        in_time = follower.until(is_decided, timeout_s)
    record = seen[0]
    if awaited.is_met(record):
        if not quiet:
            print(f"{SINGULAR}/{name} condition met")
        return
    if not in_time:
        raise CommandFailed(
            f"error: timed out waiting for the condition on {KIND_PLURAL.split('.')[0]}/{name}"
        )
    if record is None:
        raise NotFound(KIND_PLURAL, name)
    phase, message = record.status.phase.value, record.status.message
    raise CommandFailed(f"error: {name} is {phase} and cannot be {awaited.text}: {message}")


def parse_condition(text: str) -> Awaited:
    """Read what `wait --for` was given.

    Raises:
        UsageWrong: it is none of the three forms.
    """
    kind, _, rest = text.partition("=")
    if text == "delete":
        return Awaited(text, lambda record: record is None, lambda _: False)
    if kind == "phase" and rest:
        return _await_phase(rest)
    if kind == "condition" and rest:
        return _await_condition(*(rest.split("=", 1) if "=" in rest else (rest, "True")))
    raise UsageWrong(
        f"--for: found {text!r}, expected phase=PHASE, condition=TYPE[=STATUS] or delete"
    )


def _await_phase(wanted: str) -> Awaited:
    """One phase, or any of several with commas between them."""
    phases = {phase.value.lower(): phase for phase in Phase}
    awaited = {phases.get(name.lower()) for name in wanted.split(",")}
    if None in awaited:
        known = ", ".join(one.value for one in Phase)
        raise UsageWrong(f"--for: found phase {wanted!r}, expected one of {known}")

    def is_met(record: JobRecord | None) -> bool:
        return record is not None and record.status.phase in awaited

    def is_hopeless(record: JobRecord | None) -> bool:
        return record is None or record.status.phase in FINISHED

    return Awaited(wanted, is_met, is_hopeless)


def _await_condition(kind: str, status: str) -> Awaited:
    def is_met(record: JobRecord | None) -> bool:
        found = () if record is None else record.status.conditions
        return any(
            one.type.lower() == kind.lower() and one.status.lower() == status.lower()
            for one in found
        )

    def is_hopeless(record: JobRecord | None) -> bool:
        return record is None or record.status.phase in FINISHED

    return Awaited(f"{kind}={status}", is_met, is_hopeless)


def read_or_none(store: Store, name: str) -> JobRecord | None:
    try:
        return store.read(name)
    except NotFound:
        return None


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


def _timeout_s(timeout: str | None) -> float | None:
    return None if timeout is None else parse_duration_s(timeout, "--timeout")
