from __future__ import annotations

import subprocess
import sys
import tomllib
from typing import cast

import grimp
import pytest
from importlinter.configuration import configure

from tests.tidy.contracts import ForbiddenWherePresent
from tests.tidy.tree import PACKAGES, ROOT, SOURCE_ROOTS, module_name, product_files

VAGUE_NAMES = frozenset({"common", "helper", "helpers", "misc", "util", "utils"})


PLANNED = frozenset({"everstep.runtime.loop.recovery", "everstep.runtime.snapshot.cadence"})
"""Pure modules that the contract names before they are written; each is held once it exists."""


def test_every_import_follows_the_arrows() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
            "--no-logo",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_room_has_a_name_that_says_nothing() -> None:
    vague = [
        part
        for path in product_files()
        for part in path.relative_to(ROOT).with_suffix("").parts
        if part in VAGUE_NAMES
    ]
    assert not vague, "say what lives there instead"


def test_the_namespace_itself_has_no_module() -> None:
    assert not [root for root in SOURCE_ROOTS if (root / "everstep" / "__init__.py").exists()]


def test_every_folder_with_code_is_a_package() -> None:
    missing = {
        str(path.parent.relative_to(ROOT))
        for package in PACKAGES
        for path in package.rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert not missing, "add an __init__.py that says what may live there"


def test_both_packages_are_typed() -> None:
    assert all((package / "py.typed").exists() for package in PACKAGES)


def _purity_options() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        linter = tomllib.load(file)["tool"]["importlinter"]
    contracts = cast("list[dict[str, object]]", linter["contracts"])
    return next(contract for contract in contracts if contract["id"] == "purity")


def _purity_contract() -> ForbiddenWherePresent:
    return ForbiddenWherePresent(
        name="purity",
        session_options={
            "root_packages": ["everstep.controller", "everstep.runtime"],
            "include_external_packages": True,
        },
        contract_options=_purity_options(),
    )


def _graph(*imports: tuple[str, str]) -> grimp.ImportGraph:
    graph = grimp.ImportGraph()
    for name in ("everstep.controller", "everstep.runtime"):
        graph.add_module(name)
    for importer, imported in imports:
        graph.add_module(importer)
        graph.add_module(imported, is_squashed="." not in imported)
        graph.add_import(
            importer=importer, imported=imported, line_number=1, line_contents="import"
        )
    return graph


@pytest.fixture(autouse=True)
def contracts_ready() -> None:
    # A contract reports its progress through what the command line would have set up.
    configure()


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param([("everstep.controller.core.plan", "time")], id="direct"),
        pytest.param(
            [
                ("everstep.runtime.agent.session", "everstep.runtime.clock"),
                ("everstep.runtime.clock", "time"),
            ],
            id="through-another-module",
        ),
    ],
)
def test_a_module_that_decides_is_refused_a_clock(imports: list[tuple[str, str]]) -> None:
    graph = _graph(*imports)
    for name in ("everstep.controller.core", "everstep.controller.api", "everstep.runtime.layout"):
        graph.add_module(name)
    assert not _purity_contract().check(graph, verbose=False).kept


def test_a_module_that_acts_may_have_a_clock() -> None:
    graph = _graph(("everstep.controller.reconcile.driver", "time"))
    assert _purity_contract().check(graph, verbose=False).kept


def test_every_module_that_the_contract_calls_pure_exists_or_is_planned() -> None:
    named = cast("list[str]", _purity_options()["source_modules"])
    present = {module_name(path) for path in product_files()}
    missing = {name for name in named if name not in present}
    assert missing <= PLANNED, "a pure module was renamed or removed: follow it in pyproject.toml"
