"""The shelf: what is valid, what may be overwritten, and what is kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step
from everstep.runtime.errors import ConfigurationError
from everstep.runtime.layout import checksums
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.checksums import block_crcs, crc_of
from everstep.runtime.layout.manifest import BLOCK_BYTES, Plot, Region, SnapshotManifest
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec
from everstep.runtime.snapshot.regions import plot_of
from everstep.runtime.snapshot.shelf import Shelf
from everstep.runtime.snapshot.slots import SlotWriter

HOST = HostId(SliceId(2), 1)


def tree_of(**leaves: tuple[str, tuple[int, ...]]) -> TreeSpec:
    return TreeSpec(
        leaves=tuple(
            Leaf(path=(Key(KeyKind.DICT, name),), kind=LeafKind.ARRAY, dtype=dtype, shape=shape)
            for name, (dtype, shape) in leaves.items()
        )
    )


TREE = tree_of(a=("float32", (700, 1000)), b=("int8", (5,)), s=("bool", ()))
PLOT = plot_of(TREE, [Region(i, whole(leaf.shape)) for i, leaf in enumerate(TREE.leaves)])


def contents(seed: int, plot: Plot = PLOT) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 2, size=shard.box.shape).astype(plot.tree.leaves[shard.leaf].dtype)
        for shard in plot.shards
    ]


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf(host=HOST, slots=2, bytes_max=None, namespace="test")
    yield made
    made.close()


class Worker:
    """What a worker does with the slots, in this process."""

    def __init__(self, shelf: Shelf, plot: Plot = PLOT) -> None:
        self.shelf, self.plot = shelf, plot
        self.writer = SlotWriter(shelf.allocate(plot), shelf.slot_size_bytes, plot)

    def snapshot(self, step: int, incarnation: int = 1) -> SnapshotManifest:
        slot = self.shelf.grant()
        assert slot is not None
        self.writer.write(slot, contents(step, self.plot))
        return asyncio.run(
            self.shelf.complete(slot, Step(step), Incarnation(incarnation), {"at": str(step)})
        )


def id_of(shelf: Shelf, step: int) -> str:
    return next(id_ for id_, manifest in shelf.manifests() if manifest.step == step)


def test_a_complete_snapshot_holds_what_was_written_and_its_checksums(shelf: Shelf) -> None:
    manifest = Worker(shelf).snapshot(7)
    id_ = id_of(shelf, 7)
    assert shelf.newest() == manifest
    assert (manifest.host, manifest.extra) == (HOST, {"at": "7"})
    for index, (shard, expected) in enumerate(zip(PLOT.shards, contents(7), strict=True)):
        found = shelf.region(id_, Region(shard.leaf, shard.box))
        np.testing.assert_array_equal(found, expected)
        raw = np.frombuffer(expected.tobytes(), np.uint8)
        assert manifest.crcs[index] == block_crcs(raw)
    assert len(manifest.crcs[0]) == -(-700 * 1000 * 4 // BLOCK_BYTES) > 1


def test_the_newest_complete_snapshot_is_never_granted(shelf: Shelf) -> None:
    worker = Worker(shelf)
    for step in range(1, 8):
        worker.snapshot(step)
        before = bytes(shelf.view(id_of(shelf, step)))
        slot = shelf.grant()
        assert slot is not None
        worker.writer.write(slot, contents(999))
        assert bytes(shelf.view(id_of(shelf, step))) == before
        assert step in shelf.steps()


def test_a_worker_that_died_while_writing_damages_nothing(shelf: Shelf) -> None:
    worker = Worker(shelf)
    worker.snapshot(1)
    worker.snapshot(2)
    slot = shelf.grant()
    assert slot is not None
    worker.writer.targets(slot)[0][:10] = 99
    shelf.abandon(slot)
    assert shelf.steps() == (2,)
    assert shelf.newest() is not None
    again = Worker(shelf)
    assert shelf.steps() == (2,)
    again.snapshot(3)
    assert shelf.steps() == (2, 3)


def test_what_is_granted_leaves_the_shelf_at_once(shelf: Shelf) -> None:
    worker = Worker(shelf)
    worker.snapshot(1)
    worker.snapshot(2)
    old = id_of(shelf, 1)
    assert shelf.grant() is not None
    assert shelf.steps() == (2,)
    with pytest.raises(KeyError):
        shelf.view(old)
    with pytest.raises(KeyError), shelf.pin(old):
        pass


def test_asking_again_grants_the_same_slot(shelf: Shelf) -> None:
    Worker(shelf)
    assert shelf.grant() == shelf.grant()


def test_a_pinned_snapshot_is_not_granted_until_it_is_released(shelf: Shelf) -> None:
    worker = Worker(shelf)
    worker.snapshot(1)
    worker.snapshot(2)
    with shelf.pin(id_of(shelf, 1)):
        assert shelf.grant() is None
        shelf.drop_before(Step(2))
        assert shelf.steps() == (1, 2)
    assert shelf.grant() is not None


def test_the_same_memory_serves_the_next_incarnation(shelf: Shelf) -> None:
    first = Worker(shelf)
    inodes = {os.fstat(fd).st_ino for fd in shelf.allocate(PLOT)}
    first.snapshot(1)
    second = shelf.allocate(PLOT)
    assert {os.fstat(fd).st_ino for fd in second} == inodes
    assert shelf.steps() == (1,)


def test_a_snapshot_of_an_older_plot_is_kept_until_a_newer_one_is_complete(shelf: Shelf) -> None:
    Worker(shelf).snapshot(5)
    other_tree = tree_of(a=("float32", (9000, 1000)))
    other = plot_of(other_tree, [Region(0, whole((9000, 1000)))])
    worker = Worker(shelf, other)
    assert shelf.steps() == (5,)
    id_ = id_of(shelf, 5)
    np.testing.assert_array_equal(shelf.region(id_, Region(1, whole((5,)))), contents(5)[1])
    worker.snapshot(6)
    assert shelf.steps() == (6,)
    worker.snapshot(7)
    assert shelf.steps() == (6, 7)


def test_slots_divided_anew_while_one_is_being_checksummed_keep_that_one(shelf: Shelf) -> None:
    worker = Worker(shelf)
    slot = shelf.grant()
    assert slot is not None
    worker.writer.write(slot, contents(3))

    async def story() -> None:
        completing = asyncio.create_task(shelf.complete(slot, Step(3), Incarnation(1), {}))
        await asyncio.sleep(0)
        shelf.allocate(plot_of(TREE, [Region(1, whole((5,)))]))
        await completing

    asyncio.run(story())
    assert shelf.steps() == (3,)
    region = shelf.region(id_of(shelf, 3), Region(0, whole((700, 1000))))
    np.testing.assert_array_equal(region, contents(3)[0])


def test_a_replayed_step_is_newer_than_a_later_one_of_before_the_loss(shelf: Shelf) -> None:
    worker = Worker(shelf)
    worker.snapshot(20, incarnation=1)
    worker.snapshot(18, incarnation=2)
    newest = shelf.newest()
    assert newest is not None
    assert (newest.step, newest.incarnation) == (18, 2)


def test_memory_that_does_not_suffice_is_refused_with_the_figures() -> None:
    shelf = Shelf(host=HOST, slots=3, bytes_max=5 << 20, namespace="test")
    with contextlib.closing(shelf), pytest.raises(ConfigurationError) as caught:
        shelf.allocate(PLOT)
    assert caught.value.field == "spec.checkpoint.snapshot.memory"
    assert "5.00 MiB" in str(caught.value)
    assert "8.01 MiB" in str(caught.value)


def test_more_than_the_machine_has_is_refused_before_a_page_is_touched() -> None:
    tree = tree_of(a=("uint8", (1 << 50,)))
    shelf = Shelf(host=HOST, slots=2, bytes_max=None, namespace="test")
    with contextlib.closing(shelf), pytest.raises(ConfigurationError) as caught:
        shelf.allocate(plot_of(tree, [Region(0, whole((1 << 50,)))]))
    assert "leaves" in str(caught.value)


def test_one_slot_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 2"):
        Shelf(host=HOST, slots=1, bytes_max=None, namespace="test")


def test_a_parcel_is_offered_beside_the_own_snapshot(shelf: Shelf) -> None:
    worker = Worker(shelf)
    worker.snapshot(4)
    piece = Region(0, Box((10, 0), (20, 1000)))
    data = np.arange(10 * 1000, dtype=np.float32)
    id_ = shelf.add_parcel(
        Step(4), Incarnation(1), TREE, [(piece, data.tobytes()), (Region(1, Box((0,), (0,))), b"")]
    )
    inventory = shelf.inventory("127.0.0.1", 99)
    assert [(h.step, h.host) for h in inventory.holdings] == [(4, HOST), (4, HOST)]
    assert set(inventory.trees) == {TREE.fingerprint}
    np.testing.assert_array_equal(
        shelf.region(id_, Region(0, Box((12, 3), (13, 5)))), data.reshape(10, 1000)[2:3, 3:5]
    )
    with pytest.raises(KeyError):
        shelf.region(id_, Region(0, Box((5, 0), (12, 1))))
    newest = shelf.newest()
    assert newest is not None
    assert newest.plot == PLOT, "a parcel is not the host's own snapshot"


def test_parcels_go_when_no_host_can_still_need_them(shelf: Shelf) -> None:
    worker = Worker(shelf)
    piece = Region(1, whole((5,)))
    shelf.add_parcel(Step(4), Incarnation(1), TREE, [(piece, b"12345")])
    worker.snapshot(5)
    assert 4 in shelf.steps()
    worker.snapshot(6)
    assert shelf.steps() == (5, 6)


def test_an_abandoned_parcel_gives_its_memory_back() -> None:
    shelf = Shelf(host=HOST, slots=2, bytes_max=6 << 20, namespace="test")
    with contextlib.closing(shelf):
        regions = [Region(0, whole((700, 1000)))]
        for _ in range(10):
            parcel = shelf.open_parcel(Step(1), Incarnation(1), TREE, regions)
            parcel.buffer(0)[:4] = b"abcd"
            parcel.abandon()
        assert shelf.steps() == ()


def test_a_parcel_with_data_of_the_wrong_size_leaves_nothing(shelf: Shelf) -> None:
    with pytest.raises(ValueError, match="structure"):
        shelf.add_parcel(Step(1), Incarnation(1), TREE, [(Region(1, whole((5,))), b"1234")])
    assert shelf.manifests() == ()


def test_a_region_is_put_together_from_several_shards(shelf: Shelf) -> None:
    rows = [Region(0, Box((start, 0), (start + 100, 1000))) for start in range(0, 700, 100)]
    worker = Worker(shelf, plot_of(TREE, rows))
    worker.snapshot(1)
    whole_leaf = np.concatenate(contents(1, worker.plot))
    found = shelf.region(id_of(shelf, 1), Region(0, Box((50, 10), (450, 20))))
    np.testing.assert_array_equal(found, whole_leaf[50:450, 10:20])
    assert found.flags.c_contiguous


def test_the_event_loop_has_its_turns_while_a_slot_is_checksummed(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 32 * BLOCK_BYTES
    plot = plot_of(tree_of(a=("uint8", (size,))), [Region(0, whole((size,)))])
    shelf.allocate(plot)
    blocks: list[int] = []
    turned = threading.Event()

    def crc_of_block(data: NDArray[np.uint8]) -> int:
        # The library holds the interpreter's lock for as long as one call takes.
        blocks.append(data.size)
        if len(blocks) == 16:
            turned.clear()
            assert turned.wait(20), "the loop had no turn between two blocks"
        return crc_of(data)

    monkeypatch.setattr(checksums, "crc_of", crc_of_block)

    async def complete() -> None:
        slot = shelf.grant()
        assert slot is not None
        completing = asyncio.create_task(shelf.complete(slot, Step(1), Incarnation(1), {}))
        while not completing.done():
            await asyncio.sleep(0)
            turned.set()
        await completing

    asyncio.run(complete())
    assert blocks == [BLOCK_BYTES] * 32


def test_nothing_of_the_memory_has_a_name(shelf: Shelf) -> None:
    shm = Path("/dev/shm")
    before = set(shm.iterdir()) if shm.exists() else set[Path]()
    Worker(shelf).snapshot(1)
    assert (set(shm.iterdir()) if shm.exists() else set[Path]()) <= before


def test_a_worker_cannot_shorten_a_slot(shelf: Shelf) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(shelf.allocate(PLOT)[0], 10)


def test_closing_gives_every_descriptor_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    shelf = Shelf(host=HOST, slots=3, bytes_max=None, namespace="test")
    Worker(shelf).snapshot(1)
    shelf.add_parcel(Step(1), Incarnation(1), TREE, [(Region(1, whole((5,))), b"12345")])
    shelf.close()
    # The worker's mappings keep their own descriptors until they are collected.
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    assert shelf.manifests() == ()
