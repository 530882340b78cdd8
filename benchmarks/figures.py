"""What a benchmark returns: figures in one format, on the screen and in a file.

A benchmark is a module of this folder with `run(arguments) -> list[Figure]`; its name is in
`NAMES`. It raises when it could not measure, and never because a figure is bad.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, cast

import msgspec

NAMES = ("snapshot", "recovery", "notice", "memory", "reduction", "checkpoint", "checkpoint_gcs")
"""In the order in which `all` runs them; one without a module is left out."""


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    seed: int = 1
    quick: bool = False
    """Fewer repetitions and smaller states: does it run at all, not how fast."""
    full: bool = False
    """Also what takes too long for every day."""
    only: str = ""
    """Only the cases with one of these words, between commas, in their keys."""
    done: frozenset[str] = frozenset()
    """Cases that need not be measured again."""
    minutes: float | None = None
    """No case is begun that would last longer than this after the start."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: float
    unit: str
    against: str | None = None
    """What it is compared with, measured in the same run."""
    against_value: float | None = None
    ratio: float | None = None
    reach: str | None = None
    """What it should be, in words."""
    holds: bool | None = None
    """Whether it is; None where nothing is to be reached."""
    case: str | None = None
    """Of which case it is, where a benchmark can be taken in parts."""
    measure: str | None = None
    """Of the case, in a word; the plots are made of those that have one."""
    load: str | None = None
    """Of the machine, before the case began."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    figures: tuple[Figure, ...]
    machine: dict[str, str]
    command: str


class Benchmark(Protocol):
    """The module of one benchmark."""

    def run(self, arguments: Arguments) -> Iterable[Figure]:
        """Measure. Where figures come one by one, each is kept before the next is measured."""
        ...


class Timetable:
    """Which cases of a benchmark are measured in this run."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._words = [word.strip() for word in arguments.only.split(",") if word.strip()]
        self._started_s = time.monotonic()

    def is_due(self, case: str, about_s: float) -> bool:
        """Whether a case is measured now.

        Args:
            case: its key.
            about_s: how long it takes, about.
        """
        if self._words and not any(word in case for word in self._words):
            return False
        if case in self._arguments.done:
            return False
        minutes = self._arguments.minutes
        gone_s = time.monotonic() - self._started_s
        if minutes is not None and gone_s + about_s > 60 * minutes:
            print(f"{case}, about {about_s:.0f} s, is left for another time", file=sys.stderr)
            return False
        print(f"{case}, about {about_s:.0f} s, after {gone_s:.0f} s", file=sys.stderr)
        return True


def compared(name: str, value: float, unit: str, *, against: str, against_value: float) -> Figure:
    """A figure beside another of the same unit, with their ratio and nothing to reach yet."""
    ratio = value / against_value if against_value > 0 else None
    return Figure(
        name=name,
        value=value,
        unit=unit,
        against=against,
        against_value=against_value,
        ratio=ratio,
    )


def reaching(figure: Figure, reach: str, holds: bool) -> Figure:
    """The figure with what it should reach, and whether it does."""
    return msgspec.structs.replace(figure, reach=reach, holds=holds)


def alternating(
    first: Callable[[], float], second: Callable[[], float], *, count: int
) -> tuple[float, float]:
    """Medians of two measurements taken in turns, so that a slow moment of the machine hits both.

    Args:
        first: measures once and returns seconds; likewise `second`.
        second: what the first is compared with.
        count: pairs that are measured, after one that is not counted.
    """
    pairs = [(first(), second()) for _ in range(count + 1)][1:]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def merged(before: Sequence[Figure], new: Sequence[Figure]) -> tuple[Figure, ...]:
    """Figures of several runs: a case that was measured again has its new ones only."""
    cases = {figure.case for figure in new if figure.case is not None}
    kept = [figure for figure in before if figure.case is not None and figure.case not in cases]
    return (*kept, *new)


def available() -> tuple[str, ...]:
    """Benchmarks that are there."""
    return tuple(n for n in NAMES if importlib.util.find_spec(f"benchmarks.{n}") is not None)


def load(name: str) -> Benchmark:
    return cast("Benchmark", importlib.import_module(f"benchmarks.{name}"))


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    found = {
        "system": platform.platform(),
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _field("/proc/meminfo", "MemTotal") or "unknown",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": platform.python_version(),
    }
    for package in ("everstep", "jax", "jaxlib", "numpy", "tensorstore"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(results: Results, path: Path) -> None:
    """Durability: none; figures can be measured again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


def _field(path: str, name: str) -> str | None:
    try:
        lines: Sequence[str] = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
