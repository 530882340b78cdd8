"""A file with jobs in it: read, resolved against its folder, judged, before anything happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from everstep.controller.api.codec import decode_job
from everstep.controller.api.errors import SpecError
from everstep.controller.api.spec import MultiSliceJob
from everstep.controller.cli.failure import CommandFailed, JobInvalid
from everstep.controller.local.checks import check_for_machine


class _Loader(yaml.SafeLoader):
    """YAML as it is meant: a key that is there twice is a mistake, not a choice of the last."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: set[object] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} already set in map", key_node.start_mark
            )
        seen.add(key)
    return cast("dict[Any, Any]", loader.construct_mapping(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_jobs(source: str) -> tuple[MultiSliceJob, ...]:
    """Read and judge all jobs of a file.

    Args:
        source: its path, or `-` for standard input.

    Raises:
        CommandFailed: the file is not there, is no YAML (with the line), has no job in it, or one
            of its jobs cannot be accepted (`JobInvalid`, with every problem). Nothing was written.
    """
    folder = Path.cwd() if source == "-" else Path(source).absolute().parent
    documents = [one for one in _parse(_read(source), source) if one is not None]
    if not documents:
        raise CommandFailed("error: no objects passed to apply")
    jobs = tuple(_judge(document, folder) for document in documents)
    names = [job.metadata.name for job in jobs]
    for name in names:
        if names.count(name) > 1:
            raise CommandFailed(f'error: {source}: the job "{name}" is there more than once')
    return jobs


def _read(source: str) -> str:
    if source == "-":
        return sys.stdin.read()
    try:
        return Path(source).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CommandFailed(f'error: the path "{source}" does not exist') from None
    except IsADirectoryError:
        raise CommandFailed(f'error: the path "{source}" is a folder, expected a file') from None
    except UnicodeDecodeError as error:
        raise CommandFailed(f"error: error parsing {source}: not UTF-8: {error}") from None
    except OSError as error:
        raise CommandFailed(f'error: the path "{source}": {error.strerror}') from None


def _parse(text: str, source: str) -> list[Any]:
    try:
        return list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f"line {mark.line + 1}: "
        what = error.problem or error.context or "cannot be read"
        raise CommandFailed(f"error: error parsing {source}: yaml: {line}{what}") from None
    except RecursionError:
        raise CommandFailed(
            f"error: error parsing {source}: yaml: nested too deep to be read; a job has a dozen "
            "levels"
        ) from None
    except yaml.YAMLError as error:
        raise CommandFailed(f"error: error parsing {source}: yaml: {error}") from None


def _judge(document: object, folder: Path) -> MultiSliceJob:
    name = _name(document)
    try:
        job = decode_job(_resolve(document, folder))
    except SpecError as error:
        raise JobInvalid(name, tuple(str(problem) for problem in error.problems)) from None
    refused = check_for_machine(job.spec, os.environ)
    if refused:
        raise JobInvalid(name, tuple(str(one) for one in refused))
    if isinstance(document, dict) and "status" in document:
        print(
            f'Warning: multislicejob "{name}": status is passed over: the controller writes it',
            file=sys.stderr,
        )
    return job


def _name(document: object) -> str:
    metadata = document.get("metadata") if isinstance(document, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def _resolve(document: object, folder: Path) -> Mapping[str, Any]:
    """Make relative paths absolute: what runs later does not know where the file lay.

    What has not the expected shape is left for `decode_job` to refuse in its own words.
    """
    if not isinstance(document, dict):
        return cast("Mapping[str, Any]", document)
    copied: dict[str, Any] = _copy(document)
    spec = copied.get("spec")
    if not isinstance(spec, dict):
        return copied
    checkpoint = spec.get("checkpoint")
    if isinstance(checkpoint, dict):
        uri = checkpoint.get("uri")
        if isinstance(uri, str) and uri.strip() == uri and uri and "://" not in uri:
            checkpoint["uri"] = os.path.normpath(folder / uri)
    template = spec.get("template")
    pod = template.get("spec") if isinstance(template, dict) else None
    containers = pod.get("containers") if isinstance(pod, dict) else None
    for container in containers if isinstance(containers, list) else ():
        if isinstance(container, dict):
            given = container.get("workingDir")
            if given is None or isinstance(given, str):
                container["workingDir"] = os.path.normpath(folder / (given or "."))
    return copied


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_copy(one) for one in value]
    return value
