"""The seam between an agent and its worker: shared words and a socket.

**Control block**: one anonymous shared memory file (memfd), `CONTROL_BYTES` long, made by the
agent and inherited by the worker. It holds signed 64-bit words (`Word`) and a ring of metrics. It
is how a step pays nothing: the worker writes `STEP_DONE` and reads `HOLD_AFTER`, no system call.

Steps here are states, as everywhere on the wire: `s` is the state after `s` finished steps. The
user's `run.steps` counts from 0, so finishing its step `k` makes state `k + 1`, and that is what
`STEP_DONE`, `HOLD_AFTER`, `Captured`, `FirstStepDone` and the ring say. After a restore `STEP_DONE`
is the restored step, 0 when fresh. `STEP_STARTED` is the state that is being made.

**Link**: a Unix stream socket pair. Frames are a 4-byte little-endian length and msgspec JSON of
one of the unions below; file descriptors travel by SCM_RIGHTS with the frame that names them
(`SlotsGranted`). The worker only touches it outside the step's path. When the agent dies the
worker gets SIGKILL from the kernel (PR_SET_PDEATHSIG along agent → zygote → worker), so neither
side needs a heartbeat on it.
"""

from __future__ import annotations

from enum import Enum, IntEnum

import msgspec

from everstep.controller.api.ids import HostId, Incarnation, Rank, Step
from everstep.controller.api.wire import Member, RestoreFigures, Settings
from everstep.runtime.layout.manifest import Holding, Plot

ENV_LINK_FD = "EVERSTEP_LINK_FD"
"""Set for a worker in a fresh interpreter: its end of the link. The `Assignment` is the first
frame that it reads."""
ENV_ZYGOTE_FD = "EVERSTEP_ZYGOTE_FD"
"""Set for the zygote: `es.main` then serves forks on this socket instead of training."""

WORKER_NAME = "everstep-worker"
SPARE_NAME = "everstep-spare"
"""What `ps` shows for a worker, and for one that has no assignment yet."""

CONTROL_BYTES = 1 << 18
METRICS_RING_OFFSET = 4096
METRICS_RING_SLOTS = 1024
METRICS_PER_STEP_MAX = 16
"""Ring entry: one int64 step, one int64 count, then 16 float64 values. Entry `i % slots`; the word
`METRICS_HEAD` is the count of entries written, advanced after the entry is complete."""


class Word(IntEnum):
    """Index of a signed 64-bit word of the control block. One writer each."""

    STEP_DONE = 0  # worker: last finished step; -1 before `restore` returned
    STEP_STARTED = 1  # worker: the step that `run.steps` handed out last
    HOLD_AFTER = 2  # agent: snapshot after this step; -1 none
    HOLD_KIND = 3  # agent: HoldKind; written before HOLD_AFTER, which is -1 meanwhile if it moves
    SLOT_GRANTED = 4  # agent: index of the slot the next snapshot may overwrite; -1 none
    SNAPSHOT_EVERY = 5  # agent: cadence in steps; 0 never (only on request)
    SLOT_WRITING = 6  # worker: slot it is overwriting now; -1 none
    METRICS_HEAD = 7  # worker: entries written to the ring
    PHASE = 8  # worker: WorkerPhase


class HoldKind(IntEnum):
    CONTINUE = 0
    """Snapshot and go on."""
    LEAVE = 1
    """Snapshot, then leave the incarnation."""


class WorkerPhase(IntEnum):
    IMPORTING = 0
    CONNECTING = 1
    PREPARING = 2
    """In the user's `train`, before `run.restore`."""
    RESTORING = 3
    COMPILING = 4
    """Restored; the first step is not finished."""
    TRAINING = 5
    ENDING = 6


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint that a restore may read from."""

    uri: str
    """Of the run's folder."""
    step: Step
    item: str = "state"
    """Which named part of the step."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True, tag="assignment"):
    """All that a worker needs to know. Never from the environment."""

    job: str
    job_uid: str
    host: HostId
    incarnation: Incarnation
    rank: Rank
    """Process id in this incarnation: dense, slice-major."""
    process_count: int
    members: tuple[Member, ...]
    coordinator_address: str
    """`ip:port` of the coordination service, already up. Empty for one process alone."""
    local_address: str
    """IP that this host's collectives bind and announce."""
    token: str
    settings: Settings
    restore_step: Step | None
    """None: no step exists; start fresh at 0."""
    holdings: tuple[Holding, ...] = ()
    """Memory sources of `restore_step`, own first."""
    fingerprint: str | None = None
    storage: Source | None = None
    """Set when `restore_step` is committed: the last source to try, region by region."""
    step_before: Step = Step(0)
    own_slots: tuple[str, ...] = ()
    """Ids of holdings in this host's own memory, in the order of the inherited descriptors."""


class WarmUp(msgspec.Struct, frozen=True, kw_only=True, tag="warm-up"):
    """Agent → spare: a worker that was forked ahead of time. Load what any first step needs, answer
    `Warmed`, and wait for the `Assignment`.
    """

    patience_s: float
    """Of the settings, which jax's backend reads once in a process. A spare is used for an
    assignment with the same one only."""


def patience_of(settings: Settings) -> float:
    """How long a collective may wait for a slow member: a backstop, see `environment`."""
    return max(settings.progress_timeout_s, settings.start_grace_s)


class SlotsGranted(msgspec.Struct, frozen=True, kw_only=True, tag="slots"):
    """Agent → worker. One memfd per slot travels with it, in slot order."""

    count: int
    size_bytes: int


class SlotsRefused(msgspec.Struct, frozen=True, kw_only=True, tag="slots-refused"):
    message: str
    """With the figures: needed, available, the setting that bounds it."""


AgentFrame = Assignment | SlotsGranted | SlotsRefused


class PlotAnnounced(msgspec.Struct, frozen=True, kw_only=True, tag="plot"):
    """Worker → agent, once after restore: I need slots of this layout. Answered by `Slots…`."""

    plot: Plot


class Captured(msgspec.Struct, frozen=True, kw_only=True, tag="captured"):
    """A slot is completely written. The agent checksums it and makes it valid."""

    slot: int
    step: Step
    copy_s: float
    extra: dict[str, str] = {}


class Restored(msgspec.Struct, frozen=True, kw_only=True, tag="restored"):
    figures: RestoreFigures


class FirstStepDone(msgspec.Struct, frozen=True, kw_only=True, tag="first-step"):
    step: Step
    at_s: float


class MetricNames(msgspec.Struct, frozen=True, kw_only=True, tag="metric-names"):
    """Names of the values in the ring, in order; sent before the first entry."""

    names: tuple[str, ...]


class EndKind(Enum):
    DONE = "done"
    LEFT = "left"
    USER_ERROR = "user-error"
    EXITED_EARLY = "exited-early"
    STATE_REFUSED = "state-refused"
    STARTUP_FAILED = "startup-failed"
    FENCED = "fenced"
    COLLECTIVE_ERROR = "collective-error"
    """JAX lost another member; a consequence, not a cause."""


class Ending(msgspec.Struct, frozen=True, kw_only=True, tag="ending"):
    """The worker's last words. Its process exits right after, with `EXIT_CODES[kind]`."""

    kind: EndKind
    step: Step
    message: str = ""
    """One line; the traceback is already on stderr, whole and once."""
    phase: WorkerPhase | None = None
    """Where it was when it ended."""


class Warmed(msgspec.Struct, frozen=True, kw_only=True, tag="warmed"):
    """Spare → agent: an assignment would be acted on at once."""


class Connected(msgspec.Struct, frozen=True, kw_only=True, tag="connected"):
    """JAX is connected and has its devices."""

    pid: int
    start_s: float


WorkerFrame = (
    PlotAnnounced | Captured | Restored | FirstStepDone | MetricNames | Ending | Connected | Warmed
)

EXIT_CODES: dict[EndKind, int] = {
    EndKind.DONE: 0,
    EndKind.USER_ERROR: 1,
    EndKind.LEFT: 75,
    EndKind.EXITED_EARLY: 76,
    EndKind.STATE_REFUSED: 77,
    EndKind.STARTUP_FAILED: 78,
    EndKind.FENCED: 79,
    EndKind.COLLECTIVE_ERROR: 80,
}
