"""The ledger over real stores: fencing, races, damage."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from checkpoints import claimed
from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.errors import (
    Fenced,
    InvariantViolated,
    ManifestCorrupt,
    StorageRefused,
    StorageUnavailable,
)
from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.ledger import FOLDER, RunLedger, entry_path
from everstep.runtime.storage.memory import MemoryStore
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.posix import PosixStore
from everstep.runtime.storage.store import Store


@pytest.fixture(params=["posix", "memory", "gcs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "gcs":
        return open_store(request.getfixturevalue("bucket_environment"))
    return PosixStore(str(tmp_path)) if request.param == "posix" else MemoryStore()


def append(ledger: RunLedger, step: int) -> Commit:
    return ledger.append_commit(
        step=Step(step), folder=f"step-{step}", digest="sha256:0", committed_at_s=float(step)
    )


def steps(store: Store) -> list[int]:
    ledger = RunLedger(store)
    ledger.refresh()
    return [commit.step for commit in ledger.commits()]


def test_what_was_appended_is_there_for_a_fresh_reader(store: Store) -> None:
    ledger = claimed(store)
    append(ledger, 10)
    append(ledger, 20)
    assert steps(store) == [10, 20]
    ledger.append_dropped(Step(10))
    assert steps(store) == [20]
    reader = RunLedger(store)
    reader.refresh()
    assert reader.newest_incarnation == 1
    assert reader.commits() == ledger.commits()


def test_a_claim_is_idempotent(store: Store) -> None:
    first = claimed(store, 3)
    assert claimed(store, 3).own_claim == first.own_claim
    assert len(store.list(FOLDER)) == 1


def test_an_older_incarnation_cannot_append(store: Store) -> None:
    # G6: the old one knows nothing yet, loses the race for the number, reads on, stops.
    old = claimed(store, 1)
    append(old, 10)
    new = claimed(store, 2)
    with pytest.raises(Fenced) as caught:
        append(old, 20)
    assert (caught.value.own, caught.value.newest) == (1, 2)
    with pytest.raises(Fenced):
        old.append_dropped(Step(10))
    assert steps(store) == [10]
    append(new, 15)
    assert steps(store) == [10, 15]


def test_an_older_incarnation_cannot_claim(store: Store) -> None:
    claimed(store, 7)
    with pytest.raises(Fenced) as caught:
        claimed(store, 6)
    assert (caught.value.own, caught.value.newest) == (6, 7)


def test_a_second_job_takes_over_and_the_older_stops_for_good(store: Store) -> None:
    old = claimed(store, 7, "job-a")
    append(old, 10)
    new = claimed(store, 1, "job-b")
    with pytest.raises(Fenced, match="job-b"):
        append(old, 20)
    with pytest.raises(Fenced, match="job-b"):
        claimed(store, 8, "job-a")
    append(new, 20)
    assert [(c.step, c.job_uid) for c in new.commits()] == [(10, "job-a"), (20, "job-b")]


def test_writing_without_a_claim_is_our_bug(store: Store) -> None:
    with pytest.raises(InvariantViolated, match="claimed"):
        append(RunLedger(store), 10)


@pytest.mark.parametrize("rival", ["a2", "b1"])
def test_of_racing_writers_none_commits_after_a_newer_claim(store: Store, rival: str) -> None:
    # G6, with real threads at the same numbers: an entry of the old claim never follows the new.
    old = claimed(store, 1, "a")
    barrier = threading.Barrier(2)
    outcome: list[object] = []

    def write() -> None:
        barrier.wait()
        try:
            for step in range(10, 400, 10):
                append(old, step)
        except Fenced as error:
            outcome.append(error)

    def claim() -> None:
        barrier.wait()
        ledger = claimed(store, int(rival[1:]), rival[0])
        append(ledger, 5)
        outcome.append(ledger.own_claim)

    threads = [threading.Thread(target=write), threading.Thread(target=claim)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = RunLedger(store)
    reader.refresh()
    newest = reader.newest_claim
    assert newest is not None
    assert newest.job_uid == rival[0]
    everything = (*reader.commits(), *reader.superseded())
    assert all(c.number < newest.number for c in everything if c.claim != newest.number)
    assert any(c.claim == newest.number for c in everything)
    assert len(outcome) == 2 or len(everything) == 40


def test_of_two_claims_of_the_same_number_both_are_in_order(store: Store) -> None:
    barrier = threading.Barrier(6)
    fenced: list[Fenced] = []

    def claim(incarnation: int) -> None:
        barrier.wait()
        try:
            claimed(store, incarnation, "job")
        except Fenced as error:
            fenced.append(error)

    threads = [threading.Thread(target=claim, args=(i,)) for i in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = RunLedger(store)
    reader.refresh()
    assert reader.newest_incarnation == 6
    # Who was overtaken right after his entry has an entry and stops all the same.
    assert len(store.list(FOLDER)) + len(fenced) >= 6
    assert {error.own for error in fenced} <= {1, 2, 3, 4, 5}


@pytest.mark.parametrize("damage", ["torn", "empty", "garbage", "swapped", "missing", "crc"])
def test_an_unreadable_entry_is_never_an_empty_run(store: Store, damage: str) -> None:
    ledger = claimed(store)
    append(ledger, 10)
    append(ledger, 20)
    path = entry_path(2)
    data = store.read(path)
    if damage == "missing":
        store.delete_tree(path)
    else:
        content = {
            "torn": data[: len(data) // 2],
            "empty": b"",
            "garbage": b"\xff\x00 not json",
            "swapped": store.read(entry_path(3)),
            "crc": data.replace(b'"step":10', b'"step":11'),
        }[damage]
        store.write_durable(path, content)
    for action in (
        lambda: steps(store),
        lambda: claimed(store, 2),
        lambda: claimed(store, 1, "another"),
    ):
        with pytest.raises(ManifestCorrupt, match="ledger entry 2") as caught:
            action()
        assert path in caught.value.checkpoint
    assert len(store.list(FOLDER)) == (2 if damage == "missing" else 3), "nothing was written"


def test_an_entry_that_a_person_set_aside_is_passed_over(tmp_path: Path) -> None:
    store = PosixStore(str(tmp_path))
    ledger = claimed(store)
    append(ledger, 10)
    append(ledger, 20)
    path = tmp_path / entry_path(3)
    path.write_bytes(b"garbage")
    with pytest.raises(ManifestCorrupt) as caught:
        steps(store)
    assert any("damaged" in note for note in caught.value.__notes__)
    path.rename(f"{path}.damaged")
    assert steps(store) == [10]
    append(claimed(store, 2), 30)
    assert steps(store) == [10, 30]
    assert not path.exists(), "its number is not given again"


class Flaky(MemoryStore):
    """Does not answer the first so many calls."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def list(self, folder: str) -> tuple[str, ...]:
        if self.failures:
            self.failures -= 1
            raise StorageUnavailable("no answer")
        return super().list(folder)


def test_no_answer_is_not_an_empty_run_and_reading_goes_on_later() -> None:
    store = Flaky(0)
    append(claimed(store), 10)
    store.failures = 1
    ledger = RunLedger(store)
    with pytest.raises(StorageUnavailable):
        ledger.refresh()
    ledger.refresh()
    assert [commit.step for commit in ledger.commits()] == [10]


@pytest.mark.parametrize("content", ["model.bin", "step-0000000010-000001-1/everstep.json", "d/x"])
def test_a_folder_that_holds_something_else_is_refused_untouched(
    store: Store, content: str
) -> None:
    store.write_durable(content, b"theirs")
    with pytest.raises(StorageRefused) as caught:
        claimed(store)
    assert content.split("/", maxsplit=1)[0] in str(caught.value.found)
    assert "empty folder" in caught.value.expected
    assert store.list("") == (content.split("/", maxsplit=1)[0],)


def test_hidden_files_and_lost_found_are_no_content(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".snapshot").mkdir()
    assert claimed(PosixStore(str(tmp_path))).newest_incarnation == 1


def test_odd_names_in_the_ledgers_folder_are_not_entries(store: Store) -> None:
    append(claimed(store), 10)
    store.write_durable(f"{FOLDER}/readme.json", b"")
    store.write_durable(f"{FOLDER}/{'9' * 19}.json", b"")
    assert steps(store) == [10]


def test_incarnations_are_compared_within_a_job_only(store: Store) -> None:
    claimed(store, 7, "a")
    ledger = claimed(store, 1, "b")
    assert ledger.claim(Incarnation(2), "b").incarnation == 2
    with pytest.raises(Fenced):
        ledger.claim(Incarnation(1), "b")


class Counted(MemoryStore):
    """Counts what is read."""

    reads = 0

    def read(self, path: str) -> bytes:
        self.reads += 1
        return super().read(path)


def test_who_keeps_a_ledger_to_look_at_reads_an_entry_once_and_the_newest_commit_again() -> None:
    store = Counted()
    writer = claimed(store)
    for step in range(10, 200, 10):
        append(writer, step)
    kept = RunLedger(store)
    kept.look()
    before = store.reads
    kept.look()
    assert store.reads - before == 1
    append(writer, 200)
    before = store.reads
    kept.look()
    assert store.reads - before == 2
    assert [commit.step for commit in kept.commits()] == list(range(10, 210, 10))


@pytest.mark.parametrize("count", [1, 2, 3], ids=["shorter", "as long", "longer"])
def test_who_keeps_a_ledger_sees_a_run_that_was_deleted_and_begun_anew(
    store: Store, count: int
) -> None:
    writer = claimed(store)
    append(writer, 10)
    append(writer, 20)
    kept = RunLedger(store)
    kept.look()
    store.delete_tree(FOLDER)
    writer = claimed(store)
    for step in range(15, 15 + count):
        append(writer, step)
    kept.look()
    assert [commit.step for commit in kept.commits()] == list(range(15, 15 + count))


def test_who_keeps_a_ledger_gives_up_what_a_person_set_aside(tmp_path: Path) -> None:
    store = PosixStore(str(tmp_path))
    writer = claimed(store)
    append(writer, 10)
    append(writer, 20)
    kept = RunLedger(store)
    kept.look()
    path = tmp_path / entry_path(2)
    path.rename(f"{path}.damaged")
    kept.look()
    assert [commit.step for commit in kept.commits()] == [20]
    (tmp_path / f"{entry_path(2)}.damaged").rename(path)
    kept.look()
    assert [commit.step for commit in kept.commits()] == [10, 20]
