"""From draft to checkpoint: coverage, fencing, replacement, replay."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from checkpoints import (
    array,
    by_rows,
    claimed,
    host,
    load,
    random_values,
    same_bits,
    save,
    tree_of,
    write_draft,
)
from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.checkpoint.commit import begin, commit, discard, find_commit
from everstep.runtime.checkpoint.coverage import NotCovered, check_coverage
from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.checkpoint.draft import write_regions
from everstep.runtime.errors import Fenced, InvariantViolated, ManifestCorrupt, StorageRefused
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.manifest import Region
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.memory import MemoryStore
from everstep.runtime.storage.posix import PosixStore
from everstep.runtime.storage.store import Store
from everstep.runtime.topology.ownership import plan_writes

TREE = tree_of(array("params", "kernel", shape=(8, 6)), array("params", "bias", shape=(6,)))
VALUES = random_values(TREE)
OTHER_VALUES = random_values(TREE, seed=1)
Parts = list[tuple[int, tuple[Region, ...]]]


@pytest.fixture(params=["posix", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return PosixStore(str(tmp_path)) if request.param == "posix" else MemoryStore()


def steps(store: Store) -> list[int]:
    return [found.step for found in list_commits(store)]


def finish(store: Store, ledger: RunLedger, draft: str, parts: Parts, step: int = 10) -> None:
    claim = ledger.own_claim
    assert claim is not None
    commit(
        store,
        ledger,
        draft=draft,
        step=Step(step),
        incarnation=claim.incarnation,
        tree=TREE,
        parts=parts,
        extra={},
        now_s=1.0,
    )


def test_a_draft_is_no_step_until_it_is_committed(store: Store) -> None:
    ledger = claimed(store)
    save(store, ledger, 5, TREE, VALUES)
    draft = begin(store, Step(10), Incarnation(1), ledger=ledger)
    parts = write_draft(store, draft, TREE, OTHER_VALUES)
    assert steps(store) == [5]
    finish(store, ledger, draft, parts)
    assert steps(store) == [5, 10]
    assert same_bits(load(store, list_commits(store)[0]), VALUES)
    assert same_bits(load(store, list_commits(store)[1]), OTHER_VALUES)


def test_a_part_that_was_not_reported_makes_the_commit_fail_by_leaf(store: Store) -> None:
    ledger = claimed(store)
    draft = begin(store, Step(10), Incarnation(1), ledger=ledger)
    parts = write_draft(store, draft, TREE, VALUES)
    with pytest.raises(NotCovered) as caught:
        finish(store, ledger, draft, parts[:1])
    assert caught.value.leaf.startswith("['params']['")
    assert "region [" in caught.value.leaf
    assert caught.value.found == "not written"
    assert steps(store) == []


def test_a_part_that_was_reported_and_not_finished_makes_the_commit_fail(store: Store) -> None:
    ledger = claimed(store)
    draft = begin(store, Step(10), Incarnation(1), ledger=ledger)
    parts = write_draft(store, draft, TREE, VALUES)
    store.delete_tree(f"{draft}/everstep.part_1.json")
    with pytest.raises(ManifestCorrupt, match="part_1"):
        finish(store, ledger, draft, parts)
    assert steps(store) == []


def test_a_report_that_differs_from_what_was_written_is_refused(store: Store) -> None:
    ledger = claimed(store)
    draft = begin(store, Step(10), Incarnation(1), ledger=ledger)
    parts = write_draft(store, draft, TREE, VALUES)
    with pytest.raises(ManifestCorrupt, match="reported"):
        finish(store, ledger, draft, [parts[0], (1, (Region(0, whole((8, 6))),))])


def test_parts_of_another_tree_or_another_grid_are_refused(store: Store) -> None:
    ledger = claimed(store)
    draft = begin(store, Step(10), Incarnation(1), ledger=ledger)
    halves = [(Region(0, Box((0, 0), (4, 6))),), (Region(0, Box((4, 0), (8, 6))),)]
    other = tree_of(array("params", "kernel", shape=(8, 6)), array("other", shape=(6,)))
    for writer, (tree, chunk) in enumerate([(TREE, (4, 6)), (TREE, (2, 6)), (other, (4, 6))]):
        write_regions(
            store,
            draft=draft,
            writer=writer,
            tree=tree,
            chunks={0: chunk},
            regions=halves[min(writer, 1)],
            read=lambda region: VALUES[region.leaf][region.box.slices()],
        )
    with pytest.raises(ManifestCorrupt, match="chunk of"):
        finish(store, ledger, draft, [(0, halves[0]), (1, halves[1])])
    with pytest.raises(ManifestCorrupt, match="tree"):
        finish(store, ledger, draft, [(0, halves[0]), (2, halves[1])])


def test_regions_that_are_not_whole_chunks_are_our_bug(store: Store) -> None:
    draft = begin(store, Step(10), Incarnation(1), ledger=claimed(store))
    with pytest.raises(InvariantViolated, match="whole chunks"):
        write_regions(
            store,
            draft=draft,
            writer=0,
            tree=TREE,
            chunks={0: (4, 6)},
            regions=[Region(0, Box((1, 0), (4, 6)))],
            read=lambda region: VALUES[region.leaf][region.box.slices()],
        )


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([(0, [(0, (0, 0), (8, 6))]), (1, [(1, (0,), (6,))])], None),
        ([(0, [(0, (0, 0), (8, 6))])], "not written"),
        ([(0, [(0, (0, 0), (4, 6)), (1, (0,), (6,))])], "not written"),
        ([(0, [(0, (0, 0), (8, 6)), (1, (0,), (6,))]), (1, [(1, (3,), (6,))])], "written by 0, 1"),
        ([(0, [(0, (0, 0), (8, 6)), (0, (0, 0), (4, 3))])], "written by 0, 0"),
        ([(3, [(0, (0, 0), (12, 6))])], "written by 3"),
        ([(3, [(0, (0,), (8,))])], "written by 3"),
        ([(3, [(0, (0, 0), (8, 6)), (1, (0,), (6,)), (2, (0,), (6,))])], "written by 3"),
    ],
)
def test_coverage_names_region_and_writers(
    parts: list[tuple[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]], found: str | None
) -> None:
    real = [(w, [Region(leaf, Box(a, b)) for leaf, a, b in regions]) for w, regions in parts]
    if found is None:
        check_coverage("d", TREE, {0: (4, 3), 1: (3,)}, real)
        return
    with pytest.raises(NotCovered) as caught:
        check_coverage("d", TREE, {0: (4, 3), 1: (3,)}, real)
    assert caught.value.found == found
    assert "region" in caught.value.leaf


def test_an_older_incarnation_cannot_begin_or_commit(store: Store) -> None:
    # G6
    old = claimed(store, 1)
    draft = begin(store, Step(10), Incarnation(1), ledger=old)
    parts = write_draft(store, draft, TREE, VALUES)
    new = claimed(store, 2)
    with pytest.raises(Fenced):
        finish(store, old, draft, parts)
    with pytest.raises(Fenced):
        begin(store, Step(20), Incarnation(1), ledger=old)
    with pytest.raises(Fenced):
        begin(store, Step(20), Incarnation(1))
    assert steps(store) == []
    save(store, new, 10, TREE, OTHER_VALUES, incarnation=2)
    assert same_bits(load(store, list_commits(store)[-1]), OTHER_VALUES)


def test_two_writers_of_one_step_race_and_exactly_one_commits_it(store: Store) -> None:
    for round_ in range(3):
        old = claimed(store, 2 * round_ + 1)
        new = RunLedger(store)
        drafts: dict[str, tuple[str, Parts]] = {}
        draft = begin(store, Step(10 * round_ + 10), Incarnation(2 * round_ + 1), ledger=old)
        drafts["old"] = (draft, write_draft(store, draft, TREE, VALUES))
        barrier = threading.Barrier(2)
        outcomes: dict[str, object] = {}

        def commit_old(
            old: RunLedger = old,
            drafts: dict[str, tuple[str, Parts]] = drafts,
            outcomes: dict[str, object] = outcomes,
            barrier: threading.Barrier = barrier,
            step: int = 10 * round_ + 10,
        ) -> None:
            barrier.wait()
            try:
                finish(store, old, *drafts["old"], step=step)
                outcomes["old"] = "committed"
            except Fenced:
                outcomes["old"] = "fenced"

        thread = threading.Thread(target=commit_old)
        thread.start()
        barrier.wait()
        new.claim(Incarnation(2 * round_ + 2), "job-a")
        thread.join()
        step = 10 * round_ + 10
        seen = [c for c in list_commits(store) if c.step == step]
        assert len(seen) == (outcomes["old"] == "committed")
        save(store, new, step, TREE, OTHER_VALUES, incarnation=2 * round_ + 2)
        last = list_commits(store)[-1]
        assert (last.step, last.incarnation) == (step, 2 * round_ + 2)
        assert same_bits(load(store, last), OTHER_VALUES)


def test_a_replayed_step_replaces_the_old_one_in_one_instant(store: Store) -> None:
    save(store, claimed(store, 1), 20, TREE, VALUES)
    second = claimed(store, 2)
    draft = begin(store, Step(20), Incarnation(2), ledger=second)
    parts = write_draft(store, draft, TREE, OTHER_VALUES)
    assert same_bits(load(store, list_commits(store)[-1]), VALUES)
    finish(store, second, draft, parts, step=20)
    assert steps(store) == [20]
    assert same_bits(load(store, list_commits(store)[-1]), OTHER_VALUES)


def test_a_step_that_this_claim_committed_is_not_written_again(store: Store) -> None:
    ledger = claimed(store)
    first = save(store, ledger, 10, TREE, VALUES)
    assert find_commit(ledger, Step(10)) == first
    assert find_commit(ledger, Step(11)) is None
    again = save(store, ledger, 10, TREE, VALUES)
    assert again == first
    assert [name for name in store.list("") if name.startswith("step-")] == [first.folder]
    # The same call once more, as after a lost answer.
    finish(store, ledger, first.folder, [])
    assert list_commits(store) == (first,)


def test_leftovers_of_a_killed_attempt_are_in_nobodys_way(store: Store) -> None:
    ledger = claimed(store)
    left = begin(store, Step(12), Incarnation(1), ledger=ledger)
    write_draft(store, left, TREE, OTHER_VALUES)
    store.delete_tree(f"{left}/everstep.draft.json")
    committed = save(store, ledger, 12, TREE, VALUES)
    assert committed.folder != left
    assert same_bits(load(store, committed), VALUES)


def test_rolled_back_runs_commit_again_from_where_they_went_back_to(store: Store) -> None:
    ledger = claimed(store, 1)
    for step in (15, 20):
        save(store, ledger, step, TREE, VALUES)
    ledger = claimed(store, 2)
    seen: list[list[int]] = []
    for step in (16, 17, 20):
        save(store, ledger, step, TREE, VALUES, incarnation=2)
        seen.append(steps(store))
    assert seen == [[15, 16], [15, 16, 17], [15, 16, 17, 20]]


def test_a_discarded_draft_is_gone_and_a_commit_cannot_be_discarded(store: Store) -> None:
    ledger = claimed(store)
    committed = save(store, ledger, 10, TREE, VALUES)
    draft = begin(store, Step(20), Incarnation(1), ledger=ledger)
    write_draft(store, draft, TREE, VALUES)
    discard(store, draft, ledger=ledger)
    discard(store, committed.folder, ledger=ledger)
    assert not store.exists(draft)
    assert same_bits(load(store, committed), VALUES)


class Failing(MemoryStore):
    """Refuses the nth write."""

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None

    def _count(self, path: str) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise StorageRefused(path, "no space left on the device (ENOSPC)", "more space")

    def write_durable(self, path: str, data: bytes) -> None:
        self._count(path)
        super().write_durable(path, data)

    def create_exclusive(self, path: str, data: bytes) -> bool:
        self._count(path)
        return super().create_exclusive(path, data)


def test_a_commit_that_fails_at_any_write_leaves_the_older_step(  # G1
) -> None:
    done = False
    for writes in range(40):
        store = Failing()
        ledger = claimed(store)
        save(store, ledger, 5, TREE, VALUES)
        store.left = writes
        try:
            save(store, ledger, 10, TREE, OTHER_VALUES)
            done = True
        except StorageRefused:
            assert steps(store) == [5]
        store.left = None
        if done:
            assert steps(store) == [5, 10]
            assert writes >= 8
            break
        assert same_bits(load(store, list_commits(store)[-1]), VALUES)
        # And the next save is not in its way.
        save(store, ledger, 15, TREE, OTHER_VALUES)
        assert steps(store) == [5, 15]
    assert done


def test_a_failed_write_of_a_part_is_no_part(store: Store) -> None:
    ledger = claimed(store)
    draft = begin(store, Step(10), Incarnation(1), ledger=ledger)
    plan = plan_writes(TREE, by_rows(TREE, [host(0)]))

    def read(region: Region) -> object:
        raise KeyError(region)

    with pytest.raises(KeyError):
        write_regions(
            store,
            draft=draft,
            writer=0,
            tree=TREE,
            chunks=plan.chunks,
            regions=plan.regions[host(0)],
            read=read,  # type: ignore[arg-type]
        )
    assert "everstep.part_0.json" not in store.list(draft)
