from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.controller.api.codec import (
    decode,
    decode_directive,
    decode_job,
    decode_report,
    decode_status,
    decode_update,
    encode,
    from_plain,
    to_plain,
)
from everstep.controller.api.errors import SpecError, WireError
from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step
from everstep.controller.api.quantity import parse_bytes, parse_quantity
from everstep.controller.api.reasons import TABLE, Reason
from everstep.controller.api.settings import CHECKPOINT_EVERY_S_DEFAULT, resolve_settings
from everstep.controller.api.spec import MultiSliceJob
from everstep.controller.api.status import JobStatus
from everstep.controller.api.suspicions import suspicions
from everstep.controller.api.validate import check_update
from everstep.controller.api.wire import (
    Command,
    Directive,
    HostPhase,
    Member,
    MemberHost,
    Report,
)
from everstep.controller.core.ledger import Ledger, Stage

GOOD: dict[str, Any] = {
    "apiVersion": "everstep.dev/v1alpha1",
    "kind": "MultiSliceJob",
    "metadata": {"name": "llm"},
    "spec": {
        "slices": {"desired": 3},
        "template": {
            "spec": {"containers": [{"name": "trainer", "command": ["python", "train.py"]}]}
        },
        "checkpoint": {"uri": "file:///tmp/llm"},
    },
}


def good(**spec: Any) -> MultiSliceJob:
    document = copy.deepcopy(GOOD)
    document["spec"].update(spec)
    return decode_job(document)


def problem_paths(document: dict[str, Any]) -> tuple[str, ...]:
    try:
        decode_job(document)
    except SpecError as refusal:
        return tuple(problem.path for problem in refusal.problems)
    return ()


def directive(job: MultiSliceJob) -> Directive:
    return Directive(
        job="llm",
        job_uid="u",
        sequence=4,
        incarnation=Incarnation(2),
        command=Command.RUN,
        members=(
            Member(
                slice=SliceId(1),
                rank=Rank(0),
                hosts=(MemberHost(host=0, address="127.64.2.1", port=7070),),
            ),
        ),
        lead=HostId(SliceId(1), 0),
        token="t",
        settings=resolve_settings(job.spec),
    )


def report() -> Report:
    return Report(
        job_uid="u",
        host=HostId(SliceId(1), 0),
        address="127.64.2.1",
        port=7070,
        pid=7,
        sequence=1,
        renewed_at_s=1.5,
        directive_seen=4,
        incarnation=Incarnation(2),
        phase=HostPhase.RUNNING,
        phase_since_s=1.0,
        step=Step(12),
    )


def test_a_job_survives_encoding() -> None:
    job = good(slices={"desired": 4, "min": 2, "max": 4, "allowedCounts": [2, 4]})
    assert decode_job(encode(job)) == job


def test_null_means_absent_wherever_there_is_a_default() -> None:
    document = copy.deepcopy(GOOD)
    document["metadata"]["labels"] = None
    document["spec"].update(
        suspend=None, runtime=None, elasticity={"scaleUp": None}, activeDeadlineSeconds=None
    )
    document["spec"]["slices"].update(min=None, allowedCounts=None)
    assert decode_job(document) == decode_job(GOOD)


def test_empty_parts_mean_their_defaults() -> None:
    empty: dict[str, Any] = {
        "runtime": {},
        "elasticity": {"scaleUp": {}},
        "restart": {"backoff": {}},
    }
    assert good(**empty) == decode_job(GOOD)


def test_what_get_printed_can_be_applied_again() -> None:
    document = copy.deepcopy(GOOD)
    document["metadata"].update(uid="u", resourceVersion="3", generation=2, managedFields=[])
    document["status"] = {"phase": "Running"}
    assert decode_job(document) == decode_job(GOOD)


def test_whole_seconds_are_seconds() -> None:
    job = good(activeDeadlineSeconds=60)
    assert job.spec.active_deadline_seconds == 60.0
    assert isinstance(job.spec.active_deadline_seconds, float)


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"name": "other"}},
        {"metadata": {"name": "llm", "namespace": "other"}},
        {"slices": {"desired": 3, "hostsPerSlice": 2}},
        {"checkpoint": {"uri": "file:///tmp/other"}},
    ],
    ids=["name", "namespace", "hostsPerSlice", "checkpoint.uri"],
)
def test_an_immutable_field_cannot_change(change: dict[str, Any]) -> None:
    document = copy.deepcopy(GOOD)
    if "metadata" in change:
        document["metadata"] = change["metadata"]
    else:
        document["spec"].update(change)
    with pytest.raises(SpecError) as refusal:
        decode_update(document, decode_job(GOOD))
    assert len(refusal.value.problems) == 1
    assert "change" in refusal.value.expected


def test_the_checkpoint_folder_may_change_in_suspension() -> None:
    old, new = good(suspend=True), good(checkpoint={"uri": "file:///tmp/other"})
    assert check_update(old, new) == ()


def test_mutable_fields_may_change() -> None:
    new = good(slices={"desired": 2, "min": 1, "max": 5}, suspend=True)
    assert decode_update(encode(new), decode_job(GOOD)) == new


def test_settings_are_resolved() -> None:
    spec = good(
        checkpoint={
            "uri": "/tmp/x",
            "everySteps": 50,
            "snapshot": {"everySteps": 5, "memory": "1.5Gi", "slots": 2},
        }
    ).spec
    settings = resolve_settings(spec)
    assert settings.checkpoint_every_steps == 50
    assert settings.checkpoint_every_s is None
    assert settings.snapshot_every_steps == 5
    assert settings.snapshot_bytes_max == 3 << 29
    assert settings.snapshot_slots == 2
    assert settings.join_timeout_s == spec.runtime.timeouts.join_seconds


def test_the_local_tier_is_resolved_and_there_is_none_by_default() -> None:
    local = {"path": "/mnt/disk", "everySteps": 20}
    job = good(checkpoint={"uri": "/tmp/x", "local": local})
    assert decode_job(encode(job)) == job
    settings = resolve_settings(job.spec)
    assert (settings.local_path, settings.local_every_steps) == ("/mnt/disk", 20)
    assert settings.local_latest == 2
    assert resolve_settings(good().spec).local_path is None


def test_a_job_without_cadence_still_makes_durable_steps() -> None:
    settings = resolve_settings(good().spec)
    assert settings.checkpoint_every_steps is None
    assert settings.checkpoint_every_s == CHECKPOINT_EVERY_S_DEFAULT
    assert settings.snapshot_every_steps is None


def test_a_short_grace_period_is_suspect_and_legal() -> None:
    template = copy.deepcopy(GOOD["spec"]["template"])
    template["spec"]["terminationGracePeriodSeconds"] = 2
    (suspicion,) = suspicions(good(template=template).spec)
    assert suspicion.path == "spec.template.spec.terminationGracePeriodSeconds"
    assert suspicions(good().spec) == ()


def test_wire_types_survive_encoding() -> None:
    sent = directive(good())
    assert decode_directive(encode(sent)) == sent
    assert decode_report(encode(report())) == report()
    status = JobStatus(message="x", step=Step(3))
    assert decode_status(encode(status)) == status
    ledger = Ledger(incarnation=Incarnation(3), stage=Stage.RUN)
    assert decode(encode(ledger), Ledger) == ledger
    assert from_plain(to_plain(ledger), Ledger) == ledger


def test_an_absent_ledger_is_that_of_a_new_job() -> None:
    assert from_plain({}, Ledger) == Ledger()


def test_a_newer_writer_may_say_more() -> None:
    plain = to_plain(report()) | {"colour": "green"}
    assert decode_report(msgspec.json.encode(plain)) == report()


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"{", b"\xff", b'{"version": 1}'], ids=repr)
def test_garbage_on_the_wire_is_refused_whole(text: bytes) -> None:
    with pytest.raises(WireError):
        decode_directive(text)
    with pytest.raises(WireError):
        decode_report(text)


def test_another_wire_version_is_refused() -> None:
    for sent in (directive(good()), report()):
        plain = to_plain(sent) | {"version": 2}
        read = decode_directive if isinstance(sent, Directive) else decode_report
        with pytest.raises(WireError, match="version 2"):
            read(msgspec.json.encode(plain))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_text_can_do_worse_than_be_refused(text: bytes) -> None:
    with pytest.raises((SpecError, WireError)):
        decode_job(text)
    with pytest.raises(WireError):
        decode_report(text)


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["spec", "slices", "name", "uri", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    st.sampled_from(["metadata", "spec", "kind"]),
    st.sampled_from(["slices", "template", "checkpoint", "runtime", "restart", "x"]),
    _PLAIN,
)
def test_any_value_anywhere_is_accepted_or_refused_by_path(
    part: str, field: str, value: object
) -> None:
    document = copy.deepcopy(GOOD)
    if part == "spec":
        document["spec"][field] = value
    else:
        document[part] = value
    assert all(path.startswith(part) for path in problem_paths(document))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("2", 2),
        ("1k", 1000),
        ("1Ki", 1024),
        ("1.5Gi", 3 << 29),
        (".5M", 500_000),
        ("1.", 1),
        ("2e3", 2000),
        ("2E3", 2000),
        ("1E", 10**18),
        ("1Ei", 1 << 60),
        ("1500m", 2),
    ],
)
def test_a_quantity_is_read_as_kubernetes_does(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "x", "1K", "1 Gi", "-1", "1GiB", "1e", "e3", "１"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    assert parse_quantity(text) is None


def test_every_reason_has_an_entry_with_a_sentence() -> None:
    assert set(TABLE) == set(Reason)
    for reason, entry in TABLE.items():
        assert reason.value.isalnum()
        assert entry.sentence.endswith(".")
