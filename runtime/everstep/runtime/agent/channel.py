"""How an agent hears its controller and is heard: the `Channel` seam, and its files on one machine.

The controller may be absent at any time, for ever; no method here waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import msgspec
from asyncinotify import Inotify, Mask
from structlog.typing import FilteringBoundLogger

from everstep.controller.api import codec
from everstep.controller.api.errors import WireError
from everstep.controller.api.ids import HostId, Incarnation, Step
from everstep.controller.api.wire import Directive, Report
from everstep.runtime.errors import ConfigurationError

BACKSTOP_S = 1.0
"""How often the directive is looked at without having been told that it changed."""


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True):
    """One finished step, as rank 0 saw it. A step that is run again appears again."""

    step: Step
    incarnation: Incarnation
    at_s: float
    values: dict[str, float]


class Channel(Protocol):
    """The agent's side of the seam to the controller."""

    def directives(self) -> AsyncIterator[Directive]:
        """Every directive newer than the one before, newest first to come; ends never.

        What cannot be read is refused, said once, and the last good one stays in force.
        """
        ...

    def publish(self, report: Report) -> None:
        """Replace this host's report.

        Durability: none is promised; a report is renewed every report interval.
        """
        ...

    def record(self, line: MetricsLine) -> None:
        """Append the metrics of one finished step."""
        ...

    def close(self) -> None: ...


class LocalChannel:
    """Two files in a job's folder: the directive, replaced by rename, and this host's report."""

    def __init__(self, folder: Path, host: HostId, log: FilteringBoundLogger) -> None:
        self._folder = folder
        self._directive_path = folder / "directive.json"
        self._report_path = folder / "reports" / f"{host.slice}-{host.host}.json"
        self._report_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._newest_sequence = -1
        self._refused: bytes | None = None
        self._metrics_fd: int | None = None

    async def directives(self) -> AsyncIterator[Directive]:
        with Inotify() as inotify:
            inotify.add_watch(self._folder, Mask.MOVED_TO | Mask.CLOSE_WRITE | Mask.ONLYDIR)
            while True:
                directive = self._read()
                if directive is not None:
                    yield directive
                    continue
                await self._wait_for_change(inotify)

    async def _wait_for_change(self, inotify: Inotify) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BACKSTOP_S):
                while True:
                    event = await inotify.get()
                    if event.name is not None and event.name.name == self._directive_path.name:
                        return

    def _read(self) -> Directive | None:
        """The directive, when it is newer than the last one; None otherwise."""
        try:
            raw = self._directive_path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._refuse(str(error).encode(), str(error))
            return None
        try:
            directive = codec.decode_directive(raw)
        except WireError as error:
            self._refuse(raw, str(error))
            return None
        if directive.sequence <= self._newest_sequence:
            return None
        self._newest_sequence = directive.sequence
        self._refused = None
        return directive

    def _refuse(self, raw: bytes, why: str) -> None:
        if raw != self._refused:
            self._refused = raw
            self._log.error("directive refused", path=str(self._directive_path), why=why)

    def publish(self, report: Report) -> None:
        # A temporary name of its own for each process: an old agent that is still dying must not
        # write into the file that its successor is about to rename.
        temporary = self._report_path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_bytes(codec.encode(report))
            temporary.replace(self._report_path)
        except OSError as error:
            # The folder may be gone because the job was deleted, or the disk may be full. Both
            # must not end a training.
            self._log.warning("report not written", path=str(self._report_path), why=str(error))

    def record(self, line: MetricsLine) -> None:
        try:
            if self._metrics_fd is None:
                self._metrics_fd = os.open(
                    self._folder / "metrics.jsonl",
                    os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC,
                    0o644,
                )
            # One write of a whole line: two agents that believe to be rank 0 do not interleave.
            os.write(self._metrics_fd, codec.encode(line) + b"\n")
        except OSError as error:
            self._log.warning("metrics not written", step=line.step, why=str(error))

    def close(self) -> None:
        if self._metrics_fd is not None:
            os.close(self._metrics_fd)
            self._metrics_fd = None


def open_channel(uri: str, host: HostId, log: FilteringBoundLogger) -> Channel:
    """Open the channel that a command line names.

    Args:
        uri: `local:<absolute path of the job's folder>`.
        host: whose report this is.
        log: where refusals are said.

    Raises:
        ConfigurationError: no such kind of channel, or the folder does not exist.
    """
    kind, _, rest = uri.partition(":")
    if kind != "local":
        raise ConfigurationError("--channel", uri, "local:<folder of the job>")
    folder = Path(rest)
    if not folder.is_absolute() or not folder.is_dir():
        raise ConfigurationError("--channel", uri, "the absolute path of an existing folder")
    return LocalChannel(folder, host, log)
