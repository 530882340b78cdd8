from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import array, claimed, load, random_values, same_bits, save, tree_of, write_draft
from everstep.controller.api.ids import Incarnation, Step
from everstep.controller.api.spec import Retention
from everstep.runtime.checkpoint.clean import collect, drop
from everstep.runtime.checkpoint.commit import begin
from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.checkpoint.retention import choose_dropped
from everstep.runtime.errors import Fenced, StorageUnavailable
from everstep.runtime.storage.memory import MemoryStore
from everstep.runtime.storage.posix import PosixStore
from everstep.runtime.storage.reader import CheckpointReader
from everstep.runtime.storage.store import Store

TREE = tree_of(array("w", shape=(8, 6)))
VALUES = random_values(TREE)


@pytest.fixture(params=["posix", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return PosixStore(str(tmp_path)) if request.param == "posix" else MemoryStore()


def steps(store: Store) -> list[int]:
    return [found.step for found in list_commits(store)]


def folders(store: Store) -> list[str]:
    return [name for name in store.list("") if name != "_everstep"]


def test_dropped_steps_are_gone_and_the_newest_two_never(store: Store) -> None:
    ledger = claimed(store)
    for step in (10, 20, 30, 40):
        save(store, ledger, step, TREE, VALUES)
    deleted = drop(store, ledger, [Step(s) for s in (10, 20, 30, 40, 50)])
    assert len(deleted) == 2
    assert steps(store) == [30, 40]
    assert len(folders(store)) == 2
    assert same_bits(load(store, list_commits(store)[0]), VALUES)


class DiesDeleting(MemoryStore):
    is_killed = False

    def delete_tree(self, path: str) -> None:
        if self.is_killed:
            raise StorageUnavailable("killed here")
        super().delete_tree(path)


def test_a_step_is_dropped_before_its_folder_is_deleted() -> None:
    store = DiesDeleting()
    ledger = claimed(store)
    for step in (10, 20, 30):
        save(store, ledger, step, TREE, VALUES)
    store.is_killed = True
    with pytest.raises(StorageUnavailable):
        drop(store, ledger, [Step(10)])
    assert steps(store) == [20, 30]
    assert len(folders(store)) == 3
    store.is_killed = False
    assert len(collect(store, claimed(store, 2))) == 1
    assert len(folders(store)) == 2


def test_drafts_of_earlier_incarnations_are_collected_and_own_ones_are_not(store: Store) -> None:
    old = claimed(store, 1)
    save(store, old, 10, TREE, VALUES)
    left = begin(store, Step(20), Incarnation(1), ledger=old)
    write_draft(store, left, TREE, VALUES)
    ledger = claimed(store, 2)
    mine = begin(store, Step(20), Incarnation(2), ledger=ledger)
    write_draft(store, mine, TREE, VALUES)
    with pytest.raises(Fenced):
        collect(store, old)
    assert left in folders(store)
    assert collect(store, ledger) == (left,)
    assert mine in folders(store)
    assert steps(store) == [10]


def test_a_fenced_job_deletes_nothing(store: Store) -> None:
    old = claimed(store, 1, "a")
    for step in (10, 20, 30):
        save(store, old, step, TREE, VALUES)
    claimed(store, 1, "b")
    before = folders(store)
    with pytest.raises(Fenced):
        drop(store, old, [Step(10)])
    with pytest.raises(Fenced):
        collect(store, old)
    assert folders(store) == before
    assert steps(store) == [10, 20, 30]


def test_what_another_job_committed_stays(store: Store) -> None:
    old = claimed(store, 1, "a")
    for step in (1, 2):
        save(store, old, step, TREE, VALUES)
    ledger = claimed(store, 1, "b")
    for step in (3, 4, 5):
        save(store, ledger, step, TREE, VALUES)
    drop(store, ledger, [Step(1), Step(2), Step(3)])
    assert steps(store) == [1, 2, 4, 5]
    # Also what is replaced by going back before it.
    save(store, claimed(store, 2, "b"), 2, TREE, VALUES, incarnation=2)
    collect(store, claimed(store, 2, "b"))
    assert sum(name.startswith("step-0000000002") for name in folders(store)) == 2


def test_replaced_commits_go_and_overtaken_ones_when_they_are_overtaken(store: Store) -> None:
    old = claimed(store, 1)
    for step in (10, 20, 30):
        save(store, old, step, TREE, VALUES)
    ledger = claimed(store, 2)
    save(store, ledger, 15, TREE, VALUES, incarnation=2)
    assert steps(store) == [10, 15]
    assert collect(store, ledger) == (), "20 and 30 may still be wanted by a person"
    save(store, ledger, 20, TREE, VALUES, incarnation=2)
    assert len(collect(store, ledger)) == 1
    save(store, ledger, 40, TREE, VALUES, incarnation=2)
    assert len(collect(store, ledger)) == 1
    assert steps(store) == [10, 15, 20, 40]
    assert len(folders(store)) == 4
    assert collect(store, ledger) == ()


def test_disk_use_is_bounded_over_many_kills(store: Store) -> None:
    rule = Retention(latest=2)
    for incarnation in range(1, 13):
        ledger = claimed(store, incarnation)
        save(store, ledger, incarnation * 10, TREE, VALUES, incarnation=incarnation)
        drop(store, ledger, choose_dropped(list_commits(store), rule, 0.0))
        collect(store, ledger)
        begin(store, Step(incarnation * 10 + 5), Incarnation(incarnation), ledger=ledger)
        assert len(folders(store)) <= 3
    assert steps(store) == [110, 120]


def test_a_reader_deletes_nothing(store: Store) -> None:
    ledger = claimed(store)
    commit = save(store, ledger, 20, TREE, VALUES)
    draft = begin(store, Step(30), Incarnation(1), ledger=ledger)
    parts = write_draft(store, draft, TREE, VALUES)
    before = (folders(store), store.list(draft))
    assert list_commits(store) == (commit,)
    assert same_bits(load(store, commit), VALUES)
    CheckpointReader(store, commit)
    assert (folders(store), store.list(draft)) == before
    assert len(parts) == 2


def test_what_does_not_look_like_a_draft_is_never_touched(store: Store) -> None:
    ledger = claimed(store)
    for name in ("step-10", "step-0000000010-000000-x", "notes", "step-0000000010"):
        store.write_durable(f"{name}/file", b"theirs")
    assert collect(store, ledger) == ()
    assert len(folders(store)) == 4
