"""The processes of one side of the comparison, and what they are asked."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any, Self

from benchmarks.checkpoint_cases import MIB, Case
from benchmarks.checkpoint_sides import leaf_shape

ROOT = Path(__file__).parents[1]
TORCH = ROOT / ".everstep/bench/torch"
"""An environment with torch, where there is one: `python -m venv` it, `pip install torch`."""
TIMEOUT_S = 600.0


def names(case: Case) -> tuple[str, ...]:
    """The sides that take part in a case."""
    bare = ("bare",) if case.size_bytes >= MIB else ()
    torch = ("torch",) if torch_python() is not None and case.size_bytes >= MIB else ()
    return ("everstep", *bare, "orbax", "orbax_best", *torch)


def torch_python() -> str | None:
    python = TORCH / "bin/python"
    return str(python) if python.exists() else None


class SideProcesses:
    """The processes of one side."""

    def __init__(
        self, name: str, case: Case, seed: int, folder: str, *, is_reader: bool = False
    ) -> None:
        """Prepare; they are started where this is entered.

        Args:
            name: of the side.
            case: of which they hold the state.
            seed: of the state.
            folder: where they save.
            is_reader: they hold nothing, and restore what others saved.
        """
        self.name, self.folder = name, folder
        self._base, self._turn = folder, 0
        self._case = case
        width = 2 if case.dtype == "bf16" else 4
        self._described = {
            "module": "benchmarks.checkpoint_torch"
            if name == "torch"
            else "benchmarks.checkpoint_sides",
            "side": name,
            "bytes": case.size_bytes,
            "leaves": case.leaves,
            "shape": leaf_shape(case.size_bytes, case.leaves, width),
            "dtype": case.dtype,
            "processes": case.processes,
            "port": _free_port(),
            "seed": seed,
            "is_reader": is_reader,
        }
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        python = (torch_python() if self.name == "torch" else None) or sys.executable
        for process in range(self._case.processes):
            described = json.dumps({**self._described, "process": process})
            self._processes.append(
                subprocess.Popen(
                    [python, "-m", "benchmarks.checkpoint_child", described],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log(process),
                    text=True,
                    cwd=ROOT,
                )
            )
        try:
            self._answers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def next_folder(self) -> str:
        """Another folder for the next save; Everstep keeps one run. Returns the one before."""
        before = self.folder
        if self.name != "everstep":
            self._turn += 1
            self.folder = f"{self._base}.{self._turn}"
        return before

    def ask(self, what: str, **details: str) -> dict[str, Any]:
        """Let all processes do something. The slowest counts, and all that they read."""
        request = json.dumps({"do": what, "folder": self.folder, **details}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
        answers = self._answers()
        together = {"read_bytes": sum, "is_same": all}
        return {
            field: together.get(field, max)(answer[field] for answer in answers)  # type: ignore[operator]
            for field in answers[0]
        }

    def verify(self) -> None:
        if not self.ask("verify")["is_same"]:
            raise RuntimeError(f"{self.name} restored something else than was saved")

    def _answers(self) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for number, process in enumerate(self._processes):
            assert process.stdout is not None
            line = _line(process.stdout)
            answer = json.loads(line) if line else {"error": self._log_text(number)}
            if "error" in answer:
                raise RuntimeError(f"{self.name}, process {number}: {answer['error']}")
            answers.append(answer)
        return answers

    def _log_path(self, process: int) -> Path:
        return Path(f"{self._base}.log.{process}")

    def _log(self, process: int) -> Any:
        return self._log_path(process).open("w")

    def _log_text(self, process: int) -> str:
        return self._log_path(process).read_text()[-3000:]


def _line(answers: IO[str]) -> str:
    """An answer; nothing when the process is gone, or silent for too long."""
    # One line is all that is ever under way, so the text's own buffer is empty here.
    ready, _, _ = select.select([answers], [], [], TIMEOUT_S)
    return answers.readline() if ready else ""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def forget_pages(folder: str) -> None:
    """What is read next comes from the disk."""
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
