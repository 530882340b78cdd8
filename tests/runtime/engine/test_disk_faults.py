"""A disk that is full, read-only, over its quota, broken or slow, at every operation of a save."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import types
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import tenacity.nap

import everstep.runtime as es
from everstep.runtime.errors import ConfigurationError, StorageRefused, StorageUnavailable
from everstep.runtime.storage.ledger import EntryUncertain
from everstep.runtime.storage.posix import translated
from quick_folder import quick_folder
from tiny_parts import like, make_run, names_of, parts_of, read_all, save_next, step_of
from waiting import wait_for
from watched_disk import Operation, watched

RETENTION = es.Retention(latest=2)
GROWS = ("create", "write", "sync", "rename", "link", "mkdir", "merge")
FAULTS = {
    "full": (errno.ENOSPC, GROWS, StorageRefused, "no space left on the device"),
    "over quota": (errno.EDQUOT, GROWS, StorageRefused, "the disk quota is used up"),
    "read-only": (errno.EROFS, (*GROWS, "unlink", "rmdir"), StorageRefused, "read-only"),
    "broken": (errno.EIO, None, StorageUnavailable, "Input/output error"),
}


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as made:
        yield made


@pytest.fixture(autouse=True)
def no_pause_between_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(_: float) -> None:
        return

    monkeypatch.setattr(tenacity.nap, "time", types.SimpleNamespace(sleep=at_once))


class Breaking:
    """Lets so many operations pass, and then fails those of some kinds until it is mended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: int | None = None
        self._number = 0
        self._kinds: tuple[str, ...] | None = None
        self.first: Operation | None = None
        """The operation that failed first."""

    def break_after(self, passing: int, number: int, kinds: tuple[str, ...] | None) -> None:
        with self._lock:
            self._left, self._number, self._kinds = passing, number, kinds
            self.first = None

    def mend(self) -> None:
        with self._lock:
            self._left = None

    def __call__(self, operation: Operation) -> None:
        with self._lock:
            if self._left is None:
                return
            if self._left > 0:
                self._left -= 1
                return
            if self._kinds is not None and operation.kind not in self._kinds:
                return
            self.first = self.first or operation
            number = self._number
        error = OSError(number, os.strerror(number), operation.path)
        # What the array library meets, it says in words that are translated within the merge.
        raise translated(error, operation.path) if operation.kind == "merge" else error


@contextlib.contextmanager
def broken_run(run: Path) -> Generator[tuple[es.Checkpoints, Breaking]]:
    disk = Breaking()
    with watched(str(run), disk), es.Checkpoints(run, retention=RETENTION) as checkpoints:
        yield checkpoints, disk
        disk.mend()


def failure_of(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except (es.CheckpointFailed, StorageRefused, StorageUnavailable) as error:
        return error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_storage_does_not_take_is_said_and_the_others_stay_whole(
    folder: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    number, kinds, expected, words = FAULTS[fault]
    run = folder / "run"
    make_run(run, RETENTION, 1, 2)
    seen: Counter[str] = Counter()
    step = 2
    with broken_run(run) as (checkpoints, disk):
        # Each operation has its turn under one of the faults.
        start, passed = list(FAULTS).index(fault), 0
        for passing in range(start, 400, 4):
            before = checkpoints.steps()
            caplog.clear()
            step += 1
            disk.break_after(passing, number, kinds)

            def save(step: int = step) -> None:
                checkpoints.save(step, parts_of(step)).wait(60)

            failure = failure_of(save)
            failure = failure_of(checkpoints.wait) or failure
            first = disk.first
            disk.mend()
            if first is None:
                passed += 1
                if passed == 2:
                    break
                continue
            seen[first.kind] += 1
            after = checkpoints.steps()
            if failure is None:
                # What failed was the clean-up: said, and no failure of the step.
                assert after[-1] == step, first
                assert "old steps of" in caplog.text, first
            else:
                cause = failure.__cause__ if isinstance(failure, es.CheckpointFailed) else failure
                assert isinstance(cause, expected | EntryUncertain), first
                assert words in names_of(failure), first
                assert str(run) in names_of(failure), first
                if isinstance(failure, es.CheckpointFailed):
                    assert failure.step == step
                if after != before:
                    # Only the sync of the ledger's entry, or what is between, has failed.
                    assert "ledger" in first.path, first
                    assert "may exist or not" in names_of(failure), first
            assert set(before[-1:]) <= set(after)
            assert step_of(checkpoints.restore(like())) == after[-1]
            step += 1
            checkpoints.save(step, parts_of(step)).wait(60)
            checkpoints.wait()
            assert checkpoints.steps()[-1] == step
        assert passed == 2, "the last operations were reached"
    assert sum(seen.values()) > 40
    assert read_all(run)[-1] == step
    # What could not be deleted by then, the next program deletes.
    save_next(run, step + 1, RETENTION)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_cannot_be_taken_is_refused_before_anything_is_copied(
    folder: Path, fault: str
) -> None:
    number, kinds, expected, words = FAULTS[fault]
    run = folder / "run"
    make_run(run, RETENTION, 1, 2)
    for passing in range(0, 40, 3):
        with broken_run(run) as (checkpoints, disk):
            disk.break_after(passing, number, kinds)
            failure = failure_of(lambda c=checkpoints: c.claim())  # type: ignore[misc]
            is_reached = disk.first is not None
            disk.mend()
            assert (failure is not None) == is_reached
            if failure is not None:
                assert isinstance(failure, expected | EntryUncertain)
                assert words in names_of(failure)
                assert str(run) in names_of(failure)
        assert read_all(run) == (1, 2)
        if not is_reached:
            return
    raise AssertionError("the end of a claim was not reached")


def test_a_read_error_is_no_absence(folder: Path) -> None:
    """No older step is taken for a step that cannot be read now, and nobody starts anew."""
    run = folder / "run"
    make_run(run, RETENTION, 1, 2)
    reached = 0
    for passing in range(300):
        with broken_run(run) as (reader, disk):
            disk.break_after(passing, errno.EIO, None)
            found: list[int] = []

            def restore(reader: es.Checkpoints = reader, found: list[int] = found) -> None:
                found.append(step_of(reader.restore(like())))

            failure = failure_of(restore)
            if disk.first is None:
                assert found == [2]
                break
            assert isinstance(failure, StorageUnavailable), disk.first
            assert str(run) in names_of(failure)
            reached += 1
            with pytest.raises(StorageUnavailable):
                reader.steps()
            disk.mend()
            assert step_of(reader.restore(like())) == 2
    assert reached > 20


def test_a_passing_fault_of_the_ledger_or_a_small_file_is_nobodys_business(folder: Path) -> None:
    run = folder / "run"
    make_run(run, RETENTION, 1, 2)
    failed: set[str] = set()

    def once(operation: Operation) -> None:
        # The first try of each kind: of a ledger's entry, a small file, a look at the ledger.
        is_data = "/d/" in operation.path or operation.path.endswith("manifest.ocdbt")
        # What a commit looks for in an item's folder is a part of its data's way, and not repeated.
        is_data = is_data or (operation.kind == "list" and "/step-" in operation.path)
        key = operation.kind
        if operation.kind in ("create", "rename", "link", "list") and not is_data:
            if key not in failed:
                failed.add(key)
                raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)

    with watched(str(run), once), es.Checkpoints(run, retention=RETENTION) as checkpoints:
        checkpoints.save(3, parts_of(3)).wait(60)
    assert read_all(run) == (2, 3)
    assert failed == {"create", "rename", "link", "list"}


def test_a_stuck_disk_stops_the_training_only_when_two_steps_wait_for_it(folder: Path) -> None:
    run = folder / "run"
    make_run(run, RETENTION, 1)
    opened = threading.Event()
    stuck = threading.Event()

    def wait_there(operation: Operation) -> None:
        if stuck.is_set() and operation.is_change:
            assert opened.wait(60)

    with watched(str(run), wait_there), es.Checkpoints(run, deadline_s=1.0) as checkpoints:
        checkpoints.save(2, parts_of(2)).wait(60)
        checkpoints.wait()
        stuck.set()
        # The same memory as a save after it has: what was copied stays as it was.
        state = parts_of(3)
        third = checkpoints.save(3, state)
        state.model["w"][:] = -1
        with pytest.raises(TimeoutError):
            third.wait(0.05)
        fourth = checkpoints.save(4, parts_of(4))
        assert not third.done()
        with pytest.raises(StorageUnavailable, match="storage took more than 1 s"):
            checkpoints.save(5, parts_of(5))
        with pytest.raises(TimeoutError, match="not written after"):
            checkpoints.wait()
        assert checkpoints.steps() == (1, 2)
        opened.set()
        third.wait(60)
        fourth.wait(60)
        checkpoints.save(6, parts_of(6)).wait(60)
    wait_for(lambda: read_all(run) == (3, 4, 6), what="the steps of a disk that goes on")


def test_a_folder_that_is_a_file_is_refused(folder: Path) -> None:
    (folder / "run").write_text("mine")
    with pytest.raises(ConfigurationError, match="a file"):
        es.Checkpoints(folder / "run")
