"""One job in a state folder of its own, and the verbs that the demo types at it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.controller.api.status import JobStatus
from everstep.controller.local.errors import NotFound
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.store import Store


class StageError(Exception):
    """A verb failed or a wait ran out; the message says which, and what was seen last."""


class MetricsLine(msgspec.Struct, frozen=True):
    step: int
    incarnation: int
    at_s: float
    values: dict[str, float | None]
    """None where the number was not finite: JSON has no word for it."""


@dataclass(slots=True)
class Run:
    """Reads what a job has written and types verbs at it.

    Reading costs no process: `status` and `losses` look at the files that the controller and the
    agents replace as a whole.
    """

    name: str
    folder: Path
    echo: Callable[[str], None]
    lines: dict[int, MetricsLine] = field(default_factory=dict[int, MetricsLine])
    conflicts: list[int] = field(default_factory=list[int])
    """Steps whose replay gave other values than the first time."""
    _offset: int = 0

    @property
    def job_folder(self) -> Path:
        return self.folder / "local" / "jobs" / self.name

    @property
    def log(self) -> Path:
        return self.folder / "verbs.log"

    def verb(self, *words: str, quiet: bool = False) -> None:
        """Type one `everstep local` command and wait for it.

        Raises:
            StageError: it failed; its own words are in the message.
        """
        if not quiet:
            self.echo("$ everstep local " + " ".join(words))
        environment = os.environ | {"EVERSTEP_LOCAL_DIR": str(self.folder / "local")}
        done = subprocess.run(
            [sys.executable, "-m", "everstep.controller.cli.main", "local", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        with self.log.open("a") as log:
            log.write(f"$ everstep local {' '.join(words)}\n{done.stdout}{done.stderr}")
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise StageError(f"everstep local {' '.join(words)}: exit {done.returncode}: {said}")

    def status(self) -> JobStatus:
        """The job's status as last shown; an empty one before the first pass."""
        try:
            return Store(StateFolder(self.folder / "local")).read(self.name).status
        except NotFound:
            return JobStatus()

    def read_metrics(self) -> MetricsLine | None:
        """Take in the metrics written since the last call; the newest line, or None at first."""
        path = self.job_folder / "metrics.jsonl"
        try:
            with path.open("rb") as source:
                source.seek(self._offset)
                block = source.read()
        except FileNotFoundError:
            return None
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        for raw in whole.splitlines():
            line = msgspec.json.decode(raw, type=MetricsLine)
            first = self.lines.get(line.step)
            if first is not None and first.values != line.values:
                self.conflicts.append(line.step)
            self.lines[line.step] = line
        return self.lines[max(self.lines)] if self.lines else None

    def losses(self) -> dict[int, float]:
        self.read_metrics()
        found = {step: line.values["loss"] for step, line in sorted(self.lines.items())}
        return {step: math.nan if loss is None else loss for step, loss in found.items()}
