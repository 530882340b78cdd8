"""Every field, wrong: the path is named, and what was found and would do."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from everstep.controller.api.codec import decode_job
from everstep.controller.api.errors import SpecError

GOOD: dict[str, Any] = {
    "apiVersion": "everstep.dev/v1alpha1",
    "kind": "MultiSliceJob",
    "metadata": {"name": "llm"},
    "spec": {
        "slices": {"desired": 4, "min": 2, "max": 8},
        "template": {
            "spec": {"containers": [{"name": "trainer", "command": ["python", "train.py"]}]}
        },
        "checkpoint": {"uri": "file:///tmp/llm", "everySteps": 100},
    },
}
DROP = object()
TRAINER = {"name": "trainer", "command": ["python"]}
CONTAINERS = "spec.template.spec.containers"

# Where it is put, what is put there, where the problem is told (None: at the same place).
BAD: list[tuple[str, object, str | None]] = [
    ("apiVersion", "everstep.dev/v1", None),
    ("apiVersion", DROP, None),
    ("kind", "Job", None),
    ("kind", 3, None),
    ("metadata", DROP, None),
    ("metadata", ["llm"], None),
    ("metadata.name", DROP, None),
    ("metadata.name", "", None),
    ("metadata.name", "n" * 41, None),
    ("metadata.name", "Upper", None),
    ("metadata.name", "a.b", None),
    ("metadata.name", "-a", None),
    ("metadata.name", "a-", None),
    ("metadata.name", "a_b", None),
    ("metadata.name", 7, None),
    ("metadata.namespace", "No", None),
    ("metadata.namespace", "n" * 64, None),
    ("metadata.labels", "x", None),
    ("metadata.labels", {"a": 1}, "metadata.labels.a"),
    ("metadata.labels", {"a b!": "x"}, "metadata.labels.a b!"),
    ("metadata.labels", {"": "x"}, "metadata.labels."),
    ("metadata.labels", {"k" * 64: "x"}, "metadata.labels." + "k" * 64),
    ("metadata.labels", {"a/b/c": "x"}, "metadata.labels.a/b/c"),
    ("metadata.labels", {"/b": "x"}, "metadata.labels./b"),
    ("metadata.labels", {"Team.dev/b": "x"}, "metadata.labels.Team.dev/b"),
    ("metadata.labels", {"d" * 254 + "/b": "x"}, "metadata.labels." + "d" * 254 + "/b"),
    ("metadata.labels", {"team": "x" * 64}, "metadata.labels.team"),
    ("metadata.labels", {"team": "-x"}, "metadata.labels.team"),
    ("metadata.labels", {"team": "x y"}, "metadata.labels.team"),
    ("metadata.annotations", {"a b": "x"}, "metadata.annotations.a b"),
    ("metadata.annotations", {"a": "x" * (257 << 10)}, None),
    ("metadata.label", {}, None),
    ("spec", DROP, None),
    ("spec", None, None),
    ("spec.slices", DROP, None),
    ("spec.slices.desired", DROP, None),
    ("spec.slices.desired", "4", None),
    ("spec.slices.desired", 4.5, None),
    ("spec.slices.desired", True, None),
    ("spec.slices.desired", 0, None),
    ("spec.slices.desired", -1, None),
    ("spec.slices.desired", 9, None),
    ("spec.slices.desired", 1, "spec.slices.min"),
    ("spec.slices.min", 0, None),
    ("spec.slices.min", 5, None),
    ("spec.slices.max", 3, "spec.slices.desired"),
    ("spec.slices.max", 1025, None),
    ("spec.slices.allowedCounts", [], None),
    ("spec.slices.allowedCounts", [2, 3], "spec.slices.desired"),
    ("spec.slices.allowedCounts", [1, 4], "spec.slices.allowedCounts[0]"),
    ("spec.slices.allowedCounts", [4, 9], "spec.slices.allowedCounts[1]"),
    ("spec.slices.allowedCounts", [2, 4, 4], "spec.slices.allowedCounts[2]"),
    ("spec.slices.allowedCounts", [2, "4"], "spec.slices.allowedCounts[1]"),
    ("spec.slices.allowedCounts", 4, None),
    ("spec.slices.hostsPerSlice", 0, None),
    ("spec.slices.hostsPerSlice", 4097, None),
    ("spec.slices.profile", "tpu", None),
    ("spec.slices.mim", 2, None),
    ("spec.suspend", "yes", None),
    ("spec.template", DROP, None),
    ("spec.template.spec.containers", [], None),
    ("spec.template.spec.containers", {}, None),
    ("spec.template.spec.containers", [{"command": ["x"]}], f"{CONTAINERS}[0].name"),
    ("spec.template.spec.containers", [{"name": "A", "command": ["x"]}], f"{CONTAINERS}[0].name"),
    ("spec.template.spec.containers", [TRAINER, TRAINER], f"{CONTAINERS}[1].name"),
    ("spec.template.spec.containers", [TRAINER, {"name": "b"}], "spec.runtime.container"),
    ("spec.template.spec.containers", [{"name": "trainer"}], f"{CONTAINERS}[0].command"),
    (
        "spec.template.spec.containers",
        [{"name": "trainer", "command": "python train.py"}],
        f"{CONTAINERS}[0].command",
    ),
    (
        "spec.template.spec.containers",
        [{"name": "trainer", "command": [" "]}],
        f"{CONTAINERS}[0].command[0]",
    ),
    (
        "spec.template.spec.containers",
        [{"name": "trainer", "command": ["python", "a\0b"]}],
        f"{CONTAINERS}[0].command[1]",
    ),
    (
        "spec.template.spec.containers",
        [{**TRAINER, "env": [{"name": "1A", "value": "x"}]}],
        f"{CONTAINERS}[0].env[0].name",
    ),
    (
        "spec.template.spec.containers",
        [{**TRAINER, "env": [{"name": "A=B"}]}],
        f"{CONTAINERS}[0].env[0].name",
    ),
    (
        "spec.template.spec.containers",
        [{**TRAINER, "env": [{"name": "A"}, {"name": "A"}]}],
        f"{CONTAINERS}[0].env[1].name",
    ),
    (
        "spec.template.spec.containers",
        [{**TRAINER, "env": [{"name": "A", "value": 1}]}],
        f"{CONTAINERS}[0].env[0].value",
    ),
    (
        "spec.template.spec.containers",
        [{**TRAINER, "resources": {"limits": {"memory": "16 Gi"}}}],
        f"{CONTAINERS}[0].resources.limits.memory",
    ),
    (
        "spec.template.spec.containers",
        [{**TRAINER, "resources": {"requests": 3}}],
        f"{CONTAINERS}[0].resources.requests",
    ),
    ("spec.template.spec.terminationGracePeriodSeconds", -1, None),
    ("spec.runtime.container", "other", None),
    ("spec.runtime.agentPort", 0, None),
    ("spec.runtime.agentPort", 65536, None),
    ("spec.runtime.agentPort", 8482, "spec.runtime.coordinatorPort"),
    ("spec.runtime.coordinatorPort", "8482", None),
    ("spec.runtime.timeouts.reportIntervalSeconds", 0, None),
    ("spec.runtime.timeouts.reportIntervalSeconds", 5, None),
    ("spec.runtime.timeouts.reportSeconds", 600, None),
    ("spec.runtime.timeouts.progressSeconds", 900, None),
    (
        "spec.runtime.timeouts.joinSeconds",
        10,
        "spec.runtime.timeouts.progressSeconds",
    ),
    ("spec.runtime.timeouts.startSeconds", -5, None),
    ("spec.runtime.timeouts.startSeconds", float("nan"), None),
    ("spec.runtime.timeouts.joinSeconds", float("inf"), None),
    ("spec.runtime.timeout", {}, None),
    ("spec.checkpoint", DROP, None),
    ("spec.checkpoint.uri", DROP, None),
    ("spec.checkpoint.uri", "", None),
    ("spec.checkpoint.uri", "checkpoints", None),
    ("spec.checkpoint.uri", "file://host/path", None),
    ("spec.checkpoint.uri", "file:///", None),
    ("spec.checkpoint.uri", "s3://bucket/path", None),
    ("spec.checkpoint.uri", "gs://", None),
    ("spec.checkpoint.uri", "/tmp/../etc", None),
    ("spec.checkpoint.uri", " /tmp/x", None),
    ("spec.checkpoint.everySteps", 0, None),
    ("spec.checkpoint.everySeconds", 60, None),
    ("spec.checkpoint.everySeconds", -1, None),
    ("spec.checkpoint.retention.latest", 0, None),
    ("spec.checkpoint.retention.everySteps", 0, None),
    ("spec.checkpoint.emergency.budgetSeconds", 0, None),
    (
        "spec.checkpoint.emergency.budgetSeconds",
        5,
        "spec.checkpoint.emergency.safetyMarginSeconds",
    ),
    ("spec.checkpoint.emergency.safetyMarginSeconds", -1, None),
    ("spec.checkpoint.snapshot.everySteps", 0, None),
    ("spec.checkpoint.snapshot.everySteps", "often", None),
    ("spec.checkpoint.snapshot.everySteps", 1.5, None),
    ("spec.checkpoint.snapshot.slots", 1, None),
    ("spec.checkpoint.snapshot.slots", 65, None),
    ("spec.checkpoint.snapshot.memory", "16GB", None),
    ("spec.checkpoint.snapshot.memory", "0", None),
    ("spec.checkpoint.snapshot.memory", "1e400", None),
    ("spec.checkpoint.snapshot.memory", "8Ei", None),
    ("spec.checkpoint.snapshot.memory", 16, None),
    ("spec.checkpoint.snapshot.replicas", -1, None),
    ("spec.checkpoint.snapshot.replicas", 8, None),
    ("spec.checkpoint.local", {}, "spec.checkpoint.local.path"),
    ("spec.checkpoint.local.path", "disk", None),
    ("spec.checkpoint.local.path", "/", None),
    ("spec.checkpoint.local.path", "/disk/../etc", None),
    ("spec.checkpoint.local.path", "gs://bucket/disk", None),
    ("spec.checkpoint.local", {"path": "/d", "everySteps": 0}, "spec.checkpoint.local.everySteps"),
    ("spec.checkpoint.local", {"path": "/d", "latest": 0}, "spec.checkpoint.local.latest"),
    ("spec.checkpoint.local", {"path": "/d", "latest": 65}, "spec.checkpoint.local.latest"),
    ("spec.checkpoint.local", {"path": "/d", "keep": 1}, "spec.checkpoint.local.keep"),
    ("spec.disruption.plannedAction", "Migrate", None),
    ("spec.disruption.planned", "Ignore", None),
    ("spec.elasticity.onLoss", "Shrink", None),
    ("spec.elasticity.waitForReplacementSeconds", -1, None),
    ("spec.elasticity.scaleUp.mode", "Always", None),
    ("spec.elasticity.scaleUp.minUptimeSeconds", -1, None),
    ("spec.elasticity.scaleUp.cooldownSeconds", 1e12, None),
    ("spec.elasticity.scaleUp.stabilizationSeconds", "2m", None),
    ("spec.elasticity.batchPolicy", "Keep", None),
    ("spec.restart.maxRestarts", -1, None),
    ("spec.restart.windowSeconds", 0, None),
    ("spec.restart.backoff.initialSeconds", 301, None),
    ("spec.restart.backoff.maxSeconds", -1, None),
    ("spec.restart.backoff.resetAfterSeconds", 0, None),
    ("spec.restart.maxDisruptionsPerHour", 0, None),
    ("spec.activeDeadlineSeconds", 0, None),
    ("spec.queue", "", None),
]


def put(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a copy with one field replaced, added or dropped."""
    changed = copy.deepcopy(document)
    *folders, last = path.split(".")
    inner = changed
    for name in folders:
        inner = inner.setdefault(name, {})
    if value is DROP:
        del inner[last]
    else:
        inner[last] = copy.deepcopy(value)
    return changed


def test_the_table_covers_many_fields() -> None:
    assert len(BAD) >= 80
    decode_job(GOOD)


@pytest.mark.parametrize(
    ("path", "value", "told_at"),
    BAD,
    ids=[f"{path}={'absent' if value is DROP else value!r}"[:70] for path, value, _ in BAD],
)
def test_a_bad_field_is_refused_by_its_path(path: str, value: object, told_at: str | None) -> None:
    with pytest.raises(SpecError) as refusal:
        decode_job(put(GOOD, path, value))
    problems = {problem.path: problem for problem in refusal.value.problems}
    assert list(problems) == [told_at or path]
    problem = problems[told_at or path]
    assert problem.found
    assert problem.expected
    assert str(problem) in str(refusal.value)


def test_all_problems_are_told_at_once() -> None:
    document = put(GOOD, "spec.slices.desired", "4")
    document = put(document, "spec.elasticity.onLoss", "Shrink")
    document = put(document, "spec.checkpoint.urI", "x")
    with pytest.raises(SpecError) as refusal:
        decode_job(document)
    assert [problem.path for problem in refusal.value.problems] == [
        "spec.slices.desired",
        "spec.checkpoint.urI",
        "spec.elasticity.onLoss",
    ]


def test_rules_between_fields_are_told_together() -> None:
    document = put(GOOD, "spec.slices", {"desired": 1, "min": 2, "allowedCounts": [9]})
    document = put(document, "metadata.name", "No")
    with pytest.raises(SpecError) as refusal:
        decode_job(document)
    assert {problem.path for problem in refusal.value.problems} >= {
        "metadata.name",
        "spec.slices.min",
    }


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("spec.slices.mim", "min"),
        ("spec.slices.hosts_per_slice", "hostsPerSlice"),
        ("spec.checkpoint.URI", "uri"),
        ("spec.elasticity.scaleup", "scaleUp"),
        ("spec.runtime.agentport", "agentPort"),
        ("metadata.nmae", "name"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_known_name(path: str, near: str) -> None:
    with pytest.raises(SpecError) as refusal:
        decode_job(put(GOOD, path, {}))
    (problem,) = refusal.value.problems
    assert problem.path == path
    assert problem.expected == f"{near}, the nearest known name"


def test_a_wrong_choice_is_answered_with_the_nearest() -> None:
    with pytest.raises(SpecError) as refusal:
        decode_job(put(GOOD, "spec.elasticity.onLoss", "WaitForReplacment"))
    assert "did you mean WaitForReplacement?" in refusal.value.expected


def test_a_timeout_order_names_both_fields_and_values() -> None:
    with pytest.raises(SpecError) as refusal:
        decode_job(put(GOOD, "spec.runtime.timeouts", {"reportSeconds": 700}))
    assert refusal.value.path == "spec.runtime.timeouts.reportSeconds"
    assert "700" in refusal.value.found
    assert "spec.runtime.timeouts.progressSeconds (600)" in refusal.value.expected


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe"])
def test_what_is_no_object_at_all_is_refused(text: bytes) -> None:
    with pytest.raises(SpecError):
        decode_job(text)


def test_a_bound_that_is_told_is_the_real_one() -> None:
    with pytest.raises(SpecError) as refused:
        decode_job(put(GOOD, "spec.checkpoint.snapshot.slots", 100))
    assert "2 to 64" in str(refused.value)


def test_names_and_values_that_kubernetes_takes_are_taken() -> None:
    labels = {"a": "", "team.dev/A_b.c-1": "v" * 63, "k" * 63: "1.0", "d" * 63 + "/n": "x"}
    assert decode_job(put(GOOD, "metadata.labels", labels)).metadata.labels == labels
    notes = {"Team.dev/note": "any text: {}\n", "a": ""}
    assert decode_job(put(GOOD, "metadata.annotations", notes)).metadata.annotations == notes
