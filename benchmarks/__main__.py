"""`python -m benchmarks [NAME] [--seed N] [--quick | --full] [--out FOLDER]`: measure and print.

A benchmark of many cases (`checkpoint`) can be taken in parts, whose figures come together in one
file: `--only tmpfs-64MiB,one` measures cases with such words in their keys, again where they are
there; `--rest` those that the file lacks; `--minutes 9` begins none that would end later. Of
what was measured, `--plot` draws the picture in `docs/explanation`.

The exit code is 0 also where a figure falls short: a slow day is no bug, and the table says it.
It is 1 when a benchmark could not measure, 2 when there is none of that name.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.figures import (
    Arguments,
    Figure,
    Results,
    available,
    load,
    machine,
    merged,
    write,
)

OUT = Path(".everstep/bench")
ALL = "all"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", default=ALL, help=f"{ALL}, {', '.join(available())}")
    parser.add_argument("--seed", type=int, default=1, help="of everything random")
    parser.add_argument("--quick", action="store_true", help="few repetitions, small states")
    parser.add_argument("--full", action="store_true", help="large states and every combination")
    parser.add_argument("--only", default="", help="words of the keys of cases, between commas")
    parser.add_argument("--rest", action="store_true", help="cases that were not measured yet")
    parser.add_argument("--minutes", type=float, help="begin no case that would end later")
    parser.add_argument("--plot", action="store_true", help="draw what was measured; no more")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the results ({OUT})")
    asked = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else list(arguments)
    path: Path = asked.out / f"{asked.name}.json"
    if asked.plot:
        return _plot(asked.name, path)
    if asked.name == ALL:
        return _run_all(given)
    if asked.name not in available():
        print(f"no benchmark {asked.name!r}; there are {', '.join(available())}", file=sys.stderr)
        return 2
    is_part = asked.only or asked.rest or asked.minutes is not None
    before = read(path).figures if is_part and path.exists() else ()
    done = frozenset(figure.case for figure in before if figure.case) if asked.rest else frozenset()
    command = " ".join(["python -m benchmarks", *given])
    results = Results(figures=before, machine=machine(), command=command)
    new: list[Figure] = []
    for figure in load(asked.name).run(
        Arguments(
            seed=asked.seed,
            quick=asked.quick,
            full=asked.full,
            only=asked.only,
            done=done,
            minutes=asked.minutes,
        )
    ):
        # What was measured is kept, whatever becomes of the next.
        new.append(figure)
        figures = merged(before, new)
        results = msgspec.structs.replace(results, figures=figures, machine=machine())
        write(results, path)
    write(results, path)
    show(asked.name, msgspec.structs.replace(results, figures=tuple(new)), path)
    return 0


def _plot(name: str, path: Path) -> int:
    """The picture for the documentation, of the one benchmark that has one."""
    # Only here: nothing else needs the library.
    from benchmarks.checkpoint_plots import PATH, draw

    if name != "checkpoint" or not path.exists() or not draw(read(path).figures):
        print(f"nothing to draw: {path} with two sizes of states is needed", file=sys.stderr)
        return 2
    print(PATH)
    return 0


def _run_all(given: list[str]) -> int:
    """Each in a process of its own: they want other devices, and must not warm each other up."""
    failed = 0
    rest = [word for word in given if word != ALL]
    for name in available():
        done = subprocess.run([sys.executable, "-m", "benchmarks", name, *rest], check=False)
        failed |= done.returncode != 0
    return int(failed)


def show(name: str, results: Results, path: Path) -> None:
    """Print the figures as a table."""
    table = Table(title=f"{name}: {results.machine['cores']} cores, load {results.machine['load']}")
    for heading in ("figure", "value", "against", "ratio", "reach", "holds"):
        is_number = heading in ("value", "ratio")
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for figure in results.figures:
        table.add_row(*_row(figure))
    console = Console()
    console.print(table)
    console.print(f"written to {path}", style="dim")


def _row(figure: Figure) -> tuple[str, ...]:
    against = ""
    if figure.against is not None:
        against = figure.against
        if figure.against_value is not None:
            against += f": {amount(figure.against_value, figure.unit)}"
    holds = {True: "yes", False: "NO", None: ""}[figure.holds]
    return (
        figure.name,
        amount(figure.value, figure.unit),
        against,
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        figure.reach or "",
        holds,
    )


def amount(value: float, unit: str) -> str:
    """A value with its unit, seconds and bytes in the size that reads best."""
    scales = {
        "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
        "bytes": ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")),
    }.get(unit, ())
    for size, name in scales:
        if abs(value) >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.4g} {unit}".strip()


def read(path: Path) -> Results:
    """Results that were written before."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


if __name__ == "__main__":
    sys.exit(main())
