"""The verbs of `everstep checkpoint`. Exit codes: 0 as asked, 1 not so, 2 not understood."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="checkpoint",
    help="List, show, verify, compare and export checkpoints, also while a job writes them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXIT_NOT_SO = 1
EXIT_USAGE = 2

Uri = Annotated[
    str, typer.Argument(metavar="URI", help="A folder, file:///folder, or gs://bucket/folder.")
]
OneStep = Annotated[int | None, typer.Option("--step", help="The newest when not given.")]


class Output(str, Enum):  # noqa: UP042 (typer shows the value of a str enum)
    TABLE = "table"
    JSON = "json"


class Format(str, Enum):  # noqa: UP042
    ORBAX = "orbax"
    SAFETENSORS = "safetensors"


AsOutput = Annotated[Output, typer.Option("--output", "-o", help="table, or json for programs.")]


@app.command()
def ls(uri: Uri, output: AsOutput = Output.TABLE) -> None:
    """List the steps that exist: size, leaves, age, who wrote them, and their metadata."""
    from everstep.runtime.cli import showing
    from everstep.runtime.cli.opened import OpenedRun
    from everstep.runtime.clock import SystemClock

    with _failing_well():
        run = OpenedRun(uri)
        rows = [
            showing.step_row(commit, opened, now_s=SystemClock().unix_s())
            for commit, opened in run.opened()
        ]
        if output is Output.JSON:
            _print_json({"uri": run.uri, "steps": [row.as_json() for row in rows]})
        elif not rows:
            print(f"No step is committed in {run.uri}.")
        else:
            showing.print_steps(rows)
        if any(row.problem for row in rows):
            raise SystemExit(EXIT_NOT_SO)


@app.command()
def show(
    uri: Uri,
    step: OneStep = None,
    leaves: Annotated[
        str | None, typer.Option(help="Only leaves whose name matches, as in *kernel*.")
    ] = None,
    output: AsOutput = Output.TABLE,
) -> None:
    """Show a step's tree of leaves: names, dtypes, shapes, chunks and sizes."""
    from everstep.runtime.cli import showing
    from everstep.runtime.cli.opened import OpenedRun

    with _failing_well():
        run = OpenedRun(uri)
        opened = run.open(run.commit(step))
        rows = showing.leaf_rows(opened, pattern=leaves)
        if output is Output.JSON:
            _print_json(showing.step_json(opened, rows))
        else:
            showing.print_step(opened, rows)


@app.command()
def verify(
    uri: Uri,
    step: OneStep = None,
    every: Annotated[bool, typer.Option("--all", help="Every step, not only one.")] = False,
) -> None:
    """Read every byte and compare it with its checksum; exit code 1 when one differs."""
    from everstep.runtime.cli.opened import OpenedRun
    from everstep.runtime.cli.verifying import item_bytes, verified_words, verify_item
    from everstep.runtime.errors import CheckpointInvalid

    with _failing_well():
        run = OpenedRun(uri)
        chosen = run.commits if every and step is None else (run.commit(step),)
        is_whole = True
        for commit in chosen:
            try:
                opened = run.open(commit)
            except CheckpointInvalid as error:
                print(f"step {commit.step}: {error}")
                is_whole = False
                continue
            total = sum(item_bytes(reader) for reader in opened.items.values())
            with _progress(f"step {commit.step}", total) as advance:
                damages = [
                    damage
                    for reader in opened.items.values()
                    for damage in verify_item(reader, advance)
                ]
            for damage in damages:
                print(f"step {commit.step}: {damage.leaf}: {damage.why}")
            if not damages:
                print(verified_words(opened, total))
            is_whole = is_whole and not damages
        if not is_whole:
            raise SystemExit(EXIT_NOT_SO)


@app.command()
def diff(
    uri: Uri,
    a: Annotated[int, typer.Argument(help="A step.")],
    b: Annotated[int, typer.Argument(help="Another step.")],
    other: Annotated[str | None, typer.Option("--in", help="Where B is, if elsewhere.")] = None,
    output: AsOutput = Output.TABLE,
) -> None:
    """Compare two steps leaf by leaf, by their bytes; exit code 1 when they differ."""
    from everstep.runtime.cli import showing
    from everstep.runtime.cli.comparing import compare_items
    from everstep.runtime.cli.opened import OpenedRun
    from everstep.runtime.cli.verifying import item_bytes
    from everstep.runtime.errors import ConfigurationError

    with _failing_well():
        run = OpenedRun(uri)
        beside = run if other is None else OpenedRun(other)
        first, second = run.open(run.commit(a)), beside.open(beside.commit(b))
        if first.items.keys() != second.items.keys():
            raise ConfigurationError(
                "B", ", ".join(second.items), f"the items of A: {', '.join(first.items)}"
            )
        total = sum(item_bytes(reader) for reader in first.items.values())
        with _progress(f"{a} and {b}", total) as advance:
            found = [
                (item, difference)
                for item, reader in first.items.items()
                for difference in compare_items(reader, second.items[item], advance)
            ]
        if output is Output.JSON:
            _print_json(showing.differences_json(a, b, found))
        else:
            showing.print_differences(a, b, found)
        if found:
            raise SystemExit(EXIT_NOT_SO)


@app.command()
def export(
    uri: Uri,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new folder, or a new file.")],
    step: OneStep = None,
    as_format: Annotated[
        Format, typer.Option("--format", help="orbax: a folder; safetensors: a file.")
    ] = Format.ORBAX,
    item: Annotated[str, typer.Option(help="Which part of the step.")] = "state",
) -> None:
    """Write a step elsewhere for others to read, verified on the way."""
    from everstep.runtime.cli.exporting import export_orbax, export_safetensors
    from everstep.runtime.cli.opened import OpenedRun, absolute
    from everstep.runtime.cli.verifying import item_bytes
    from everstep.runtime.errors import ConfigurationError
    from everstep.runtime.storage.posix import PosixStore

    with _failing_well():
        run = OpenedRun(uri)
        opened = run.open(run.commit(step))
        reader = opened.items.get(item)
        if reader is None:
            raise ConfigurationError("--item", item, f"one of {', '.join(opened.items)}")
        where = Path(absolute(str(target)))
        with _progress(f"step {opened.step}", item_bytes(reader)) as advance:
            if as_format is Format.SAFETENSORS:
                notes = {"step": str(opened.step), "source": run.uri}
                export_safetensors(reader, where, notes, advance)
            else:
                export_orbax(
                    reader,
                    PosixStore(str(where.parent)),
                    where.name,
                    committed_s=opened.commit.committed_at_s,
                    advance=advance,
                )
        print(f"step {opened.step} is in {where}")


@app.command()
def gc(
    uri: Uri,
    latest: Annotated[int, typer.Option(min=1, help="Keep so many of the newest.")] = 3,
    every_steps: Annotated[
        int | None, typer.Option(min=1, help="Keep every step that is a multiple.")
    ] = None,
    output: AsOutput = Output.TABLE,
) -> None:
    """Say what a clean-up by these rules would delete, and delete nothing.

    Only the job that owns a run deletes from it: by its own `retention`, after each commit.
    """
    from everstep.runtime.cli import showing
    from everstep.runtime.cli.collecting import plan_clean_up
    from everstep.runtime.cli.opened import OpenedRun
    from everstep.runtime.clock import SystemClock

    with _failing_well():
        run = OpenedRun(uri)
        plan = plan_clean_up(
            run, latest=latest, every_steps=every_steps, now_s=SystemClock().unix_s()
        )
        if output is Output.JSON:
            _print_json(plan.as_json())
        else:
            showing.print_clean_up(plan)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


@contextmanager
def _progress(what: str, total_bytes: int) -> Generator[Callable[[int], None]]:
    """A bar on a terminal; nothing where nobody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done: bar.advance(task, done)


@contextmanager
def _failing_well() -> Generator[None]:
    """Turn errors that people can do something about into a message and an exit code."""
    from everstep.runtime.errors import ConfigurationError, EverstepError

    try:
        yield
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None
    except EverstepError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_NOT_SO) from None
    except BrokenPipeError:
        # The reader (`head`, `less`) had enough. Python must not try to flush into it again.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it lives as long as the process)
        raise SystemExit(EXIT_NOT_SO) from None
    except OSError as error:
        print(f"error: {error.filename or 'storage'}: {error.strerror}", file=sys.stderr)
        raise SystemExit(EXIT_NOT_SO) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def main(arguments: Iterable[str] | None = None) -> None:
    """Run the verbs alone: `python -m everstep.runtime.cli.main`."""
    app(args=None if arguments is None else list(arguments))


if __name__ == "__main__":
    main()
