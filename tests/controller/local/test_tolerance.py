"""Files that others write may be anything; what was good stays in force, and it is said once."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.controller.api.ids import Incarnation, SliceId
from everstep.controller.api.wire import Report
from everstep.controller.core.model import HostView, StartSlice
from everstep.controller.local.errors import RecordCorrupt
from everstep.controller.local.observe import Tolerance
from everstep.controller.local.records import HostRecord
from everstep.controller.ops.clock import SystemClock
from local_rig import LocalRig
from reports import write_report

pytestmark = pytest.mark.processes


@pytest.fixture
def record(rig: LocalRig) -> HostRecord:
    rig.world.perform("llm", StartSlice(slice=SliceId(0), incarnation=Incarnation(1)))
    return next(one for one in rig.world.living("llm") if one.host.host == 0)


def _host(rig: LocalRig) -> HostView:
    seen = rig.world.observe("llm")
    assert seen is not None
    return seen.view.slices[0].hosts[0]


def _write(rig: LocalRig, record: HostRecord, **fields: object) -> Report:
    now_s = rig.clock.unix_s()
    return write_report(rig.folder.job("llm"), record, now_s=now_s, **fields)  # type: ignore[arg-type]


def test_the_newest_report_of_the_agent_is_seen(rig: LocalRig, record: HostRecord) -> None:
    assert _host(rig).report is None
    _write(rig, record, step=10)
    report = _write(rig, record, step=11)
    assert _host(rig).report == report


def test_a_report_of_an_earlier_process_is_not_shown(rig: LocalRig, record: HostRecord) -> None:
    other = msgspec.structs.replace(record, pid=record.pid + 1)
    _write(rig, other)
    assert _host(rig).report is None


def test_a_report_of_an_earlier_job_of_this_name_is_not_shown(
    rig: LocalRig, record: HostRecord
) -> None:
    other = msgspec.structs.replace(record, job_uid="uid of the earlier job")
    _write(rig, other)
    assert _host(rig).report is None


def test_a_report_from_before_the_process_began_is_not_shown(
    rig: LocalRig, record: HostRecord
) -> None:
    write_report(rig.folder.job("llm"), record, now_s=record.started_at - 60.0)
    assert _host(rig).report is None


def test_a_garbage_report_leaves_the_last_good_one_in_force(
    rig: LocalRig, record: HostRecord
) -> None:
    good = _write(rig, record, step=10)
    assert _host(rig).report == good
    path = rig.folder.job("llm").report(record.host)
    for garbage in (b"", b"{", b'{"step": "ten"}', b"\x00" * 100):
        path.write_bytes(garbage)
        assert _host(rig).report == good
    better = _write(rig, record, step=12)
    assert _host(rig).report == better


def test_a_garbage_directive_is_as_good_as_none_for_a_controller_that_starts(
    rig: LocalRig, record: HostRecord
) -> None:
    rig.folder.job("llm").directive.write_bytes(b"{ garbage")
    rig.restart()
    seen = rig.world.observe("llm")
    assert seen is not None
    assert seen.view.directive is None
    assert seen.view.slices[0].hosts[0].started_for == record.started_for


def test_garbage_is_said_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("garbage")
    said: list[str] = []
    tolerance = Tolerance(say=lambda error: said.append(error.why), clock=SystemClock())
    content = ["first"]

    def read() -> Report:
        raise RecordCorrupt(path, content[0])

    for why in ("first", "first", "second", "second"):
        content[0] = why
        assert tolerance.load(path, read) is None
    assert said == ["first", "second"]


def test_a_file_that_is_replaced_is_read_again_however_fast_that_goes(
    rig: LocalRig, record: HostRecord
) -> None:
    for step in range(100, 300):
        # The same size each time, and often the same inode within one tick of the clock.
        _write(rig, record, step=step)
        report = _host(rig).report
        assert report is not None
        assert report.step == step
