"""The power fails after any operation of a save: the old step or the new one is there, whole."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep.runtime as es
from power_cut import Disk, World
from quick_folder import quick_folder
from tiny_parts import make_run, parts_of, read_all, save_next
from watched_disk import Operation, watched

RETENTION = es.Retention(latest=2)


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as made:
        yield made


def recorded_save(run: Path, step: int) -> tuple[list[Operation], int]:
    """The changes that a program makes which saves one step, in their order; and how many of them
    were done when `wait` returned."""
    operations: list[Operation] = []
    lock = threading.Lock()

    def note(operation: Operation) -> None:
        if operation.is_change:
            with lock:
                operations.append(operation)

    with watched(str(run), note), es.Checkpoints(run, retention=RETENTION) as checkpoints:
        checkpoints.save(step, parts_of(step)).wait(60)
        # Some of the clean-up may be among them; then the promise is tried a little late.
        told = len(operations)
    return operations, told


@pytest.mark.slow
# That all arrives is a kill, and those are tried with real ones.
@pytest.mark.parametrize("world", [World.SYNCED, World.NAMES], ids=lambda world: world.value)
def test_a_power_cut_after_any_operation_leaves_the_old_step_or_the_new_one(
    folder: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    run = folder / "run"
    make_run(run, RETENTION, 1, 2)
    before = folder / "before"
    shutil.copytree(run, before)
    operations, told = recorded_save(run, 3)
    assert len(operations) > 140
    disk = Disk(str(run), before)
    for done, operation in enumerate(operations, 1):
        disk.do(operation, after=run)
        cut = folder / f"cut-{done}"
        disk.cut(cut, world)
        steps = read_all(cut)
        assert steps in ((1, 2), (1, 2, 3), (2, 3)), operation
        if done >= told:
            # What a program was told of outlives the cut.
            assert steps[-1] == 3, operation
        if done % 8 == 0 or operation.kind in ("link", "merge"):
            save_next(cut, 4, RETENTION)
        shutil.rmtree(cut)
    assert "passed over" not in caplog.text
