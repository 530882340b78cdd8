"""Reports as agents would write them, for tests whose agents do nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from everstep.controller.api.ids import Incarnation, Step
from everstep.controller.api.wire import HostPhase, Report
from everstep.controller.local.files import write_soft
from everstep.controller.local.folder import JobFolder
from everstep.controller.local.records import HostRecord


def write_report(
    folder: JobFolder,
    record: HostRecord,
    *,
    now_s: float,
    incarnation: int = 1,
    phase: HostPhase = HostPhase.RUNNING,
    step: int = 10,
    directive_seen: int = 1,
    **fields: Any,
) -> Report:
    """Write the report of exactly this agent process."""
    report = Report(
        job_uid=record.job_uid,
        host=record.host,
        address=record.address,
        port=record.port,
        pid=record.pid,
        sequence=1,
        renewed_at_s=now_s,
        directive_seen=directive_seen,
        incarnation=Incarnation(incarnation),
        phase=phase,
        phase_since_s=now_s,
        step=Step(step),
        step_snapshot=Step(step),
        **fields,
    )
    write_soft(folder.report(record.host), msgspec.json.encode(report))
    return report
