"""`get`: jobs as table, JSON, YAML or names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from everstep.controller.api.spec import API_VERSION, KIND
from everstep.controller.cli.words import age, timestamp
from everstep.controller.local.records import JobRecord

OUTPUTS = ("", "wide", "json", "yaml", "name")
COLUMNS = (
    "NAME",
    "PHASE",
    "DESIRED",
    "GRANTED",
    "READY",
    "INCARNATION",
    "STEP",
    "LASTCHECKPOINT",
    "RESTARTS",
    "AGE",
)
WIDE_COLUMNS = ("REASON", "COORDINATOR", "DEADLINE", "LOSS", "MESSAGE")


class Printer:
    """Prints jobs in one format; remembers what it printed, for `-w`."""

    def __init__(self, output: str, *, is_list: bool) -> None:
        self._output = output
        self._is_list = is_list
        self._versions: dict[str, str] = {}
        self._widths: list[int] = []

    def show(self, records: Sequence[JobRecord], now_s: float) -> None:
        self._remember(records)
        if self._output == "json":
            print(_json(self._document(records)))
        elif self._output == "yaml":
            print(_yaml(self._document(records)), end="")
        elif self._output == "name":
            for record in records:
                print(f"multislicejob.everstep.dev/{record.metadata.name}")
        elif records:
            self._table(records, now_s, with_head=True)

    def show_changed(self, records: Sequence[JobRecord], now_s: float) -> None:
        """Print the jobs that changed since they were printed last."""
        changed = [
            record
            for record in records
            if self._versions.get(record.metadata.name) != record.precondition
        ]
        if not changed:
            return
        is_first = not self._versions
        self._remember(changed)
        if self._output in ("", "wide"):
            self._table(changed, now_s, with_head=is_first)
            return
        for record in changed:
            Printer(self._output, is_list=False).show([record], now_s)

    def _remember(self, records: Sequence[JobRecord]) -> None:
        for record in records:
            self._versions[record.metadata.name] = record.precondition

    def _document(self, records: Sequence[JobRecord]) -> dict[str, Any]:
        objects = [as_object(record) for record in records]
        if not self._is_list:
            return objects[0]
        return {
            "apiVersion": "v1",
            "kind": "List",
            "metadata": {"resourceVersion": ""},
            "items": objects,
        }

    def _table(self, records: Sequence[JobRecord], now_s: float, *, with_head: bool) -> None:
        is_wide = self._output == "wide"
        head = (*COLUMNS, *WIDE_COLUMNS) if is_wide else COLUMNS
        rows = [_row(record, now_s, is_wide=is_wide) for record in records]
        shown = [list(head), *rows] if with_head else rows
        self._widths = [
            max([len(row[i]) for row in shown] + self._widths[i : i + 1]) for i in range(len(head))
        ]
        for row in shown:
            cells = [cell.ljust(width) for cell, width in zip(row, self._widths, strict=True)]
            print("   ".join(cells).rstrip(), flush=True)


def as_object(record: JobRecord) -> dict[str, Any]:
    """Return a job as the Kubernetes object that it would be."""
    found = record.metadata
    metadata: dict[str, Any] = {
        "name": found.name,
        "namespace": found.namespace,
        "uid": found.uid,
        "generation": found.generation,
        "resourceVersion": str(found.resource_version),
        "creationTimestamp": timestamp(found.created_at),
    }
    if found.deleted_at is not None:
        metadata["deletionTimestamp"] = timestamp(found.deleted_at)
    if found.labels:
        metadata["labels"] = found.labels
    if found.annotations:
        metadata["annotations"] = found.annotations
    status = msgspec.to_builtins(record.status)
    status["ledger"] = msgspec.to_builtins(record.ledger)
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": _without_nothing(msgspec.to_builtins(record.spec)),
        "status": _without_nothing(status),
    }


def ready_reason(record: JobRecord) -> str:
    """Return why the job is ready or not."""
    for condition in record.status.conditions:
        if condition.type == "Ready":
            return condition.reason
    return ""


def _row(record: JobRecord, now_s: float, *, is_wide: bool) -> list[str]:
    status, spec = record.status, record.spec
    counts = status.slices
    committed = status.checkpoint.last_committed
    is_deleting = record.metadata.deleted_at is not None
    row = [
        record.metadata.name,
        "Terminating" if is_deleting else status.phase.value,
        str(spec.slices.desired),
        str(counts.granted if counts else 0),
        str(counts.ready if counts else 0),
        str(status.incarnation),
        str(status.step),
        "<none>" if committed is None else str(committed.step),
        str(status.restarts.failures),
        age(now_s - record.metadata.created_at),
    ]
    if is_wide:
        deadlines = [s.deadline_s for s in status.slice_statuses if s.deadline_s is not None]
        row += [
            ready_reason(record) or "<none>",
            "<none>" if status.coordinator is None else status.coordinator.address,
            "<none>" if not deadlines else age(min(deadlines) - now_s),
            "<none>" if status.loss is None else f"{status.loss:.4f}",
            status.message or "<none>",
        ]
    return row


def _without_nothing(value: Any) -> Any:
    """Leave out what is not set, as an API server does."""
    if isinstance(value, dict):
        return {key: _without_nothing(one) for key, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_without_nothing(one) for one in value]
    return value


def _json(document: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=4).decode()


def _yaml(document: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    return text
