"""A run that a newer version has written, a program that wakes up after another has taken its run,
and clocks that jump."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import msgspec
import pytest

import everstep.runtime as es
from everstep.runtime.clock import SystemClock
from everstep.runtime.errors import Fenced, ManifestCorrupt
from everstep.runtime.storage.manifest import FORMAT, digest
from quick_folder import quick_folder
from tiny_parts import like, make_run, names_of, parts_of, read_all, save_next, step_of
from watched_disk import Operation, watched

RETENTION = es.Retention(latest=2)


@pytest.fixture
def run() -> Iterator[Path]:
    with quick_folder() as folder:
        made = folder / "run"
        make_run(made, RETENTION, 1, 2)
        yield made


def write_entry(run: Path, number: int, body: bytes) -> None:
    crc = int(google_crc32c.value(body))
    (run / f"_everstep/ledger/{number:020d}.json").write_bytes(
        b'{"entry":%b,"crc32c":"%08x"}\n' % (body, crc)
    )


def make_newer(run: Path, step: int) -> None:
    """The step as a version to come might write it, with all its digests."""
    (file,) = run.glob(f"step-{step:010d}-*/everstep.json")
    old = file.read_bytes()
    new = old.replace(b'"format":%d' % FORMAT, b'"format":%d' % (FORMAT + 1))
    assert new != old
    file.write_bytes(new)
    for entry in (run / "_everstep/ledger").iterdir():
        text = entry.read_bytes()
        if digest(old).encode() in text:
            body = bytes(msgspec.json.decode(text, type=dict[str, msgspec.Raw])["entry"])
            body = body.replace(digest(old).encode(), digest(new).encode())
            write_entry(run, int(entry.name.split(".")[0]), body)


def test_a_step_of_a_newer_version_is_refused_and_no_older_one_is_taken_for_it(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_newer(run, 2)
    with es.Checkpoints(run) as checkpoints:
        assert checkpoints.steps() == (1, 2)
        for act in (
            lambda: checkpoints.restore(like()),
            lambda: checkpoints.restore(like(), 2),
            lambda: checkpoints.metadata(2),
        ):
            with pytest.raises(ManifestCorrupt, match=f"format {FORMAT + 1}, of a newer version"):
                act()
        # Who asks for the older one by its number gets it.
        assert step_of(checkpoints.restore(like(), 1)) == 1
    assert not caplog.records


def test_a_ledger_with_entries_of_a_newer_version_is_refused_as_that(run: Path) -> None:
    number = len(list((run / "_everstep/ledger").iterdir())) + 1
    write_entry(run, number, b'{"type":"step pinned","number":%d,"step":2}' % number)
    with es.Checkpoints(run) as checkpoints:
        for act in (
            checkpoints.steps,
            lambda: checkpoints.restore(like()),
            lambda: checkpoints.save(3, parts_of(3)),
        ):
            with pytest.raises(ManifestCorrupt, match="a newer version of Everstep") as refused:
                act()
            assert f"{number:020d}.json" in str(refused.value)


@pytest.mark.slow
def test_a_program_that_wakes_up_within_its_save_after_another_took_the_run_changes_nothing(
    run: Path,
) -> None:  # G6
    """The newer program claims, saves and cleans up between any two operations of the older."""
    woke = ended_before = 0
    step, passing = 2, 0
    while ended_before < 2:
        is_asleep = threading.Event()
        left = passing
        passing += 4

        def sleep_once(
            operation: Operation, step: int = step, is_asleep: threading.Event = is_asleep
        ) -> None:
            nonlocal left
            if not operation.is_change or is_asleep.is_set():
                return
            left -= 1
            if left < 0:
                is_asleep.set()
                # Another program: what it does is not looked at.
                with es.Checkpoints(run, retention=RETENTION) as newer:
                    newer.save(step + 2, parts_of(step + 2)).wait(60)

        older = es.Checkpoints(run, retention=RETENTION)
        older.restore(like())
        older.claim()
        with watched(str(run), sleep_once):
            saved = older.save(step + 1, parts_of(step + 1))
            failure: es.CheckpointFailed | None = None
            try:
                saved.wait(60)
            except es.CheckpointFailed as error:
                failure = error
            try:
                older.wait()
            except es.CheckpointFailed as error:
                failure = failure or error
        older.close()
        steps = read_all(run)
        if not is_asleep.is_set():
            ended_before += 1
            assert steps[-1] == step + 1
            step += 1
            continue
        woke += 1
        # What the newer has written is there, whole, whatever the older did when it woke up.
        assert steps[-1] == step + 2
        if failure is None:
            assert step + 1 in steps, "it was told that its step exists"
        else:
            assert step + 1 not in steps
            assert isinstance(failure.__cause__, Fenced), names_of(failure)
        step += 2
    assert woke > 25
    save_next(run, step + 1, RETENTION)


class JumpingClock(SystemClock):
    """Its wall clock shows what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.shown_s = 1.8e9

    def unix_s(self) -> float:
        return self.shown_s


YEAR_S = 365 * 86400.0


@pytest.mark.parametrize(
    "jumps",
    [(0, -YEAR_S, YEAR_S), (YEAR_S, -2 * YEAR_S, 0), (-1.8e9, 1.8e9, -1.8e9)],
    ids=["back and forth", "forth and back", "to 1970"],
)
def test_a_clock_that_jumps_changes_no_order_and_drops_nothing_new(
    run: Path, jumps: tuple[float, ...]
) -> None:
    clock = JumpingClock()
    retention = es.Retention(latest=2, every_seconds=3600)
    with es.Checkpoints(run, retention=retention, clock=clock) as checkpoints:
        checkpoints.restore(like())
        for step, jump_s in enumerate(jumps, 3):
            clock.shown_s += jump_s
            checkpoints.save(step, parts_of(step)).wait(60)
            checkpoints.wait()
            steps = checkpoints.steps()
            assert steps == tuple(sorted(steps))
            assert steps[-2:] == (step - 1, step)
            assert step_of(checkpoints.restore(like())) == step
            assert checkpoints.metadata(step).committed_at_s == clock.shown_s
    assert read_all(run)[-1] == 5
    # The next program has a sound clock.
    save_next(run, 6, RETENTION)
