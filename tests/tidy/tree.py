"""The files of the project, as the tidy tests see them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = (ROOT / "controller", ROOT / "runtime")
PACKAGES = (
    ROOT / "controller" / "everstep" / "controller",
    ROOT / "runtime" / "everstep" / "runtime",
)


def product_files() -> list[Path]:
    """All Python files that are shipped, sorted."""
    return sorted(path for root in SOURCE_ROOTS for path in root.rglob("*.py"))


def python_files() -> list[Path]:
    """All Python files: the product, the tests and the benchmarks, sorted."""
    beside = (path for part in ("tests", "benchmarks") for path in (ROOT / part).rglob("*.py"))
    return sorted([*product_files(), *beside])


def pages() -> list[Path]:
    """All Markdown pages, sorted."""
    inside = (
        path
        for part in ("docs", "manifests", "benchmarks", "tests")
        for path in (ROOT / part).rglob("*.md")
    )
    return sorted([*ROOT.glob("*.md"), *inside])


def kept_files() -> Iterator[Path]:
    """Every file that git keeps or would keep; without git, every file outside hidden folders."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0:
        names = sorted(set(listing.stdout.decode().split("\0")) - {""})
        yield from (path for name in names if (path := ROOT / name).is_file())
        return
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.is_file() and not any(part.startswith(".") for part in parts[:-1]):
            yield path


def module_name(path: Path) -> str:
    """`everstep.controller.api.ids` for the file that holds it."""
    for root in SOURCE_ROOTS:
        if path.is_relative_to(root):
            parts = list(path.relative_to(root).with_suffix("").parts)
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def relative(path: Path) -> str:
    """The path as people write it, from the project's root."""
    return path.relative_to(ROOT).as_posix()
