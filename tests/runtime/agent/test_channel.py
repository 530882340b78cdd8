"""The channel by files, and the conformance that every channel keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import structlog
from structlog.testing import CapturingLogger
from structlog.typing import FilteringBoundLogger

from agent_values import directive, host
from everstep.controller.api import codec
from everstep.controller.api.ids import Incarnation, Step
from everstep.controller.api.wire import Directive, HostPhase, Report
from everstep.runtime.agent.channel import LocalChannel, MetricsLine, open_channel
from everstep.runtime.errors import ConfigurationError


def write(folder: Path, data: bytes) -> None:
    temporary = folder / "directive.tmp"
    temporary.write_bytes(data)
    temporary.replace(folder / "directive.json")


def logger_of(log: CapturingLogger) -> FilteringBoundLogger:
    wrapper = structlog.make_filtering_bound_logger(0)
    bound: FilteringBoundLogger = structlog.wrap_logger(log, processors=[], wrapper_class=wrapper)
    return bound


def channel_in(folder: Path) -> tuple[LocalChannel, CapturingLogger]:
    log = CapturingLogger()
    return LocalChannel(folder, host(0), logger_of(log)), log


async def next_of(directives: AsyncIterator[Directive], timeout_s: float = 5.0) -> Directive:
    async with asyncio.timeout(timeout_s):
        return await anext(directives)


def test_a_directive_is_seen_when_it_is_written_and_only_newer_ones(tmp_path: Path) -> None:
    channel, _ = channel_in(tmp_path)

    async def scenario() -> list[int]:
        directives = channel.directives()
        seen: list[int] = []
        write(tmp_path, codec.encode(directive(1, [0], sequence=5)))
        seen.append((await next_of(directives)).sequence)
        waiting = asyncio.create_task(next_of(directives))
        for sequence in (4, 6):
            await asyncio.sleep(0)
            write(tmp_path, codec.encode(directive(1, [0], sequence=sequence)))
        seen.append((await waiting).sequence)
        return seen

    assert asyncio.run(scenario()) == [5, 6]


def test_garbage_is_refused_once_and_the_next_good_one_is_taken(tmp_path: Path) -> None:
    channel, log = channel_in(tmp_path)
    write(tmp_path, b"{garbage")
    assert log.calls == []

    async def scenario() -> Directive:
        reading = asyncio.create_task(next_of(channel.directives()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # The same garbage again is no news.
        write(tmp_path, b"{garbage")
        await asyncio.sleep(0)
        write(tmp_path, codec.encode(directive(1, [0], sequence=7)))
        return await reading

    assert asyncio.run(scenario()).sequence == 7
    assert [call.method_name for call in log.calls] == ["error"]


def test_a_report_replaces_the_last_one_as_a_whole(tmp_path: Path) -> None:
    channel, _ = channel_in(tmp_path)
    for sequence in (1, 2):
        channel.publish(
            Report(
                job_uid="uid-1",
                host=host(0),
                address="10.0.0.0",
                port=7070,
                pid=1,
                sequence=sequence,
                renewed_at_s=1.0,
                directive_seen=0,
                incarnation=Incarnation(0),
                phase=HostPhase.WAITING,
                phase_since_s=0.0,
                step=Step(0),
            )
        )
    names = [path.name for path in (tmp_path / "reports").iterdir()]
    assert names == ["0-0.json"]
    assert codec.decode_report((tmp_path / "reports/0-0.json").read_bytes()).sequence == 2


def test_metrics_are_lines_in_order_with_exact_floats(tmp_path: Path) -> None:
    channel, _ = channel_in(tmp_path)
    values = [0.1, 1 / 3, 1e-300]
    for step, value in enumerate(values, 1):
        line = MetricsLine(
            step=Step(step), incarnation=Incarnation(1), at_s=1.0, values={"loss": value}
        )
        channel.record(line)
    channel.close()
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    found = [msgspec.json.decode(line, type=MetricsLine).values["loss"] for line in lines]
    assert found == values


def test_a_folder_that_vanished_ends_no_training(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    channel, log = channel_in(folder)
    (folder / "reports").rmdir()
    line = MetricsLine(step=Step(1), incarnation=Incarnation(1), at_s=1.0, values={})
    folder.rmdir()
    channel.record(line)
    assert [call.method_name for call in log.calls] == ["warning"]


@pytest.mark.parametrize("uri", ["", "kube:x", "local:relative", "local:/no/such/folder"])
def test_a_channel_that_cannot_be_is_refused_by_name(uri: str) -> None:
    with pytest.raises(ConfigurationError, match="--channel"):
        open_channel(uri, host(0), logger_of(CapturingLogger()))
