"""Time over size as a picture, from the figures that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from benchmarks.checkpoint_cases import FULL, MIB, PLACES, Case
from benchmarks.checkpoint_figures import WORDS
from benchmarks.figures import Figure

PATH = Path("docs/explanation/checkpoint-times.svg")
OURS = "Everstep"
MEASURES = ("save", "restore")
# Told apart by people who see colours otherwise too, and in print.
LINES = ("#d55e00", "#7f7f7f", "#0072b2", "#56b4e9", "#009e73")
MARKS = "osDv^"
_SAME_EACH_TIME: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "everstep",
    "font.size": 8,
}

Times = dict[Case, dict[str, float]]
"""Seconds by case and side."""


def draw(figures: Sequence[Figure], path: Path = PATH) -> bool:
    """Draw saving and restoring on each kind of place. The same figures give the same bytes.

    Args:
        figures: of the benchmark.
        path: of the picture.

    Returns:
        Whether there was anything to draw: at least two sizes somewhere.
    """
    panels = {
        (measure, place): _times(measure, place, figures)
        for place in PLACES
        for measure in MEASURES
    }
    if all(len(times) < 2 for times in panels.values()):
        return False
    with mpl.rc_context(_SAME_EACH_TIME):
        picture = Picture(figsize=(7.5, 5.5), layout="constrained")
        axes = picture.subplots(len(PLACES), len(MEASURES), sharex=True, sharey=True)
        for one, ((measure, place), times) in zip(axes.flat, panels.items(), strict=True):
            _panel(one, f"{measure}, {place}", times)
        handles, labels = max((one.get_legend_handles_labels() for one in axes.flat), key=_length)
        picture.legend(handles, labels, loc="outside lower center", ncols=len(LINES))
        picture.suptitle("A state of f32 in 16 leaves, one process; less is better")
        picture.supylabel("seconds, medians")
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, metadata={"Date": None, "Creator": None})
    return True


def _length(of: tuple[list[object], list[object]]) -> int:
    return len(of[0])


def _panel(axes: Axes, title: str, times: Times) -> None:
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.grid(visible=True, color="#dddddd", linewidth=0.5)
    sizes = sorted({case.size_bytes // MIB for case in FULL if _is_plotted(case)})
    axes.set_xticks(sizes, [f"{size} MiB" for size in sizes])
    for side, colour, mark in zip((OURS, *WORDS.values()), LINES, MARKS, strict=True):
        points = [(case.size_bytes // MIB, of[side]) for case, of in times.items() if side in of]
        if points:
            axes.plot(*zip(*points, strict=True), label=side, color=colour, marker=mark)


def _is_plotted(case: Case) -> bool:
    return case == Case(size_bytes=case.size_bytes, place=case.place)


def _times(measure: str, place: str, figures: Sequence[Figure]) -> Times:
    times: Times = {}
    for case in sorted(filter(_is_plotted, FULL), key=lambda case: case.size_bytes):
        found = [f for f in figures if (f.case, f.measure) == (case.key, measure)]
        if case.place == place and found:
            times[case] = {OURS: found[0].value}
            times[case] |= {
                f.against: f.against_value
                for f in found
                if f.against is not None and f.against_value is not None
            }
    return times
