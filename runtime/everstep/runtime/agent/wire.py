"""The seam between agents: HTTP/1.1 on the agent's port, JSON by msgspec, bytes by range.

Every request carries `Authorization: Bearer <directive.token>` and `Everstep-Incarnation: n`.
A request of another incarnation is answered 409 with `Refused`, both numbers in it; a wrong token
401. An agent that does not know an incarnation yet (its directive is late) answers 425 with
`Refused`, and the caller tries again until its own deadline.

| method and path | body → answer | who serves |
|---|---|---|
| `POST /v1/join` | `Join` → `Joined`, held open until all are in, or the deadline | lead |
| `GET /v1/progress` | → `Progress`; `?held=S&wait_s=T` waits until S is held, or T | members |
| `POST /v1/hold` | `Hold` → `HoldAnswer` | members |
| `GET /v1/holdings[?step=S]` | → `Inventory` | members |
| `POST /v1/take` | `Take` → `Taken`; copies regions from peers into own memory | survivors |
| `POST /v1/write` | `WriteOrder` → `Part`; writes owned regions to storage | members |
| `GET /v1/holdings/{id}/manifest` | → `SnapshotManifest` | members |
| `GET /v1/holdings/{id}/bytes` + `Range` | → 206, raw bytes by sendfile | members |
| `POST /v1/notice` | `NoticePosted` → 204; a member got SIGTERM | lead |
| `POST /v1/cadence` | `Cadence` → 204 | members |
| `POST /v1/committed` | `CommittedStep` → 204 | members |
| `GET /v1/health` | → 200 | everyone, no token |

Reading a holding whose slot was overwritten meanwhile gives 410: the reader drops that source.
"""

from __future__ import annotations

import msgspec

from everstep.controller.api.ids import HostId, Incarnation, Step
from everstep.runtime.agent.link import Assignment
from everstep.runtime.layout.manifest import Holding, Inventory, Region

TOKEN_HEADER = "Authorization"
INCARNATION_HEADER = "Everstep-Incarnation"


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    yours: Incarnation
    mine: Incarnation


class Join(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: Incarnation
    host: HostId
    address: str
    port: int
    inventory: Inventory
    step_before: Step
    """Newest step this host saw finished in any incarnation."""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the lead to all members at once: exactly one of the two is set."""

    assignment: Assignment | None = None
    missing: tuple[HostId, ...] = ()
    failed: str | None = None
    """Why there can be no assignment although all are in (no step can be restored, fenced)."""
    is_final: bool = False
    """Another try would fail in the same way: somebody has to change something first."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: Incarnation
    step_done: Step
    is_training: bool
    """False while importing, restoring or compiling: no step boundary is near."""
    step_held: Step | None
    """Newest complete snapshot in memory; the one that was waited for, when it is held."""
    has_worker: bool = True
    """False when no worker lives here: no later step will be held."""


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Agree on `step`. Two-phase: every member is asked; if one is past it, a later is proposed."""

    request_id: str
    step: Step
    leave: bool
    """False proposes (snapshot and go on), true confirms (leave after it)."""
    settled: bool = False
    """The step is decided from what memory holds: end the worker now, wait for no boundary."""


class HoldAnswer(msgspec.Struct, frozen=True, kw_only=True):
    accepted: bool
    step_done: Step


class NoticePosted(msgspec.Struct, frozen=True, kw_only=True):
    host: HostId
    deadline_s: float


class Cadence(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot every so many steps from now on (`auto`, measured by the lead)."""

    every_steps: int


class CommittedStep(msgspec.Struct, frozen=True, kw_only=True):
    """This step is a checkpoint now; told by the lead, so that members need not read the ledger."""

    step: Step
    committed_at_s: float


class TakePart(msgspec.Struct, frozen=True, kw_only=True):
    source: Holding
    regions: tuple[Region, ...]


class Take(msgspec.Struct, frozen=True, kw_only=True):
    """Copy these regions of a step out of doomed (or peer) memory into your own."""

    step: Step
    fingerprint: str
    parts: tuple[TakePart, ...]
    deadline_s: float


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    holding: Holding | None
    bytes_moved: int
    message: str = ""


class WriteOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Write these regions of a held step into the draft of a checkpoint."""

    step: Step
    uri: str
    draft: str
    """Folder of the draft, relative to the run."""
    regions: tuple[Region, ...]
    chunks: dict[int, tuple[int, ...]]
    """Chunk shape of every leaf, by index."""
    deadline_s: float
    held_in: Incarnation
    """Incarnation whose snapshot of the step is written; another one's may have other bits."""
    fingerprint: str


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one host wrote, durable on return."""

    host: HostId
    regions: tuple[Region, ...]
    bytes_written: int
    error: str | None = None
