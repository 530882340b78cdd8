"""`everstep local`: the verbs, their options and their help. What they do is elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.controller.cli.failure import failing_well
from everstep.controller.ops.settings import ENV_FOLDER, Settings

app = typer.Typer(
    name="local",
    help="Run MultiSliceJobs on this machine, and do to them what a cluster does.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the job.")]
JobOption = Annotated[
    str | None, typer.Option("--job", "-j", help="The job; default: the only one.")
]
Place = Annotated[str, typer.Argument(metavar="SLICE[/HOST]", help="For example 1 or 1/0.")]
File = Annotated[str, typer.Option("--filename", "-f", help="YAML or JSON; - is standard input.")]
Timeout = Annotated[str | None, typer.Option(help="Give up after so long, for example 5m.")]

_settings: list[Settings] = []


def settings() -> Settings:
    """Return the settings of this process, with the options of the command line in them."""
    if not _settings:
        _settings.append(Settings.read())
    return _settings[0]


@app.callback()
def options(
    folder: Annotated[
        Path | None,
        typer.Option("--dir", envvar=ENV_FOLDER, help="State folder; default: ./.everstep/local"),
    ] = None,
) -> None:
    import os

    environ = dict(os.environ)
    if folder is not None:
        environ[ENV_FOLDER] = str(folder)
    _settings[:] = [Settings.read(environ)]


@app.command()
def apply(
    filename: File,
    wait: Annotated[bool, typer.Option("--wait", help="Until the job is training.")] = False,
    timeout: Timeout = None,
) -> None:
    """Create a job, or change one, and see that a controller runs."""
    from everstep.controller.cli.jobs import apply_file

    with failing_well():
        apply_file(settings(), filename, wait=wait, timeout=timeout)


@app.command()
def run(filename: File) -> None:
    """Apply a job and follow it until it is finished. Ctrl-C suspends it first."""
    from everstep.controller.cli.running import run_file

    with failing_well():
        code = run_file(settings(), filename)
    raise typer.Exit(code)


@app.command()
def get(
    name: Annotated[str | None, typer.Argument(help="Default: all jobs.")] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="wide, json, yaml or name.")] = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="And whatever changes.")] = False,
) -> None:
    """Show jobs, one a line."""
    from everstep.controller.cli.jobs import get_jobs

    with failing_well():
        get_jobs(settings(), name, output=output, watch=watch)


@app.command()
def describe(name: Name) -> None:
    """Show all about a job: conditions, slices, recoveries, events."""
    from everstep.controller.cli.jobs import describe_job

    with failing_well():
        describe_job(settings(), name)


@app.command()
def logs(
    name: Name,
    slice_id: Annotated[int | None, typer.Option("--slice", "-s", help="Of this slice.")] = None,
    host: Annotated[int | None, typer.Option("--host", help="Of this host.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="And what comes.")] = False,
) -> None:
    """Print what the agents and the training printed."""
    from everstep.controller.cli.joblogs import print_logs

    with failing_well():
        print_logs(settings(), name, slice_id=slice_id, host=host, follow=follow)


@app.command()
def scale(
    name: Name,
    slices: Annotated[int, typer.Option("--slices", help="Desired count, within min and max.")],
) -> None:
    """Change how many slices are desired."""
    from everstep.controller.cli.jobs import scale_job

    with failing_well():
        scale_job(settings(), name, slices)


@app.command()
def suspend(
    name: Name,
    wait: Annotated[bool, typer.Option("--wait", help="Until it is suspended.")] = False,
    timeout: Timeout = None,
) -> None:
    """Hold the newest step durably and end all processes of a job."""
    from everstep.controller.cli.jobs import suspend_job

    with failing_well():
        suspend_job(settings(), name, wait=wait, timeout=timeout)


@app.command()
def resume(name: Name) -> None:
    """Let a suspended job go on."""
    from everstep.controller.cli.jobs import resume_job

    with failing_well():
        resume_job(settings(), name)


@app.command()
def delete(
    name: Name,
    now: Annotated[bool, typer.Option("--now", help="Kill it; hold nothing first.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until it is gone.")] = True,
    timeout: Timeout = None,
) -> None:
    """End a job and remove its records. Its checkpoints stay."""
    from everstep.controller.cli.jobs import delete_job

    with failing_well():
        delete_job(settings(), name, now=now, wait=wait, timeout=timeout)


@app.command()
def preempt(
    slice_id: Annotated[str, typer.Argument(metavar="SLICE")],
    notice: Annotated[str, typer.Option(help="How long before the slice goes.")] = "30s",
    planned: Annotated[
        bool, typer.Option("--planned", help="Maintenance that may still be called off.")
    ] = False,
    job: JobOption = None,
) -> None:
    """Announce that a slice will be taken away, and take it at the deadline."""
    from everstep.controller.cli.machine import preempt_slice

    with failing_well():
        preempt_slice(settings(), slice_id, notice=notice, planned=planned, job=job)


@app.command()
def kill(
    place: Annotated[
        str | None, typer.Argument(metavar="SLICE[/HOST]", help="For example 1 or 1/0.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every slice.")] = False,
    controller: Annotated[bool, typer.Option("--controller", help="The controller.")] = False,
    job: JobOption = None,
) -> None:
    """SIGKILL, without notice.

    A slice is gone until `return`; of a host only the processes go.
    """
    from everstep.controller.cli.machine import kill_place

    with failing_well():
        kill_place(settings(), place, everything=everything, controller=controller, job=job)


@app.command()
def freeze(place: Place, job: JobOption = None) -> None:
    """SIGSTOP all processes of a slice or a host."""
    from everstep.controller.cli.machine import freeze_place

    with failing_well():
        freeze_place(settings(), place, job=job)


@app.command()
def thaw(place: Place, job: JobOption = None) -> None:
    """SIGCONT all processes of a slice or a host."""
    from everstep.controller.cli.machine import thaw_place

    with failing_well():
        thaw_place(settings(), place, job=job)


@app.command("return")
def give_back(
    slice_id: Annotated[str, typer.Argument(metavar="SLICE")], job: JobOption = None
) -> None:
    """Make a slice available again, or withdraw its notice."""
    from everstep.controller.cli.machine import return_slice

    with failing_well():
        return_slice(settings(), slice_id, job=job)


@app.command()
def controller() -> None:
    """Be the controller, in the foreground. Its end does not end any job."""
    from everstep.controller.cli.controller import run_controller

    with failing_well():
        code = run_controller(settings())
    raise typer.Exit(code)


@app.command()
def stop(
    everything: Annotated[
        bool, typer.Option("--all", help="Also kill the processes of all jobs.")
    ] = False,
) -> None:
    """End the controller. Jobs train on, unless --all ends their processes too."""
    from everstep.controller.cli.machine import stop_all

    with failing_well():
        stop_all(settings(), everything=everything)


@app.command()
def wait(
    name: Name,
    condition: Annotated[
        str,
        typer.Option("--for", help="phase=Succeeded, condition=Ready[=False] or delete."),
    ],
    timeout: Timeout = "30s",
) -> None:
    """Wait for something about a job."""
    from everstep.controller.cli.awaiting import wait_for_job

    with failing_well():
        wait_for_job(settings(), name, condition, timeout=timeout)


@app.command()
def top(
    name: Annotated[str | None, typer.Argument(help="Default: the only job.")] = None,
) -> None:
    """Watch a job: slices, step, loss, incarnation, and what is happening."""
    from everstep.controller.cli.running import watch_job

    with failing_well():
        watch_job(settings(), name)


@app.command("watch", hidden=True)
def watch_alias(name: Annotated[str | None, typer.Argument()] = None) -> None:
    """Same as top."""
    top(name)
