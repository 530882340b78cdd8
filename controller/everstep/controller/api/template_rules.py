"""Rules of the pod template: containers, their commands, environment and resources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from everstep.controller.api.problems import LABEL_LENGTH_MAX, SECONDS_MAX, Problems
from everstep.controller.api.quantity import parse_quantity
from everstep.controller.api.spec import Container, JobSpec

_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


def judge_template(found: Problems, spec: JobSpec) -> None:
    """Judge the pod template, and which of its containers runs the agent."""
    at = "spec.template.spec"
    grace = spec.template.spec.termination_grace_period_seconds
    found.count(f"{at}.terminationGracePeriodSeconds", grace, least=0, most=int(SECONDS_MAX))
    containers = spec.template.spec.containers
    if not containers:
        found.add(f"{at}.containers", containers, "at least one container")
    names = [container.name for container in containers]
    for index, container in enumerate(containers):
        where = f"{at}.containers[{index}]"
        if container.name in names[:index]:
            found.add(f"{where}.name", container.name, "a name of its own")
        else:
            found.label(f"{where}.name", container.name, LABEL_LENGTH_MAX)
        _judge_container(found, where, container)
    chosen = spec.runtime.container
    if chosen is None and len(set(names)) > 1:
        expected = f"the container that runs the agent, one of {', '.join(names)}"
        found.add("spec.runtime.container", None, expected)
    elif chosen is not None and chosen not in names:
        found.add("spec.runtime.container", chosen, f"one of {', '.join(names) or 'no container'}")
    trainer = select_container(spec)
    if trainer is not None and not (trainer.command or trainer.args):
        where = f"{at}.containers[{names.index(trainer.name)}].command"
        found.add(where, trainer.command, "the program to run, for example [python, train.py]")


def select_container(spec: JobSpec) -> Container | None:
    """Return the container that runs the agent: the named one, or the only one."""
    containers = spec.template.spec.containers
    if spec.runtime.container is None:
        return containers[0] if len(containers) == 1 else None
    named = [one for one in containers if one.name == spec.runtime.container]
    return named[0] if named else None


def _judge_container(found: Problems, where: str, container: Container) -> None:
    for field, words in (("command", container.command), ("args", container.args)):
        for index, word in enumerate(words):
            if "\0" in word:
                found.add(f"{where}.{field}[{index}]", word, "text without a NUL character")
    if container.command and not container.command[0].strip():
        found.add(f"{where}.command[0]", container.command[0], "the name of a program")
    seen: set[str] = set()
    for index, variable in enumerate(container.env):
        path = f"{where}.env[{index}]"
        if not _ENV_NAME.fullmatch(variable.name):
            expected = "letters, digits, '_', '-' and '.', not beginning with a digit"
            found.add(f"{path}.name", variable.name, expected)
        elif variable.name in seen:
            found.add(f"{path}.name", variable.name, "each variable once")
        if "\0" in variable.value:
            found.add(f"{path}.value", variable.value, "text without a NUL character")
        seen.add(variable.name)
    for kind in ("limits", "requests"):
        amounts: object = container.resources.get(kind)
        if isinstance(amounts, Mapping):
            for name, amount in cast("Mapping[object, object]", amounts).items():
                _judge_quantity(found, f"{where}.resources.{kind}.{name}", amount)
        elif amounts is not None:
            found.add(f"{where}.resources.{kind}", amounts, "a mapping of quantities")


def _judge_quantity(found: Problems, path: str, value: object) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or parse_quantity(value) is None:
        found.add(path, value, "a quantity, for example 500m, 2 or 16Gi")
