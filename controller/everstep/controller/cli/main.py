"""`everstep`: the one command line."""

from __future__ import annotations

import sys
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


@app.command()
def demo(
    seed: Annotated[int | None, typer.Option(help="Draw another story.")] = None,
    program: Annotated[str, typer.Option(help="language-model or tiny.")] = "language-model",
    steps: Annotated[int | None, typer.Option(help="Length of the training.")] = None,
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


def main() -> None:
    """Run the command line of this process."""
    sys.exit(app())


if __name__ == "__main__":
    main()
