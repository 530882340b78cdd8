"""The comparison of checkpoint engines can be taken in parts, and drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as bench
from benchmarks.checkpoint_cases import FULL, QUICK, USUAL
from benchmarks.checkpoint_plots import draw
from benchmarks.figures import Arguments, Figure, Timetable

CASES = ("tmpfs-64MiB", "tmpfs-1024MiB", "disk-64MiB")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cases that were measured, in order; each case takes a minute, if one asks it."""
    measured: list[str] = []

    def run(arguments: Arguments) -> Iterator[Figure]:
        timetable = Timetable(arguments)
        for case in CASES:
            if timetable.is_due(case, 60.0):
                measured.append(case)
                yield Figure(name=case, value=float(len(measured)), unit="s", case=case)

    monkeypatch.setattr(bench, "load", lambda _: SimpleNamespace(run=run))
    return measured


def measured_in(folder: Path, *options: str) -> dict[str, float]:
    assert bench.main(["checkpoint", "--out", str(folder), *options]) == 0
    return {figure.name: figure.value for figure in bench.read(folder / "checkpoint.json").figures}


def test_parts_come_together_in_one_file(runs: list[str], tmp_path: Path) -> None:
    assert measured_in(tmp_path, "--only", "64MiB") == {"tmpfs-64MiB": 1, "disk-64MiB": 2}
    assert measured_in(tmp_path, "--only", "1024MiB") == {
        "tmpfs-64MiB": 1,
        "disk-64MiB": 2,
        "tmpfs-1024MiB": 3,
    }
    # What is measured again has its new figures only.
    assert measured_in(tmp_path, "--only", "disk, nowhere")["disk-64MiB"] == 4
    assert len(runs) == 4


def test_the_rest_is_what_the_file_lacks(runs: list[str], tmp_path: Path) -> None:
    measured_in(tmp_path, "--only", "disk")
    assert set(measured_in(tmp_path, "--rest")) == set(CASES)
    measured_in(tmp_path, "--rest")
    assert runs == ["disk-64MiB", "tmpfs-64MiB", "tmpfs-1024MiB"]


def test_a_case_that_would_end_too_late_is_left_for_another_time(
    runs: list[str], tmp_path: Path
) -> None:
    assert measured_in(tmp_path, "--rest", "--minutes", "0.5") == {}
    measured_in(tmp_path, "--rest", "--minutes", "30")
    assert runs == list(CASES)


def test_all_together_begins_a_new_file(runs: list[str], tmp_path: Path) -> None:
    measured_in(tmp_path, "--only", "disk")
    assert measured_in(tmp_path)["disk-64MiB"] == 4
    assert runs == ["disk-64MiB", *CASES]


def test_no_two_cases_have_one_key() -> None:
    for cases in (USUAL, FULL, QUICK):
        assert len({case.key for case in cases}) == len(cases)


def test_the_same_figures_give_the_same_picture(tmp_path: Path) -> None:
    figures = [
        Figure(
            name=case.name,
            value=case.size_bytes / 1e9,
            unit="s",
            against="Orbax",
            against_value=case.size_bytes / 1e8,
            case=case.key,
            measure=measure,
        )
        for case in FULL
        for measure in ("save", "restore")
    ]
    paths = [tmp_path / f"{number}.svg" for number in range(2)]
    assert all(draw(figures, path) for path in paths)
    first, second = (path.read_text() for path in paths)
    assert first == second
    for words in ("save, tmpfs", "restore, disk", "1024 MiB", "Everstep", "Orbax"):
        assert words in first
    assert not draw(figures[:1], tmp_path / "nothing.svg")
    assert not (tmp_path / "nothing.svg").exists()
