"""Rules that one field's type cannot say: bounds, order, fields against each other.

Every function returns the problems that it found, all of them, in the order of the document. The
same rules hold for a cluster and for one machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

from everstep.controller.api.errors import Problem
from everstep.controller.api.problems import LABEL_LENGTH_MAX, Problems
from everstep.controller.api.quantity import parse_bytes
from everstep.controller.api.shape import describe
from everstep.controller.api.spec import (
    API_VERSION,
    KIND,
    NAME_LENGTH_MAX,
    SLICE_COUNT_MAX,
    Checkpoint,
    JobSpec,
    MultiSliceJob,
    Runtime,
    Slices,
)
from everstep.controller.api.template_rules import judge_template

_BUCKET = re.compile(r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
_HOSTS_PER_SLICE_MAX = 4096
_SNAPSHOT_SLOTS_MIN = 2
_LOCAL_COPIES_MAX = 64
_BYTES_MAX = 2**63 - 1
_PORT_MAX = 65535


def validate(job: MultiSliceJob) -> tuple[Problem, ...]:
    """Return everything that makes this job unacceptable. Empty means accepted."""
    found = Problems()
    found.equal("apiVersion", job.api_version, API_VERSION)
    found.equal("kind", job.kind, KIND)
    found.label("metadata.name", job.metadata.name, NAME_LENGTH_MAX)
    found.label("metadata.namespace", job.metadata.namespace, LABEL_LENGTH_MAX)
    found.labels("metadata.labels", job.metadata.labels)
    found.annotations("metadata.annotations", job.metadata.annotations)
    _judge_spec(found, job.spec)
    return tuple(found.items)


def check_update(old: MultiSliceJob, new: MultiSliceJob) -> tuple[Problem, ...]:
    """Return the immutable fields that `new` changes. `checkpoint.uri` may change in suspension."""
    found = Problems()
    kept: list[tuple[str, object, object]] = [
        ("metadata.name", old.metadata.name, new.metadata.name),
        ("metadata.namespace", old.metadata.namespace, new.metadata.namespace),
        (
            "spec.slices.hostsPerSlice",
            old.spec.slices.hosts_per_slice,
            new.spec.slices.hosts_per_slice,
        ),
    ]
    for path, before, after in kept:
        if before != after:
            found.add(path, after, f"{describe(before)}: this field cannot change")
    before_uri, after_uri = old.spec.checkpoint.uri, new.spec.checkpoint.uri
    if before_uri != after_uri and not old.spec.suspend:
        expected = f"{describe(before_uri)}: it can only change while the job is suspended"
        found.add("spec.checkpoint.uri", after_uri, expected)
    return tuple(found.items)


def _judge_spec(found: Problems, spec: JobSpec) -> None:
    _judge_slices(found, spec.slices)
    judge_template(found, spec)
    _judge_runtime(found, spec.runtime)
    _judge_checkpoint(found, spec)
    _judge_elasticity(found, spec)
    found.seconds("spec.activeDeadlineSeconds", spec.active_deadline_seconds)


def _judge_slices(found: Problems, slices: Slices) -> None:
    at = "spec.slices"
    bounds = [
        found.count(f"{at}.desired", slices.desired, most=SLICE_COUNT_MAX),
        found.count(f"{at}.min", slices.min, most=SLICE_COUNT_MAX),
        found.count(f"{at}.max", slices.max, most=SLICE_COUNT_MAX),
    ]
    found.count(f"{at}.hostsPerSlice", slices.hosts_per_slice, most=_HOSTS_PER_SLICE_MAX)
    if not all(bounds):
        return
    if slices.count_min > slices.desired:
        found.add(f"{at}.min", slices.count_min, f"at most {at}.desired ({slices.desired})")
    if slices.desired > slices.count_max:
        found.add(f"{at}.desired", slices.desired, f"at most {at}.max ({slices.count_max})")
    if slices.allowed_counts is None:
        return
    listed, path = slices.allowed_counts, f"{at}.allowedCounts"
    if not listed:
        found.add(path, listed, "at least one count, or no such field")
    within = f"{at}.min to {at}.max ({slices.count_min} to {slices.count_max})"
    for index, count in enumerate(listed):
        if not slices.count_min <= count <= slices.count_max:
            found.add(f"{path}[{index}]", count, f"a count from {within}")
        if count in listed[:index]:
            found.add(f"{path}[{index}]", count, "each count once")
    if listed and slices.desired not in listed:
        counts = ", ".join(str(count) for count in sorted(set(listed)))
        found.add(f"{at}.desired", slices.desired, f"one of {path}: {counts}")


def _judge_runtime(found: Problems, runtime: Runtime) -> None:
    at, timeouts = "spec.runtime", runtime.timeouts
    ports = [
        found.count(f"{at}.agentPort", runtime.agent_port, most=_PORT_MAX),
        found.count(f"{at}.coordinatorPort", runtime.coordinator_port, most=_PORT_MAX),
    ]
    if all(ports) and runtime.agent_port == runtime.coordinator_port:
        found.add(f"{at}.coordinatorPort", runtime.coordinator_port, f"not {at}.agentPort")
    at = f"{at}.timeouts"
    order = [
        ("reportIntervalSeconds", timeouts.report_interval_seconds),
        ("reportSeconds", timeouts.report_seconds),
        ("progressSeconds", timeouts.progress_seconds),
        ("joinSeconds", timeouts.join_seconds),
    ]
    sound = [found.seconds(f"{at}.{name}", value) for name, value in order]
    found.seconds(f"{at}.startSeconds", timeouts.start_seconds)
    if not all(sound):
        return
    for (less, less_s), (more, more_s) in pairwise(order):
        if less_s >= more_s:
            found.add(f"{at}.{less}", less_s, f"less than {at}.{more} ({more_s:g})")


def _judge_checkpoint(found: Problems, spec: JobSpec) -> None:
    at, checkpoint = "spec.checkpoint", spec.checkpoint
    _judge_uri(found, f"{at}.uri", checkpoint.uri)
    found.count(f"{at}.everySteps", checkpoint.every_steps)
    found.seconds(f"{at}.everySeconds", checkpoint.every_seconds)
    if checkpoint.every_steps is not None and checkpoint.every_seconds is not None:
        found.add(f"{at}.everySeconds", checkpoint.every_seconds, f"not beside {at}.everySteps")
    found.count(f"{at}.retention.latest", checkpoint.retention.latest)
    found.count(f"{at}.retention.everySteps", checkpoint.retention.every_steps)
    emergency = checkpoint.emergency
    sound = [
        found.seconds(f"{at}.emergency.budgetSeconds", emergency.budget_seconds),
        found.seconds(
            f"{at}.emergency.safetyMarginSeconds",
            emergency.safety_margin_seconds,
            may_be_zero=True,
        ),
    ]
    if all(sound) and emergency.safety_margin_seconds >= emergency.budget_seconds:
        expected = f"less than {at}.emergency.budgetSeconds ({emergency.budget_seconds:g})"
        margin = emergency.safety_margin_seconds
        found.add(f"{at}.emergency.safetyMarginSeconds", margin, expected)
    _judge_snapshot(found, checkpoint, spec.slices)
    _judge_local(found, checkpoint)


def _judge_local(found: Problems, checkpoint: Checkpoint) -> None:
    at, local = "spec.checkpoint.local", checkpoint.local
    if local is None:
        return
    path = local.path
    is_folder = path.startswith("/") and path.strip("/") != "" and path == path.strip()
    if not is_folder or "\0" in path or ".." in path.split("/"):
        found.add(f"{at}.path", path, "/absolute/path on a disk of each host")
    found.count(f"{at}.everySteps", local.every_steps)
    found.count(f"{at}.latest", local.latest, most=_LOCAL_COPIES_MAX)


def _judge_snapshot(found: Problems, checkpoint: Checkpoint, slices: Slices) -> None:
    at, snapshot = "spec.checkpoint.snapshot", checkpoint.snapshot
    every = snapshot.every_steps
    if isinstance(every, str) and every != "auto":
        found.add(f"{at}.everySteps", every, "a whole number, at least 1, or auto")
    elif isinstance(every, int):
        found.count(f"{at}.everySteps", every)
    if snapshot.slots < _SNAPSHOT_SLOTS_MIN:
        expected = "at least 2, so that the newest complete snapshot is never overwritten"
        found.add(f"{at}.slots", snapshot.slots, expected)
    else:
        found.count(f"{at}.slots", snapshot.slots, least=_SNAPSHOT_SLOTS_MIN, most=64)
    if snapshot.memory is not None:
        size = parse_bytes(snapshot.memory)
        if not size:
            found.add(f"{at}.memory", snapshot.memory, "a quantity above zero, for example 16Gi")
        elif size > _BYTES_MAX:
            expected = "less than 8Ei, the most that a quantity can be, for example 16Gi"
            found.add(f"{at}.memory", snapshot.memory, expected)
    if found.count(f"{at}.replicas", snapshot.replicas, least=0):
        if slices.count_max >= 1 and snapshot.replicas >= slices.count_max:
            expected = f"less than spec.slices.max ({slices.count_max}): a replica is elsewhere"
            found.add(f"{at}.replicas", snapshot.replicas, expected)


def _judge_uri(found: Problems, path: str, uri: str) -> None:
    expected = "file:///absolute/path, /absolute/path or gs://bucket/path"
    if "\0" in uri or uri != uri.strip():
        found.add(path, uri, expected)
        return
    scheme, separator, rest = uri.partition("://")
    if not separator:
        scheme, rest = "file", uri
    judges: dict[str, Callable[[str], bool]] = {
        "file": lambda text: text.startswith("/") and text.strip("/") != "",
        "gs": lambda text: _BUCKET.fullmatch(text.partition("/")[0]) is not None,
    }
    judge = judges.get(scheme)
    if judge is None or not judge(rest) or ".." in rest.split("/"):
        found.add(path, uri, expected)


def _judge_elasticity(found: Problems, spec: JobSpec) -> None:
    at, elasticity = "spec.elasticity", spec.elasticity
    waits = [
        ("waitForReplacementSeconds", elasticity.wait_for_replacement_seconds),
        ("scaleUp.minUptimeSeconds", elasticity.scale_up.min_uptime_seconds),
        ("scaleUp.cooldownSeconds", elasticity.scale_up.cooldown_seconds),
        ("scaleUp.stabilizationSeconds", elasticity.scale_up.stabilization_seconds),
    ]
    for name, value in waits:
        found.seconds(f"{at}.{name}", value, may_be_zero=True)
    at, restart = "spec.restart", spec.restart
    found.count(f"{at}.maxRestarts", restart.max_restarts, least=0)
    found.seconds(f"{at}.windowSeconds", restart.window_seconds)
    backoff = restart.backoff
    sound = [
        found.seconds(f"{at}.backoff.initialSeconds", backoff.initial_seconds, may_be_zero=True),
        found.seconds(f"{at}.backoff.maxSeconds", backoff.max_seconds, may_be_zero=True),
    ]
    if all(sound) and backoff.initial_seconds > backoff.max_seconds:
        expected = f"at most {at}.backoff.maxSeconds ({backoff.max_seconds:g})"
        found.add(f"{at}.backoff.initialSeconds", backoff.initial_seconds, expected)
    found.seconds(f"{at}.backoff.resetAfterSeconds", backoff.reset_after_seconds)
    found.count(f"{at}.maxDisruptionsPerHour", restart.max_disruptions_per_hour)
