"""The `MultiSliceJob` that people write: `everstep.dev/v1alpha1`.

Only shapes, defaults and names live here; `codec` decodes and `validate` judges fields against
each other. Python names are snake_case, the wire is camelCase. Fields are added, never renamed.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

API_VERSION = "everstep.dev/v1alpha1"
KIND = "MultiSliceJob"
NAME_LENGTH_MAX = 40
SLICE_COUNT_MAX = 1024


class _Node(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Base of everything in a spec: immutable, camelCase, unknown fields refused.

    `kw_only` is not inherited by msgspec structs, so that each says it again.
    """


class Profile(Enum):
    TPU = "TPU"
    GPU = "GPU"
    GENERIC = "Generic"


class PlannedAction(Enum):
    CHECKPOINT_ONLY = "CheckpointOnly"
    CHECKPOINT_AND_MIGRATE = "CheckpointAndMigrate"
    IGNORE = "Ignore"


class OnLoss(Enum):
    WAIT_FOR_REPLACEMENT = "WaitForReplacement"
    WAIT_THEN_SHRINK = "WaitThenShrink"
    SHRINK_IMMEDIATELY = "ShrinkImmediately"
    FAIL = "Fail"


class ScaleUpMode(Enum):
    AUTOMATIC = "Automatic"
    NEVER = "Never"


class BatchPolicy(Enum):
    KEEP_GLOBAL = "KeepGlobal"
    SCALE_WITH_SLICES = "ScaleWithSlices"


class Metadata(_Node, frozen=True, kw_only=True):
    name: str
    namespace: str = "default"
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Slices(_Node, frozen=True, kw_only=True):
    desired: int
    min: int | None = None
    """Default: 1."""
    max: int | None = None
    """Default: `desired`."""
    allowed_counts: tuple[int, ...] | None = None
    hosts_per_slice: int = 1
    profile: Profile = Profile.GENERIC

    @property
    def count_min(self) -> int:
        return 1 if self.min is None else self.min

    @property
    def count_max(self) -> int:
        return self.desired if self.max is None else self.max

    def allows(self, count: int) -> bool:
        """Whether a job may run on this many slices."""
        inside = self.count_min <= count <= self.count_max
        return inside and (self.allowed_counts is None or count in self.allowed_counts)


class EnvVar(_Node, frozen=True, kw_only=True):
    name: str
    value: str = ""


class Container(_Node, frozen=True, kw_only=True):
    """The part of a pod's container that one machine can honour; a cluster takes all of it."""

    name: str
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()
    working_dir: str | None = None
    image: str | None = None
    resources: dict[str, Any] = {}


class PodSpec(_Node, frozen=True, kw_only=True):
    containers: tuple[Container, ...]
    termination_grace_period_seconds: int = 30


class Template(_Node, frozen=True, kw_only=True):
    spec: PodSpec
    metadata: dict[str, Any] = {}


class Timeouts(_Node, frozen=True, kw_only=True):
    """report interval < report < progress < join; checked in that order."""

    report_interval_seconds: float = 1.0
    report_seconds: float = 5.0
    progress_seconds: float = 600.0
    join_seconds: float = 900.0
    start_seconds: float = 1800.0
    """Grace for the first step of a worker: import, compile, restore."""


class Runtime(_Node, frozen=True, kw_only=True):
    container: str | None = None
    """Default: the only container."""
    agent_port: int = 7070
    coordinator_port: int = 8482
    timeouts: Timeouts = Timeouts()


class Retention(_Node, frozen=True, kw_only=True):
    latest: int = 3
    every_steps: int | None = None


class Emergency(_Node, frozen=True, kw_only=True):
    budget_seconds: float = 45.0
    safety_margin_seconds: float = 5.0


class Snapshot(_Node, frozen=True, kw_only=True):
    every_steps: int | str = "auto"
    """A positive number, or `auto`."""
    slots: int = 3
    memory: str | None = None
    """Quantity as in Kubernetes (`16Gi`), per host."""
    replicas: int = 0


class Local(_Node, frozen=True, kw_only=True):
    """The local tier: snapshots on a disk of each host, which outlives its pod."""

    path: str
    every_steps: int | None = None
    """Default: each snapshot."""
    latest: int = 2


class Checkpoint(_Node, frozen=True, kw_only=True):
    uri: str
    every_steps: int | None = None
    every_seconds: float | None = None
    retention: Retention = Retention()
    emergency: Emergency = Emergency()
    snapshot: Snapshot = Snapshot()
    local: Local | None = None
    """Default: none."""


class Disruption(_Node, frozen=True, kw_only=True):
    planned_action: PlannedAction = PlannedAction.CHECKPOINT_AND_MIGRATE


class ScaleUp(_Node, frozen=True, kw_only=True):
    mode: ScaleUpMode = ScaleUpMode.AUTOMATIC
    min_uptime_seconds: float = 1800.0
    cooldown_seconds: float = 900.0
    stabilization_seconds: float = 120.0


class Elasticity(_Node, frozen=True, kw_only=True):
    on_loss: OnLoss = OnLoss.WAIT_THEN_SHRINK
    wait_for_replacement_seconds: float = 300.0
    scale_up: ScaleUp = ScaleUp()
    batch_policy: BatchPolicy = BatchPolicy.KEEP_GLOBAL


class Backoff(_Node, frozen=True, kw_only=True):
    initial_seconds: float = 5.0
    max_seconds: float = 300.0
    reset_after_seconds: float = 1800.0


class Restart(_Node, frozen=True, kw_only=True):
    max_restarts: int = 10
    """Failures only; disruptions never count here (G10)."""
    window_seconds: float = 3600.0
    backoff: Backoff = Backoff()
    max_disruptions_per_hour: int = 20


class JobSpec(_Node, frozen=True, kw_only=True):
    slices: Slices
    template: Template
    checkpoint: Checkpoint
    suspend: bool = False
    runtime: Runtime = Runtime()
    disruption: Disruption = Disruption()
    elasticity: Elasticity = Elasticity()
    restart: Restart = Restart()
    active_deadline_seconds: float | None = None


class MultiSliceJob(_Node, frozen=True, kw_only=True):
    """What `kubectl apply` and `everstep local apply` take."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: JobSpec
