"""Seeded stories with real processes: whatever is lost when, nothing changes.

Each seed draws losses of random kinds at random steps (`everstep.controller.cli.demo.story`), plays
them by the product's own verbs, and compares every loss and every byte of the parameters with an
undisturbed run. `make test` plays 30; `EVERSTEP_STORY_COUNT=300` plays more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STORY_COUNT = int(os.environ.get("EVERSTEP_STORY_COUNT", "30"))
STEPS = 110
TIMEOUT_S = 300.0


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of the undisturbed run, shared by all stories."""
    folder = tmp_path_factory.mktemp("undisturbed")
    program = (
        "from pathlib import Path; from everstep.controller.cli.demo.command import undisturbed;"
        f"undisturbed(program='tiny', steps={STEPS}, folder=Path({str(folder)!r}))"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=TIMEOUT_S, env=_environment(folder)
    )
    return folder / "undisturbed.json"


@pytest.mark.parametrize("seed", range(1, STORY_COUNT + 1))
def test_a_story_ends_as_if_nothing_had_happened(
    seed: int, undisturbed: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "everstep.controller.cli.main", "demo"),
            *("--seed", str(seed), "--program", "tiny", "--steps", str(STEPS)),
            *("--folder", str(tmp_path), "--reference", str(undisturbed)),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=_environment(undisturbed.parent),
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"


def _environment(folder: Path) -> dict[str, str]:
    """All stories run the same program, so they share what it compiles to."""
    return os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
