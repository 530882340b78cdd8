"""A real job on this machine, for benchmarks: started, disturbed, watched, ended.

Disturbances go straight to the functions behind the verbs, or to the process itself, so that no
interpreter start is in a figure.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.status import JobStatus, Phase
from everstep.controller.api.wire import Report
from everstep.controller.cli.demo.run import Run
from everstep.controller.core.model import NoticeClass
from everstep.controller.local import capacity
from everstep.controller.local.folder import StateFolder
from everstep.controller.ops.clock import SystemClock
from everstep.runtime.agent.link import SPARE_NAME, WORKER_NAME

POLL_S = 0.002
SETTLE_TIMEOUT_S = 120.0
SPARES_TIMEOUT_S = 2.0
NAME = "bench"
COORDINATOR = "everstep.runtime.agent.coordinator"


class Unmeasured(Exception):
    """The job did not get where the figure needs it."""


@dataclass(slots=True)
class SliceJob:
    """One running job of the tiny program."""

    run: Run
    slice_count: int

    @property
    def _state(self) -> StateFolder:
        return StateFolder(self.run.folder / "local")

    def status(self) -> JobStatus:
        return self.run.status()

    def reports(self) -> list[Report]:
        """What the agents last reported."""
        found = sorted((self.run.job_folder / "reports").glob("*.json"))
        return [msgspec.json.decode(path.read_bytes(), type=Report) for path in found]

    def agent(self, slice_id: int) -> psutil.Process:
        """The agent of a slice's only host."""
        path = self.run.job_folder / "hosts" / f"{slice_id}-0.json"
        return psutil.Process(msgspec.json.decode(path.read_bytes())["pid"])

    def program(self, slice_id: int) -> list[psutil.Process]:
        """The zygote and its worker, or the fresh worker alone; the worker is last."""
        children = self.agent(slice_id).children(recursive=True)
        return [
            process
            for process in children
            if COORDINATOR not in " ".join(process.cmdline()) and process.name() != SPARE_NAME
        ]

    def spare(self, slice_id: int) -> psutil.Process | None:
        """The worker that waits to be the next."""
        try:
            children = self.agent(slice_id).children(recursive=True)
            return next((process for process in children if process.name() == SPARE_NAME), None)
        except (psutil.NoSuchProcess, FileNotFoundError):
            return None  # The slice is away.

    def wait_spares(self, slices: int) -> None:
        """Until so many slices have a spare that sleeps, or a while: a fresh worker has none."""
        deadline_s = time.monotonic() + SPARES_TIMEOUT_S
        while time.monotonic() < deadline_s:
            found = [self.spare(slice_id) for slice_id in range(self.slice_count)]
            if sum(s is not None and s.status() == psutil.STATUS_SLEEPING for s in found) >= slices:
                return
            time.sleep(0.05)

    def coordinators(self) -> list[psutil.Process]:
        """Processes that hold, or wait to hold, a coordination service."""
        found: list[psutil.Process] = []
        for slice_id in range(self.slice_count):
            children = self.agent(slice_id).children(recursive=True)
            found += [p for p in children if COORDINATOR in " ".join(p.cmdline())]
        return found

    def kill_worker(self, slice_id: int) -> float:
        """SIGKILL a worker; returns when, in Unix seconds."""
        below = self.program(slice_id)
        worker = next((p for p in below if p.name() == WORKER_NAME), below[-1])
        at_s = time.time()
        os.kill(worker.pid, signal.SIGKILL)
        return at_s

    def kill_slice(self, slice_id: int) -> float:
        """SIGKILL all of a slice, which is gone until `give_back`."""
        at_s = time.time()
        capacity.take_away(self._state, NAME, SliceId(slice_id), clock=SystemClock())
        return at_s

    def give_notice(self, slice_id: int, notice_s: float) -> float:
        at_s = time.time()
        capacity.give_notice(
            self._state,
            NAME,
            SliceId(slice_id),
            notice_s=notice_s,
            notice_class=NoticeClass.IMMINENT,
            now_s=at_s,
        )
        return at_s

    def give_back(self, slice_id: int) -> None:
        capacity.give_back(self._state, NAME, SliceId(slice_id), now_s=time.time())

    def wait(self, what: str, condition: Callable[[JobStatus], bool]) -> JobStatus:
        """Look until the condition holds.

        Raises:
            Unmeasured: it does not within two minutes, or the job ended.
        """
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            status = self.status()
            if condition(status):
                return status
            if status.phase in (Phase.FAILED, Phase.SUCCEEDED) or time.monotonic() > deadline_s:
                raise Unmeasured(f"{what}: {status.phase.value}: {status.message}")
            time.sleep(POLL_S)

    def wait_trained(self, incarnation: int, slices: int, steps: int = 12) -> JobStatus:
        """Until this incarnation or a newer one trains on so many slices and is some steps in."""

        def trained(status: JobStatus) -> bool:
            newest = self.run.read_metrics()
            last = status.recoveries[-1] if status.recoveries else None
            # The first start is no recovery, and begins at step 0.
            is_over = last is None or last.first_step_s is not None
            restored = 0 if last is None else last.step_restored or 0
            return (
                status.phase is Phase.RUNNING
                and status.incarnation >= incarnation
                and status.slices is not None
                and status.slices.granted == slices
                and newest is not None
                and newest.incarnation == status.incarnation
                and is_over
                and newest.step >= restored + steps
            )

        return self.wait(f"training on {slices} slices", trained)

    def first_step_at_s(self, incarnation: int) -> float:
        """When the slowest host had finished the first step of an incarnation, Unix seconds."""
        moments = [
            report.restore.first_step_at_s
            for report in self.reports()
            if report.restore is not None and report.restore.incarnation == incarnation
        ]
        known = [at_s for at_s in moments if at_s is not None]
        if not known:
            raise Unmeasured(f"no report of a first step in incarnation {incarnation}")
        return max(known)

    def held_at_s(self, request_id_before: str | None) -> float | None:
        """When the lead said that a newer request is complete, Unix seconds."""
        for report in self.reports():
            held = report.held
            if held is not None and held.complete and held.request_id != request_id_before:
                return report.renewed_at_s
        return None

    def lead(self) -> HostId | None:
        coordinator = self.status().coordinator
        return coordinator.lead if coordinator is not None else None


@contextmanager
def running_job(
    environment: dict[str, str], *, slice_count: int = 3, devices: int = 1, snapshot_every: int = 5
) -> Generator[SliceJob]:
    """Start a job of the tiny program, wait until it trains, and end it afterwards.

    Args:
        environment: settings of the program (`everstep.runtime.examples.tiny`).
        devices: per host.
        snapshot_every: steps between snapshots.
    """
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        run = Run(NAME, folder, lambda _: None)
        manifest = folder / "job.yaml"
        manifest.write_text(
            yaml.safe_dump(_manifest(folder, environment, slice_count, devices, snapshot_every))
        )
        job = SliceJob(run, slice_count)
        try:
            run.verb("apply", "-f", str(manifest))
            job.wait_trained(1, slice_count)
            yield job
        finally:
            run.verb("stop", "--all")


def _manifest(
    folder: Path, environment: dict[str, str], slice_count: int, devices: int, snapshot_every: int
) -> dict[str, Any]:
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "STEPS": "1000000",
    } | environment
    container = {
        "name": "trainer",
        "command": [sys.executable, "-m", "everstep.runtime.examples.tiny"],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    return {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "MultiSliceJob",
        "metadata": {"name": NAME},
        "spec": {
            "slices": {"desired": slice_count, "min": 1, "max": slice_count},
            "template": {"spec": {"containers": [container]}},
            "checkpoint": {
                "uri": (folder / "checkpoints").as_uri(),
                "everySteps": 1_000_000,
                "emergency": {"budgetSeconds": 5, "safetyMarginSeconds": 1},
                "snapshot": {"everySteps": snapshot_every},
            },
            "elasticity": {
                "onLoss": "ShrinkImmediately",
                "scaleUp": {
                    "minUptimeSeconds": 0,
                    "cooldownSeconds": 0,
                    "stabilizationSeconds": 0,
                },
            },
            # A benchmark kills workers as fast as it can; none of that is to be waited for.
            "restart": {
                "maxRestarts": 10_000,
                "maxDisruptionsPerHour": 10_000,
                "backoff": {"initialSeconds": 0.001, "maxSeconds": 0.001},
            },
        },
    }
