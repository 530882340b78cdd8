"""Text to types and back: what people write is judged in their words, the wire is JSON.

A job is refused with all problems at once (`SpecError`). A directive, report, status or ledger is
written by us and read by us, maybe by another version: unknown fields are ignored, and what does
not read is refused whole (`WireError`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec

from everstep.controller.api.errors import Problem, SpecError, WireError
from everstep.controller.api.shape import fit
from everstep.controller.api.spec import MultiSliceJob
from everstep.controller.api.status import JobStatus
from everstep.controller.api.validate import check_update, validate
from everstep.controller.api.wire import WIRE_VERSION, Directive, Report

T = TypeVar("T", bound=msgspec.Struct)

_SERVER_OWNED = frozenset(
    {
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generation",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    }
)
"""Fields of metadata that an API server writes. What `get -o yaml` printed can be applied again, so
they are passed over, as is `status`."""


def decode_job(data: bytes | Mapping[str, Any]) -> MultiSliceJob:
    """Read a job and judge it.

    Args:
        data: JSON, or the plain data that a YAML document means.

    Raises:
        SpecError: with every problem found. The shapes are judged first; the fields are judged
            against each other once every shape fits.
    """
    value: object = data
    if isinstance(data, bytes):
        try:
            value = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            problem = Problem(path="", found=f"text that is not JSON ({error})", expected="JSON")
            raise SpecError((problem,)) from error
    fitted, problems = fit(MultiSliceJob, _without_server_fields(value))
    if not problems:
        job = msgspec.convert(fitted, MultiSliceJob)
        problems = list(validate(job))
        if not problems:
            return job
    raise SpecError(tuple(problems))


def decode_update(data: bytes | Mapping[str, Any], old: MultiSliceJob) -> MultiSliceJob:
    """Read a new version of `old`. Raises `SpecError` also where an immutable field changed."""
    job = decode_job(data)
    problems = check_update(old, job)
    if problems:
        raise SpecError(problems)
    return job


def _without_server_fields(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    document = dict(cast("Mapping[object, object]", value))
    document.pop("status", None)
    metadata = document.get("metadata")
    if isinstance(metadata, Mapping):
        given = cast("Mapping[object, object]", metadata)
        document["metadata"] = {key: given[key] for key in given if key not in _SERVER_OWNED}
    return document


def encode(value: msgspec.Struct) -> bytes:
    """Write any type of the contract, or a ledger, as JSON."""
    return msgspec.json.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """Read what `encode` wrote. Raises `WireError`."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(kind.__name__, str(error)) from error


def to_plain(value: msgspec.Struct) -> Any:
    """Return plain data (dict, list, str, int, float, None), for nesting in another document."""
    return msgspec.to_builtins(value)


def from_plain(value: object, kind: type[T]) -> T:
    """Read what `to_plain` returned. Raises `WireError`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise WireError(kind.__name__, str(error)) from error


def decode_directive(data: bytes) -> Directive:
    """Read a directive. Raises `WireError`, also for a version that this code does not speak."""
    directive = decode(data, Directive)
    _judge_version("Directive", directive.version)
    return directive


def decode_report(data: bytes) -> Report:
    """Read a report. Raises `WireError`, also for a version that this code does not speak."""
    report = decode(data, Report)
    _judge_version("Report", report.version)
    return report


def decode_status(data: bytes) -> JobStatus:
    """Read a status. Raises `WireError`."""
    return decode(data, JobStatus)


def _judge_version(kind: str, version: int) -> None:
    if version != WIRE_VERSION:
        raise WireError(kind, f"found version {version}, expected {WIRE_VERSION}")
