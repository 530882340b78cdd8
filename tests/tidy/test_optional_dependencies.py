"""A controller image has no jax in it, a training image no Kubernetes client.

Each part is imported in an interpreter of its own in which what it must not need cannot be found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.tidy.tree import PACKAGES, module_name

CONTROLLER, RUNTIME = (
    sorted(module_name(path) for path in package.rglob("*.py")) for package in PACKAGES
)
EXAMPLES = [name for name in RUNTIME if name.startswith("everstep.runtime.examples.")]
API = [name for name in CONTROLLER if name.startswith("everstep.controller.api")]

ONLY_CONTROLLER = ["kubernetes", "prometheus_client", "yaml"]
ONLY_RUNTIME = ["google", "google_crc32c", "jax", "jaxlib", "ml_dtypes", "numpy", "tensorstore"]
ONLY_EXAMPLES = ["flax", "grain", "optax", "orbax"]
BOTH = ["aiohttp", "asyncinotify", "psutil", "rich", "structlog", "tenacity", "typer"]

PROBE = """
import importlib, importlib.abc, json, sys

modules, blocked = json.loads(sys.argv[1]), frozenset(json.loads(sys.argv[2]))

class Wall(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in blocked or name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)
        return None

sys.meta_path.insert(0, Wall())
for module in modules:
    try:
        importlib.import_module(module)
    except ImportError as error:
        sys.exit(f"{module} cannot be imported: {error}")
"""


def import_without(modules: Iterable[str], blocked: Iterable[str]) -> str:
    """Return what went wrong, or an empty text."""
    run = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(list(modules)), json.dumps(list(blocked))],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return run.stderr if run.returncode else ""


def test_the_wall_holds() -> None:
    assert "jax is not installed here" in import_without(["jax"], ["jax"])


def test_the_contract_needs_msgspec_alone() -> None:
    blocked = [*BOTH, *ONLY_CONTROLLER, *ONLY_RUNTIME, *ONLY_EXAMPLES]
    assert not import_without(API, blocked)


def test_the_controller_needs_nothing_of_the_runtime() -> None:
    blocked = [*ONLY_RUNTIME, *ONLY_EXAMPLES, "everstep.runtime"]
    assert not import_without(CONTROLLER, blocked)


def test_the_runtime_needs_nothing_of_the_controller_but_the_contract() -> None:
    modules = [name for name in RUNTIME if name not in EXAMPLES]
    assert not import_without(modules, [*ONLY_CONTROLLER, *ONLY_EXAMPLES])


@pytest.mark.parametrize(
    "module",
    [
        name
        for name in RUNTIME
        if name in {"everstep.runtime", "everstep.runtime.agent.main"}
        or name.startswith("everstep.runtime.agent.supervisor")
    ],
)
def test_an_agent_needs_no_jax(module: str) -> None:
    # An agent that never imports jax cannot hold a backend, and starts in a tenth of the time.
    assert not import_without([module], ["jax", "jaxlib", *ONLY_EXAMPLES, *ONLY_CONTROLLER])
