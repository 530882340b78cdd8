"""`everstep`: the one command line."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from everstep.controller.cli.failure import failing_well
from everstep.controller.cli.local import app as local_app

app = typer.Typer(
    name="everstep",
    help="Keeps multi-slice JAX training alive: lose a slice, go on with the rest, grow back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(local_app, name="local")

COMMANDS = "everstep.commands"
"""Entry points that are verbs of this command: those of the runtime, where it is installed."""


@app.command()
def demo(
    seed: Annotated[int | None, typer.Option(help="Draw another story.")] = None,
    program: Annotated[str, typer.Option(help="language-model or tiny.")] = "language-model",
    steps: Annotated[int | None, typer.Option(help="Length of the training, 60 or more.")] = None,
    folder: Annotated[Path, typer.Option(help="Everything is written here.")] = Path(
        ".everstep/demo"
    ),
    reference: Annotated[
        Path | None, typer.Option(help="Result of an earlier undisturbed run.")
    ] = None,
) -> None:
    """Train, lose slices, go on, grow back, and compare with an undisturbed run."""
    from everstep.controller.cli.demo.command import demo as play

    with failing_well():
        code = play(seed=seed, program=program, steps=steps, folder=folder, reference=reference)
    raise typer.Exit(code)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(f"everstep {installed('everstep')}")


def add_installed_commands() -> None:
    """Add the verbs that other installed parts bring along.

    A part that is installed without what it needs is left out, and said only when it is asked for.
    """
    for found in entry_points(group=COMMANDS):
        try:
            app.add_typer(found.load(), name=found.name)
        except ImportError as error:
            if found.name in sys.argv[1:2]:
                print(
                    f"error: everstep {found.name}: {error}; install everstep[runtime]",
                    file=sys.stderr,
                )
                sys.exit(1)


def main() -> None:
    """Run the command line of this process."""
    add_installed_commands()
    sys.exit(app())


if __name__ == "__main__":
    main()
