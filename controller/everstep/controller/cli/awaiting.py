"""Waiting for something about a job, and knowing when it cannot happen any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everstep.controller.api.status import Phase
from everstep.controller.cli.failure import CommandFailed, UsageWrong
from everstep.controller.cli.words import SINGULAR, parse_duration_s
from everstep.controller.local.errors import NotFound
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.records import KIND as KIND_PLURAL
from everstep.controller.local.records import JobRecord
from everstep.controller.local.store import Store
from everstep.controller.ops.settings import Settings

FINISHED = (Phase.SUCCEEDED, Phase.FAILED)


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
    limit_s = timeout_s(timeout)
    folder = StateFolder(settings.folder)
    store = Store(folder)
    if condition != "delete":
        store.read(name)
    seen: list[JobRecord | None] = [None]

    def is_decided() -> bool:
        seen[0] = read_or_none(store, name)
        return awaited.is_met(seen[0]) or awaited.is_hopeless(seen[0])

    with Follower(folder, name) as follower:
        in_time = follower.until(is_decided, limit_s)
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


def timeout_s(timeout: str | None) -> float | None:
    """Read what `--timeout` was given; None means without end."""
    return None if timeout is None else parse_duration_s(timeout, "--timeout")
