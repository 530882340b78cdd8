"""Programs killed while they save: the old step or the new one is there, whole, and the next save
works. Each is a real process, and really killed."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep.runtime as es
from quick_folder import quick_folder
from saving_server import KEPT, SavingServer, saving_server
from tiny_parts import make_run, read_all, save_next

pytestmark = [pytest.mark.processes, pytest.mark.slow]

RETENTION = es.Retention(latest=KEPT)
KILLS_AT_RANDOM = 60
RUNS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[SavingServer]:
    with saving_server() as made:
        yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as made:
        yield made


@pytest.fixture
def run(folder: Path, server: SavingServer) -> Path:
    """Two steps, and the draft of a program that was killed: all that a save can meet."""
    made = folder / "run"
    make_run(made, RETENTION, 1, 2)
    killed = server.save(made, 3, kill_before=60)
    assert killed.was_killed
    assert len(list(made.glob("step-*"))) == 3
    return made


def test_killed_before_any_operation_of_a_claim_a_save_and_a_clean_up(
    folder: Path, run: Path, server: SavingServer, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = folder / "undisturbed"
    shutil.copytree(run, undisturbed)
    total = server.save(undisturbed, 3, count=1).operations
    assert total > 150
    seen: Counter[str] = Counter()
    new_at: list[int] = []
    for number in range(total):
        copy = folder / f"run-{number}"
        shutil.copytree(run, copy)
        ended = server.save(copy, 3, count=1, kill_before=number)
        assert ended.was_killed, number
        seen[ended.at.split()[0]] += 1
        steps = read_all(copy)
        # 1 goes when 3 is there.
        assert steps in ((1, 2), (1, 2, 3), (2, 3)), ended.at
        assert set(ended.committed) <= set(steps)
        if steps[-1] == 3:
            new_at.append(number)
        save_next(copy, 4, RETENTION)
        shutil.rmtree(copy)
    # From one operation on it is the new step, and it stays so.
    assert new_at == list(range(new_at[0], total))
    assert seen.keys() >= {"create", "write", "sync", "link", "rename", "mkdir", "merge"}
    assert seen["unlink"] + seen["rmdir"] > 40
    assert "passed over" not in caplog.text


@pytest.mark.parametrize("seed", range(RUNS))
def test_killed_at_any_time(
    folder: Path, server: SavingServer, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(seed)
    run = folder / "run"
    make_run(run, RETENTION, 1, 2)
    step = 2
    left: Counter[int] = Counter()
    window_s = 0.2
    for _ in range(KILLS_AT_RANDOM // RUNS):
        ended = server.save(run, step + 1, kill_after_s=dice.uniform(0.01, window_s))
        assert ended.was_killed
        folders = len(list(run.glob("step-*")))
        left[folders] += 1
        # However quick this machine is, some kills come before anything is written, and some later.
        window_s *= 1.4 if folders == KEPT else 0.8
        steps = read_all(run)
        # What was said to be there is there; at most one more is, before it could be said.
        reached = max((step, *ended.committed))
        assert steps[-1] in (reached, reached + 1)
        assert KEPT <= len(steps) <= KEPT + 1
        step = steps[-1] + 1
        save_next(run, step, RETENTION)
    assert len(left) > 1, "the kills hit different moments"
    assert "passed over" not in caplog.text
