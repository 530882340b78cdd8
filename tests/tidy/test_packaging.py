from __future__ import annotations

import configparser
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT, SOURCE_ROOTS


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that was built from it, without a network."""
    folder = tmp_path_factory.mktemp("dist")
    run = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def wheel_names(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def _sources() -> set[str]:
    """What a wheel should hold, by its path inside it."""
    return {
        path.relative_to(root).as_posix()
        for root in SOURCE_ROOTS
        for path in (root / "everstep").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_sources_and_nothing_else(wheel_names: set[str]) -> None:
    shipped = {name for name in wheel_names if ".dist-info/" not in name}
    assert shipped == _sources()


def test_the_wheel_leaves_the_namespace_open(wheel_names: set[str]) -> None:
    assert "everstep/__init__.py" not in wheel_names


def test_the_wheel_carries_its_licence(wheel_names: set[str]) -> None:
    assert [name for name in wheel_names if name.endswith("/licenses/LICENSE")]


def test_the_programs_of_the_wheel_exist(built: Path, wheel_names: set[str]) -> None:
    (wheel,) = built.glob("*.whl")
    (listing,) = (name for name in wheel_names if name.endswith("entry_points.txt"))
    parser = configparser.ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        parser.read_string(archive.read(listing).decode())
    programs = dict(parser["console_scripts"])
    assert set(programs) == {"everstep", "everstep-agent"}
    for target in programs.values():
        module = target.partition(":")[0]
        assert module.replace(".", "/") + ".py" in wheel_names


def test_the_sdist_can_run_its_own_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        "Makefile",
        "README.md",
        "pyproject.toml",
        "requirements/demo.txt",
        "requirements/dev.txt",
        "tests/tidy/test_packaging.py",
    }
    assert needed <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".everstep")]
