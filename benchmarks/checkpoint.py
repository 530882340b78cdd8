"""Saving and restoring, against Orbax, PyTorch's distributed checkpointing, and bare files.

Every side has processes of its own, which keep their state for a whole case; the sides take turns,
so that a slow moment of the machine hits all of them, and medians are compared. Where the states
of all sides do not fit the memory together, one side does all its turns after the other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import psutil

from benchmarks.checkpoint_cases import ELSEWHERE, FULL, QUICK, USUAL, Case
from benchmarks.checkpoint_figures import Samples, figures_of
from benchmarks.checkpoint_processes import ROOT, SideProcesses, forget_pages, names
from benchmarks.figures import Arguments, Figure, Timetable


def run(arguments: Arguments) -> Iterator[Figure]:
    cases = QUICK if arguments.quick else FULL if arguments.full else USUAL
    timetable = Timetable(arguments)
    for case in cases:
        if not timetable.is_due(case.key, case.about_s):
            continue
        free = psutil.virtual_memory().available
        if free < case.memory_bytes:
            print(
                f"{case.key} is left out: it takes {case.memory_bytes / 2**30:.1f} GiB of memory, "
                f"{free / 2**30:.1f} GiB are free",
                file=sys.stderr,
            )
            continue
        load = f"{os.getloadavg()[0]:.2f}"
        yield from figures_of(case, _measure(case, arguments.seed), load)


def _measure(case: Case, seed: int) -> dict[str, Samples]:
    base = "/dev/shm" if case.place == "tmpfs" else ROOT / ".everstep/bench"
    os.makedirs(base, exist_ok=True)
    samples: dict[str, Samples] = {name: defaultdict(list) for name in names(case)}
    groups = [[name] for name in samples] if case.is_apart else [list(samples)]
    for group in groups:
        with contextlib.ExitStack() as stack:
            root = stack.enter_context(tempfile.TemporaryDirectory(dir=base, prefix="checkpoint-"))
            sides = [
                stack.enter_context(SideProcesses(name, case, seed, f"{root}/{name}"))
                for name in group
            ]
            readers = {
                name: stack.enter_context(_reader(name, case, seed, root))
                for name in group
                if case.is_moved and name not in ("bare", "torch")
            }
            # The first turn warms up: it is verified, and counts for memory only.
            for turn in range(case.count + 1):
                for side in sides:
                    found = samples[side.name]
                    _take_turn(side, readers.get(side.name), case, found, is_first=turn == 0)
    return samples


def _reader(name: str, case: Case, seed: int, root: str) -> SideProcesses:
    """One process that restores what several saved."""
    return SideProcesses(
        name, replace(case, processes=1), seed, f"{root}/{name}-reader", is_reader=True
    )


def _take_turn(
    side: SideProcesses,
    reader: SideProcesses | None,
    case: Case,
    samples: Samples,
    *,
    is_first: bool,
) -> None:
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
        forget_pages(side.folder)
        timed["cold restore"] = side.ask("restore", layout="rows")["took_s"]
    if reader is not None:
        reader.folder = side.folder
        ways = [*((layout, side) for layout in ELSEWHERE), ("one process", reader)]
        for layout, who in ways:
            restored = who.ask("restore", layout=layout if who is side else "rows")
            timed[f"restore as {layout}"] = restored["took_s"]
            timed[f"restore as {layout}, bytes read"] = restored["read_bytes"]
            if is_first:
                who.verify()
            who.ask("drop")
    # Its memory is the others' during their turns.
    side.ask("drop")
    # The step before is kept until the new one is there, as in every run.
    if before != side.folder:
        shutil.rmtree(before, ignore_errors=True)
    for name, value in memory.items():
        samples[name].append(value)
    if not is_first:
        for name, value in timed.items():
            samples[name].append(value)
