"""`describe`: everything about a job, as text that is read from top to bottom."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.controller.api.status import Recovery
from everstep.controller.cli.words import age, seconds, size, timestamp
from everstep.controller.local.records import EventRecord, JobRecord

EVENT_COUNT_MAX = 30


def describe(record: JobRecord, events: Sequence[EventRecord], now_s: float) -> str:
    """Return the description of a job; events oldest first."""
    lines = [
        *_head(record, now_s),
        *_spec(record),
        *_conditions(record, now_s),
        *_slices(record, now_s),
        *_recoveries(record, now_s),
        *_events(events, now_s),
    ]
    return "\n".join(lines) + "\n"


def _head(record: JobRecord, now_s: float) -> list[str]:
    metadata, status = record.metadata, record.status
    committed = status.checkpoint.last_committed
    speed = "-" if status.steps_per_s is None else format(status.steps_per_s, ".3g")
    counted = f"{status.restarts.counted_in_window} within the window"
    lines = [
        f"Name:          {metadata.name}",
        f"Namespace:     {metadata.namespace}",
        f"UID:           {metadata.uid}",
        f"Created:       {timestamp(metadata.created_at)} ({age(now_s - metadata.created_at)} ago)",
        f"Generation:    {metadata.generation} (observed {status.observed_generation})",
        f"Phase:         {status.phase.value}",
        f"Message:       {status.message or '-'}",
        f"Incarnation:   {status.incarnation}",
        f"Step:          {status.step}",
        f"Loss:          {'-' if status.loss is None else format(status.loss, '.6g')}",
        f"Steps/s:       {speed}",
        f"Snapshot:      {_step(status.checkpoint.step_snapshot)}",
        f"Checkpoint:    {_step(None if committed is None else committed.step)}",
        f"Failures:      {status.restarts.failures} ({counted})",
        f"Disruptions:   {status.restarts.disruptions}",
    ]
    if status.wait_until_s is not None:
        lines.insert(4, f"Waits until:   {timestamp(status.wait_until_s)} at the latest")
    if metadata.deleted_at is not None:
        lines.insert(4, f"Deleted:       {timestamp(metadata.deleted_at)}")
    if status.coordinator is not None:
        lines.append(f"Coordinator:   {status.coordinator.address}")
    return lines


def _spec(record: JobRecord) -> list[str]:
    spec = record.spec
    slices = spec.slices
    allowed = "" if slices.allowed_counts is None else f", of {list(slices.allowed_counts)}"
    bounds = f"{slices.count_min} to {slices.count_max}{allowed}"
    snapshot = spec.checkpoint.snapshot
    every = (
        f"every {spec.checkpoint.every_steps} steps"
        if spec.checkpoint.every_steps is not None
        else f"every {spec.checkpoint.every_seconds:g} s"
        if spec.checkpoint.every_seconds is not None
        else "at notices and at the end"
    )
    lines = [
        "Spec:",
        f"  Slices:      {slices.desired} desired, {bounds}; {slices.hosts_per_slice} hosts each",
        f"  Suspend:     {'yes' if spec.suspend else 'no'}",
        f"  Checkpoint:  {spec.checkpoint.uri}, {every}",
        f"  Snapshot:    every {snapshot.every_steps} steps, {snapshot.slots} slots",
        f"  On loss:     {spec.elasticity.on_loss.value}",
        f"  Grows:       {spec.elasticity.scale_up.mode.value}",
    ]
    for container in spec.template.spec.containers:
        command = " ".join([*container.command, *container.args])
        lines.append(f"  Container:   {container.name}: {command}")
    return lines


def _conditions(record: JobRecord, now_s: float) -> list[str]:
    rows = [
        [
            one.type,
            one.status,
            one.reason,
            f"{age(now_s - one.last_transition_at_s)} ago",
            one.message,
        ]
        for one in record.status.conditions
    ]
    return _table("Conditions", ["Type", "Status", "Reason", "Since", "Message"], rows)


def _slices(record: JobRecord, now_s: float) -> list[str]:
    rows = [
        [
            str(one.id),
            "-" if one.rank is None else str(one.rank),
            one.state,
            f"{one.ready_hosts}/{record.spec.slices.hosts_per_slice}",
            str(one.restarts),
            str(one.disruptions),
            "-" if one.deadline_s is None else f"in {age(one.deadline_s - now_s)}",
            one.reason or "-",
        ]
        for one in record.status.slice_statuses
    ]
    head = ["Slice", "Rank", "State", "Ready", "Restarts", "Disruptions", "Deadline", "Reason"]
    return _table("Slices", head, rows)


def _recoveries(record: JobRecord, now_s: float) -> list[str]:
    head = [
        *("Incarnation", "Cause", "Slices", "Step", "Lost", "Source", "Own", "Peers", "Storage"),
        *("Detect", "Drain", "Join", "Restore", "First step", "Total", "When"),
    ]
    return _table("Recoveries", head, [_recovery(r, now_s) for r in record.status.recoveries])


def _recovery(one: Recovery, now_s: float) -> list[str]:
    where = "" if one.slice is None else f" ({one.slice})"
    return [
        str(one.incarnation),
        f"{one.cause}{where}",
        f"{one.from_slices}→{one.to_slices}",
        _step(one.step_restored),
        _step(one.lost_steps),
        one.source or "-",
        size(one.own_bytes),
        size(one.peer_bytes),
        size(one.storage_bytes),
        seconds(one.detect_s),
        seconds(one.drain_s),
        seconds(one.join_s),
        seconds(one.restore_s),
        seconds(one.first_step_s),
        seconds(one.total_s),
        f"{age(now_s - one.at_s)} ago",
    ]


def _events(events: Sequence[EventRecord], now_s: float) -> list[str]:
    rows = [
        [
            one.severity,
            one.reason,
            f"{age(now_s - one.at_s)} ago",
            "-" if one.slice is None else str(one.slice),
            one.message,
        ]
        for one in events[-EVENT_COUNT_MAX:]
    ]
    return _table("Events", ["Type", "Reason", "Age", "Slice", "Message"], rows)


def _table(title: str, head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return [f"{title}:  <none>"]
    shown = [head, ["-" * len(word) for word in head], *rows]
    widths = [max(len(row[i]) for row in shown) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]
    return [f"{title}:", *(f"  {line}" for line in lines)]


def _step(value: int | None) -> str:
    return "-" if value is None else str(value)
