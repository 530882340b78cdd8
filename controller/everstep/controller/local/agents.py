"""What is run as the agent of a host: its command, its environment, its folder."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.controller.api.ids import HostId
from everstep.controller.api.spec import Container, JobSpec
from everstep.controller.local.addresses import host_address
from everstep.controller.local.errors import FieldRefused
from everstep.controller.local.folder import StateFolder
from everstep.controller.local.identity import MARK, Place, mark_of
from everstep.controller.local.records import JobRecord

INHERITED = (
    "CLOUDSDK_CONFIG",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_CLOUD_PROJECT",
    "HOME",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "PYTHONPATH",
    "SHELL",
    "STORAGE_EMULATOR_HOST",
    "TMPDIR",
    "TZ",
    "USER",
    "VIRTUAL_ENV",
)
"""What a container would have got from its image. Nothing that changes a training's numbers."""

INHERITED_PREFIXES = ("CUDA_", "LC_", "NVIDIA_", "XDG_")

_VARIABLE = re.compile(r"\$(\$\(\w+\)|\((\w+)\))")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnOrder:
    """Everything that the spawn of one agent needs."""

    host: HostId
    job_uid: str
    address: str
    port: int
    command: tuple[str, ...]
    environment: dict[str, str]
    working_dir: Path
    log: Path


def training_container(spec: JobSpec) -> Container:
    """Return the container that the agent runs in.

    Raises:
        FieldRefused: none has the name that `spec.runtime.container` gives.
    """
    containers = spec.template.spec.containers
    wanted = spec.runtime.container
    if wanted is None and containers:
        return containers[0]
    for container in containers:
        if container.name == wanted:
            return container
    names = ", ".join(container.name for container in containers) or "none"
    raise FieldRefused("spec.runtime.container", wanted, f"the name of a container: {names}")


def container_environment(container: Container, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the container's process, on top of a minimal inherited one."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    # `python` in a command means the interpreter that Everstep is installed for.
    own = str(Path(sys.executable).parent)
    kept["PATH"] = f"{own}{os.pathsep}{kept.get('PATH', os.defpath)}"
    for variable in container.env:
        kept[variable.name] = expand(variable.value, kept)
    return kept


def container_command(container: Container, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the container's whole command, with `$(NAME)` replaced as Kubernetes does."""
    return tuple(expand(word, environment) for word in (*container.command, *container.args))


def expand(word: str, environment: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by its value; `$$(NAME)` stands for itself, unknown names are kept."""

    def value(found: re.Match[str]) -> str:
        name = found.group(2)
        if name is None:
            return found.group(1)
        return environment.get(name, found.group(0))

    return _VARIABLE.sub(value, word)


def working_dir(container: Container, fallback: Path) -> Path:
    """Return where the container's process starts; absolute since the apply."""
    return Path(container.working_dir) if container.working_dir else fallback


def spawn_order(
    record: JobRecord, state: StateFolder, host: HostId, agent_command: tuple[str, ...]
) -> SpawnOrder:
    """Return how the agent of one host is started."""
    spec, uid = record.spec, record.metadata.uid
    folder = state.job(record.metadata.name)
    container = training_container(spec)
    environment = container_environment(container, os.environ)
    where = working_dir(container, folder.path)
    address = host_address(record.metadata.number, host)
    port = spec.runtime.agent_port
    command = (
        *agent_command,
        *("--channel", f"local:{folder.path}"),
        *("--job-uid", uid),
        *("--slice", str(host.slice)),
        *("--host", str(host.host)),
        *("--address", address),
        *("--port", str(port)),
        *("--coordinator-port", str(spec.runtime.coordinator_port)),
        *("--grace-s", str(spec.template.spec.termination_grace_period_seconds)),
        "--",
        *container_command(container, environment),
    )
    place = Place(job_uid=uid, slice=host.slice, host=host.host)
    environment |= {"PWD": str(where), MARK: mark_of(place, state.root)}
    return SpawnOrder(
        host=host,
        job_uid=uid,
        address=address,
        port=port,
        command=command,
        environment=environment,
        working_dir=where,
        log=folder.log(host),
    )
