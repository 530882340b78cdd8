"""What one machine cannot honour of a job, and what is not there on it.

Judged before anything is written, so that a mistake costs nothing.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from everstep.controller.api.spec import JobSpec
from everstep.controller.local.addresses import HOST_COUNT_MAX, SLICE_COUNT_MAX
from everstep.controller.local.agents import (
    container_command,
    container_environment,
    training_container,
    working_dir,
)
from everstep.controller.local.checkpoint_folder import check_checkpoint_folder
from everstep.controller.local.errors import FieldRefused

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def check_for_machine(spec: JobSpec, inherited: Mapping[str, str]) -> tuple[FieldRefused, ...]:
    """Return everything for which this machine refuses a job. Empty means none.

    Args:
        spec: already accepted by `api.validate`, its `workingDir` absolute.
        inherited: environment of this process.
    """
    found: list[FieldRefused] = []
    slices = spec.slices
    if slices.count_max > SLICE_COUNT_MAX:
        expected = f"at most {SLICE_COUNT_MAX} slices on one machine"
        field = "spec.slices.desired" if slices.max is None else "spec.slices.max"
        found.append(FieldRefused(field, slices.count_max, expected))
    if slices.hosts_per_slice > HOST_COUNT_MAX:
        expected = f"at most {HOST_COUNT_MAX} hosts per slice on one machine"
        found.append(FieldRefused("spec.slices.hostsPerSlice", slices.hosts_per_slice, expected))
    found.extend(_check_program(spec, inherited))
    folder = check_checkpoint_folder(spec.checkpoint.uri)
    if folder is not None:
        found.append(folder)
    return tuple(found)


def _check_program(spec: JobSpec, inherited: Mapping[str, str]) -> list[FieldRefused]:
    container = training_container(spec)
    index = spec.template.spec.containers.index(container)
    at = f"spec.template.spec.containers[{index}]"
    where = working_dir(container, Path.cwd())
    if not where.is_dir():
        return [FieldRefused(f"{at}.workingDir", str(where), "a folder that exists")]
    environment = container_environment(container, inherited)
    command = container_command(container, environment)
    if not command:
        return [FieldRefused(f"{at}.command", [], "the program to run")]
    program = command[0]
    if os.sep in program:
        path = where / program
        if not (path.is_file() and os.access(path, os.X_OK)):
            return [FieldRefused(f"{at}.command[0]", program, "a program that can be run")]
    elif shutil.which(program, path=environment.get("PATH")) is None:
        return [FieldRefused(f"{at}.command[0]", program, "a program that is on the PATH")]
    script = _script(command)
    if script is not None and not (where / script).exists():
        position = command.index(script)
        count = len(container.command)
        field = f"command[{position}]" if position < count else f"args[{position - count}]"
        return [FieldRefused(f"{at}.{field}", script, f"a script that exists in {where}")]
    return []


def _script(command: Sequence[str]) -> str | None:
    """Return the script that a Python command line runs, or None if it runs none."""
    if not _PYTHON.fullmatch(Path(command[0]).name):
        return None
    words = iter(command[1:])
    for word in words:
        if word in _OPTIONS_WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return word
        elif word.startswith("--"):
            continue
        elif {"m", "c"} & set(word[1:]) or word == "-":
            return None
    return None
