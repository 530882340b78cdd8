"""The live view of a job as something `rich` can draw, and as a plain line. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from everstep.controller.api.status import SliceStatus
from everstep.controller.api.wire import Report
from everstep.controller.cli.words import age, clock_time
from everstep.controller.local.records import EventRecord, JobRecord

EVENT_COUNT = 6
_STYLES = {
    "Ready": "green",
    "Starting": "yellow",
    "Joining": "yellow",
    "Disrupted": "yellow",
    "Suspect": "yellow",
    "Lost": "red",
    "Gone": "red",
}
"""Colour repeats what the words say, and never says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is known of a job at one moment."""

    record: JobRecord
    reports: tuple[Report, ...]
    events: tuple[EventRecord, ...]
    has_controller: bool
    now_s: float

    @property
    def step(self) -> int:
        """The newest step: reports are fresher than the status."""
        own = [r for r in self.reports if r.incarnation == self.record.status.incarnation]
        return max([self.record.status.step, *(report.step for report in own)])

    @property
    def loss(self) -> float | None:
        newest = max(
            (r for r in self.reports if r.loss is not None),
            key=lambda report: report.step,
            default=None,
        )
        return self.record.status.loss if newest is None else newest.loss


def draw(look: Look) -> RenderableType:
    """Return the picture of a job."""
    return Group(_title(look), _message(look), _slices(look), *_events(look.events))


def line(look: Look) -> str:
    """Return one line that says how a job stands, for a terminal that cannot be drawn on."""
    status = look.record.status
    members = ",".join(str(s.id) for s in status.slice_statuses if s.rank is not None) or "none"
    loss = "-" if look.loss is None else f"{look.loss:.4f}"
    said = f": {status.message}" if status.message else ""
    return (
        f"{clock_time(look.now_s)} {look.record.metadata.name} {status.phase.value} "
        f"incarnation {status.incarnation} slices {members} step {look.step} loss {loss}{said}"
    )


def event_line(name: str, event: EventRecord) -> str:
    where = "" if event.slice is None else f" slice {event.slice}:"
    return f"{clock_time(event.at_s)} {name} event {event.reason}:{where} {event.message}"


def _title(look: Look) -> RenderableType:
    status = look.record.status
    title = Text()
    title.append(look.record.metadata.name, style="bold")
    title.append(f"   {status.phase.value}", style="bold cyan")
    title.append(f"   incarnation {status.incarnation}   step {look.step}")
    title.append("" if look.loss is None else f"   loss {look.loss:.4f}")
    if status.steps_per_s is not None:
        title.append(f"   {status.steps_per_s:.1f} steps/s")
    committed = status.checkpoint.last_committed
    if committed is not None:
        title.append(f"   checkpoint {committed.step}")
    return title


def _message(look: Look) -> RenderableType:
    text = Text(look.record.status.message or " ")
    if not look.has_controller:
        text.append("\nNo controller is running; the training does not need one.", style="yellow")
    return text


def _slices(look: Look) -> RenderableType:
    table = Table(pad_edge=False)
    for name in ("slice", "state", "rank", "hosts", "step", "snapshot", "restarts", "what"):
        table.add_column(name, justify="right" if name in ("rank", "step", "snapshot") else "left")
    for one in look.record.status.slice_statuses:
        table.add_row(*_slice_row(look, one), style=_STYLES.get(one.state, ""))
    return table


def _slice_row(look: Look, one: SliceStatus) -> list[str]:
    own = [report for report in look.reports if report.host.slice == one.id]
    steps = [report.step for report in own]
    snapshots = [r.step_snapshot for r in own if r.step_snapshot is not None]
    phases = sorted({report.phase.value for report in own})
    what = ", ".join(phases)
    if one.deadline_s is not None:
        what = f"goes in {age(one.deadline_s - look.now_s)}; {what}"
    if one.reason:
        what = f"{what} ({one.reason})" if what else one.reason
    return [
        str(one.id),
        one.state,
        "-" if one.rank is None else str(one.rank),
        f"{one.ready_hosts}/{look.record.spec.slices.hosts_per_slice}",
        str(max(steps)) if steps else "-",
        str(min(snapshots)) if snapshots else "-",
        str(one.restarts),
        what,
    ]


def _events(events: Sequence[EventRecord]) -> list[RenderableType]:
    return [
        Text(
            f"{clock_time(one.at_s)}  {one.reason:<24} {one.message}",
            style="" if one.severity == "Normal" else "yellow",
            overflow="ellipsis",
            no_wrap=True,
        )
        for one in events[-EVENT_COUNT:]
    ]
