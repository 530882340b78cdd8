"""Seeded stories with real processes: whatever is lost when, nothing changes.

Each seed draws losses of random kinds at random steps (`everstep.controller.cli.demo.story`), plays
them by the product's own verbs, and compares every loss and every byte of the parameters with an
undisturbed run. `make test` plays 30; `EVERSTEP_STORY_COUNT=300` plays more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

STORY_COUNT = int(os.environ.get("EVERSTEP_STORY_COUNT", "30"))
STORIES_AT_ONCE = 1
STEPS = 100
TIMEOUT_S = 300.0

Told = subprocess.CompletedProcess[str]


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


@pytest.fixture(scope="session")
def stories(
    undisturbed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[dict[int, Future[Told]]]:
    """All stories, a few at a time: most of a story is waiting for steps and for deadlines."""
    folder = tmp_path_factory.mktemp("stories")
    pool = ThreadPoolExecutor(STORIES_AT_ONCE)
    seeds = range(1, STORY_COUNT + 1)
    yield {seed: pool.submit(_tell, seed, undisturbed, folder / str(seed)) for seed in seeds}
    pool.shutdown(wait=True, cancel_futures=True)


@pytest.mark.parametrize("seed", range(1, STORY_COUNT + 1))
def test_a_story_ends_as_if_nothing_had_happened(
    seed: int, stories: dict[int, Future[Told]]
) -> None:
    told = stories[seed].result(timeout=STORY_COUNT * TIMEOUT_S)
    assert told.returncode == 0, f"seed {seed}\n{told.stdout}\n{told.stderr}"


def _tell(seed: int, undisturbed: Path, folder: Path) -> Told:
    return subprocess.run(
        [
            *(sys.executable, "-m", "everstep.controller.cli.main", "demo"),
            *("--seed", str(seed), "--program", "tiny", "--steps", str(STEPS)),
            *("--folder", str(folder), "--reference", str(undisturbed)),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=_environment(undisturbed.parent),
    )


def _environment(folder: Path) -> dict[str, str]:
    """All stories run the same program, so they share what it compiles to."""
    return os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
