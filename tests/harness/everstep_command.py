"""`everstep local` as people type it, with a controller that is a process of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml
from typer.testing import CliRunner, Result

from everstep.controller.cli.main import app
from everstep.controller.local import identity
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.guard import controller_pid
from everstep.controller.local.records import JobRecord
from everstep.controller.local.store import Store
from jobs import job_document
from local_rig import OBEDIENT
from waiting import wait_for


class Everstep:
    """Types commands, and looks at the state folder with eyes of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = StateFolder(root / "state")
        self.environment = {
            **os.environ,
            "EVERSTEP_LOCAL_DIR": str(self.folder.root),
            "EVERSTEP_LOCAL_AGENT": shlex.join(OBEDIENT),
            "COLUMNS": "200",
        }

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "everstep.controller.cli.main", "local", *words]

    def run(
        self, *words: str, stdin: str | None = None, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            env=self.environment,
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=self.root,
            check=False,
        )

    def ok(self, *words: str) -> str:
        """Run a command that must succeed, in this process; return what it printed."""
        done = self.invoke(*words)
        assert done.exit_code == 0, f"{words}: {done.stdout}{done.stderr}{done.exception!r}"
        return done.stdout

    def refused(self, *words: str, code: int = 1) -> str:
        """Run a command that must fail, in this process; return what it said."""
        done = self.invoke(*words)
        assert isinstance(done.exception, SystemExit), f"{words}: {done.exception!r}"
        assert done.exit_code == code, f"{words}: {done.exit_code} {done.stdout}{done.stderr}"
        return done.stderr

    def invoke(self, *words: str) -> Result:
        return CliRunner().invoke(app, ["local", *words], env=self.environment)

    @contextmanager
    def start(self, *words: str) -> Generator[subprocess.Popen[str]]:
        """Start a command that goes on, in a process group of its own, as a shell does.

        It is ended with the block: a test that failed does not wait for it.
        """
        with subprocess.Popen(
            self.command(*words),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.root,
            process_group=0,
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def job_file(self, name: str = "llm", **options: Any) -> str:
        words = ("true", *options.pop("words", ("steps=1000000",)))
        document = job_document(name, folder=self.root, words=words, **options)
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        return str(path)

    def record(self, name: str = "llm") -> JobRecord:
        return Store(self.folder).read(name)

    def wait_for_phase(self, phase: str, name: str = "llm") -> JobRecord:
        def reached() -> JobRecord | None:
            record = self.record(name)
            return record if record.status.phase.value == phase else None

        return wait_for(reached, what=f"{name} to be {phase}", timeout_s=60)

    def wait_for_members(self, *members: int, name: str = "llm") -> JobRecord:
        """Wait until the job trains on exactly these slices."""

        def reached() -> JobRecord | None:
            record = self.record(name)
            now = tuple(s.id for s in record.status.slice_statuses if s.rank is not None)
            is_training = record.status.phase.value == "Running"
            return record if is_training and now == members else None

        return wait_for(reached, what=f"{name} to train on {members}", timeout_s=60)

    def agents(self) -> list[int]:
        """Every process that was started from this folder by an agent's start."""
        return [
            who.pid
            for who, mark in identity.find_marked("")
            if mark.split(":", 3)[3] == str(self.folder.root)
        ]

    def controller(self) -> int | None:
        return controller_pid(self.folder)

    def object(self, name: str = "llm") -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.ok("get", name, "-o", "json"))
        return found

    def close(self) -> None:
        """End everything, whatever state the test left."""
        controller = self.controller()
        # One that ends by itself in this moment is what is wanted.
        if controller is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(controller, signal.SIGKILL)
        for agent in self.agents():
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
        for path in self.folder.jobs.glob("*/capacity/*.json"):
            # A reclaimer finds that its notice does not stand, and ends.
            path.unlink(missing_ok=True)
