"""Saving and restoring, against Orbax, PyTorch's distributed checkpointing, and bare files.

Every side has processes of its own, which keep their state for a whole case; the sides take turns,
so that a slow moment of the machine hits all of them, and medians are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.checkpoint_sides import leaf_shape
from benchmarks.figures import Arguments, Figure, compared, reaching

MIB = 1 << 20
ROOT = Path(__file__).parents[1]
TORCH = ROOT / ".everstep/bench/torch"
"""An environment with torch, where there is one: `python -m venv` it, `pip install torch`."""
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    size_bytes: int
    leaves: int
    dtype: str = "f32"
    processes: int = 1
    place: str = "tmpfs"
    count: int = 5
    layouts: tuple[str, ...] = ()
    """Restored in these too."""

    @property
    def name(self) -> str:
        size = f"{self.size_bytes // MIB} MiB" if self.size_bytes >= MIB else "1 element"
        processes = f", {self.processes} processes" if self.processes > 1 else ""
        leaves = "leaf" if self.leaves == 1 else "leaves"
        return f"{self.place}, {size} {self.dtype}, {self.leaves} {leaves}{processes}"


USUAL = (
    Case(size_bytes=1024 * MIB, leaves=16),
    Case(size_bytes=1024 * MIB, leaves=16, place="disk"),
    Case(size_bytes=64 * MIB, leaves=16),
    Case(size_bytes=64 * MIB, leaves=16, place="disk"),
    Case(size_bytes=64 * MIB, leaves=2000),
    Case(size_bytes=512 * MIB, leaves=16, dtype="bf16"),
    Case(size_bytes=4, leaves=1, processes=4, count=15),
    Case(
        size_bytes=512 * MIB,
        leaves=16,
        processes=4,
        layouts=("columns", "blocks", "whole"),
    ),
)
FULL = (
    *USUAL,
    Case(size_bytes=1024 * MIB, leaves=2000),
    Case(size_bytes=1024 * MIB, leaves=2000, place="disk"),
    Case(size_bytes=1024 * MIB, leaves=16, dtype="bf16", place="disk"),
    Case(size_bytes=64 * MIB, leaves=2000, place="disk"),
    Case(size_bytes=1024 * MIB, leaves=16, processes=4, place="disk"),
    Case(size_bytes=4096 * MIB, leaves=16, place="disk"),
    Case(size_bytes=4096 * MIB, leaves=16),
)
QUICK = (
    Case(size_bytes=16 * MIB, leaves=16, count=1),
    Case(size_bytes=16 * MIB, leaves=16, count=1, place="disk"),
    Case(size_bytes=4, leaves=1, processes=2, count=1, layouts=("columns",)),
)


def run(arguments: Arguments) -> list[Figure]:
    cases = QUICK if arguments.quick else FULL if arguments.full else USUAL
    figures: list[Figure] = []
    for case in cases:
        figures += _measure(case, arguments.seed)
    return figures


Samples = dict[str, list[float]]


def _measure(case: Case, seed: int) -> list[Figure]:
    with contextlib.ExitStack() as stack:
        base = "/dev/shm" if case.place == "tmpfs" else ROOT / ".everstep/bench"
        os.makedirs(base, exist_ok=True)
        root = stack.enter_context(tempfile.TemporaryDirectory(dir=base, prefix="checkpoint-"))
        sides = [
            stack.enter_context(_Side(name, case, seed, f"{root}/{name}")) for name in _names(case)
        ]
        samples: dict[str, Samples] = {side.name: defaultdict(list) for side in sides}
        # The first turn warms up: it is verified, and counts for memory only.
        for turn in range(case.count + 1):
            for side in sides:
                _take_turn(side, case, samples[side.name], is_first=turn == 0)
    return list(_figures(case, samples))


def _names(case: Case) -> Iterator[str]:
    yield "everstep"
    if case.size_bytes >= MIB:
        yield "bare"
    yield "orbax"
    yield "orbax_best"
    if _torch() is not None and case.size_bytes < 4096 * MIB:
        yield "torch"


def _torch() -> str | None:
    python = TORCH / "bin/python"
    return str(python) if python.exists() else None


def _take_turn(side: _Side, case: Case, samples: Samples, *, is_first: bool) -> None:
    before = side.next_folder()
    # What others left to be written is not this one's to wait for.
    os.sync()
    timed: dict[str, float] = {}
    saved = side.ask("save")
    timed["save"], timed["kept"] = saved["took_s"], saved["kept_s"]
    memory = {"save peak": saved["peak_bytes"]}
    restored = side.ask("restore", layout="rows")
    timed["restore"] = restored["took_s"]
    memory["restore peak"] = restored["peak_bytes"]
    if is_first:
        side.verify()
    if case.place == "disk":
        _forget_pages(side.folder)
        timed["cold restore"] = side.ask("restore", layout="rows")["took_s"]
    if side.name not in ("bare", "torch"):
        for layout in case.layouts:
            restored = side.ask("restore", layout=layout)
            timed[f"restore as {layout}"] = restored["took_s"]
            memory[f"{layout} bytes read"] = restored["read_bytes"]
            if is_first:
                side.verify()
    # The step before is kept until the new one is there, as in every run.
    if before != side.folder:
        shutil.rmtree(before, ignore_errors=True)
    for name, value in memory.items():
        samples[name].append(value)
    if not is_first:
        for name, value in timed.items():
            samples[name].append(value)


class _Side:
    """The processes of one side."""

    def __init__(self, name: str, case: Case, seed: int, folder: str) -> None:
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
        }
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        python = (_torch() if self.name == "torch" else None) or sys.executable
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
        self._answers()
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
            raise RuntimeError(f"{self.name} restored something else than it saved")

    def _answers(self) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        for number, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _forget_pages(folder: str) -> None:
    """What is read next comes from the disk."""
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


_WORDS = {
    "bare": "bare files",
    "orbax": "Orbax",
    "orbax_best": "Orbax, uncompressed",
    "torch": "torch DCP",
}


def _figures(case: Case, samples: dict[str, Samples]) -> Iterator[Figure]:
    """Medians beside medians; ratios are the other's time over ours, so more is better."""
    ours = samples["everstep"]
    for measure in ("save", "restore", "cold restore"):
        if measure not in ours:
            continue
        for other, reach in _reaches(case, measure):
            if other in samples:
                yield _faster(f"{case.name}: {measure}", ours[measure], samples, other, reach)
    if case.size_bytes >= MIB and "bare" in samples:
        kept = compared(
            f"{case.name}: save keeps the caller",
            statistics.median(ours["kept"]),
            "s",
            against="plain copy into touched memory",
            against_value=statistics.median(samples["bare"]["kept"]),
        )
        yield reaching(kept, "≤ 1.3", (kept.ratio or 0) <= 1.3)
    if case.size_bytes < MIB:
        yield from _small_figures(case, samples)
    for layout in case.layouts:
        yield from _layout_figures(case, layout, samples)
    if case.processes == 1 and case.size_bytes >= 64 * MIB:
        for measure in ("save", "restore"):
            peak = max(ours[f"{measure} peak"])
            yield reaching(
                compared(
                    f"{case.name}: {measure}, peak memory above before",
                    peak,
                    "bytes",
                    against="the state",
                    against_value=case.size_bytes,
                ),
                "≤ state + 256 MiB",
                peak <= case.size_bytes + 256 * MIB,
            )


def _reaches(case: Case, measure: str) -> Sequence[tuple[str, float]]:
    if case.size_bytes < MIB:
        return ()
    if case.leaves >= 2000:
        return (("orbax", 5.0), ("orbax_best", 0.0), ("torch", 0.0), ("bare", 0.0))
    if measure == "save" and case.place == "disk":
        return (("orbax", 1.0), ("orbax_best", 1.0), ("torch", 1.0), ("bare", 0.85))
    if measure == "save":
        return (("orbax", 5.0), ("orbax_best", 1.3), ("torch", 1.3), ("bare", 0.0))
    return (("orbax", 3.0), ("orbax_best", 1.5), ("torch", 1.2), ("bare", 0.8))


def _faster(
    name: str, ours: Sequence[float], samples: dict[str, Samples], other: str, reach: float
) -> Figure:
    measure = name.rsplit(": ", 1)[1]
    value, against = statistics.median(ours), statistics.median(samples[other][measure])
    ratio = against / value
    return Figure(
        name=name,
        value=value,
        unit="s",
        against=_WORDS[other],
        against_value=against,
        ratio=ratio,
        reach=f"≥ {reach:g} ×" if reach else None,
        holds=ratio >= reach if reach else None,
    )


def _small_figures(case: Case, samples: dict[str, Samples]) -> Iterator[Figure]:
    for measure, words, reach_s in (
        ("kept", "save keeps the caller", 5e-3),
        ("save", "save", 40e-3),
        ("restore", "restore", 40e-3),
    ):
        value = statistics.median(samples["everstep"][measure])
        yield reaching(
            compared(
                f"{case.name}: {words}",
                value,
                "s",
                against="Orbax",
                against_value=statistics.median(samples["orbax"][measure]),
            ),
            f"≤ {reach_s * 1e3:g} ms",
            value <= reach_s,
        )


def _layout_figures(case: Case, layout: str, samples: dict[str, Samples]) -> Iterator[Figure]:
    ours = samples["everstep"]
    read = statistics.median(ours[f"{layout} bytes read"]) / case.size_bytes
    theirs = statistics.median(samples["orbax"][f"{layout} bytes read"]) / case.size_bytes
    name = f"{case.name}: rows restored as {layout}"
    yield reaching(
        compared(
            f"{name}, bytes read of the state's", read, "", against="Orbax", against_value=theirs
        ),
        "≤ 1.05",
        read <= 1.05,
    )
    yield reaching(
        compared(
            f"{name}, time",
            statistics.median(ours[f"restore as {layout}"]),
            "s",
            against="the same layout",
            against_value=statistics.median(ours["restore"]),
        ),
        "≤ 1.5",
        statistics.median(ours[f"restore as {layout}"]) <= 1.5 * statistics.median(ours["restore"]),
    )
