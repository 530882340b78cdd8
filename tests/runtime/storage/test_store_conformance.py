"""What every `Store` promises, run against all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest

from checkpoints import array, claimed, load, random_values, same_bits, save, tree_of
from everstep.runtime.errors import InvariantViolated, StorageRefused
from everstep.runtime.storage.memory import MemoryStore
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.store import StorageMissing, Store
from object_fixtures import quick_store, use
from object_server import ObjectServer
from unkind_proxy import Answer, Asked, Cut, Delay, Fault, UnkindProxy


def mildly_unkind(asked: Asked) -> Fault | None:
    """What any network does now and then; nobody should notice."""
    if asked.tries:
        return None
    faults: dict[int, Fault] = {
        1: Answer(503),
        3: Cut(),
        5: Answer(429, retry_after="0"),
        7: Cut(is_done_first=True),
        9: Answer(503, is_done_first=True),
        11: Delay(0.05),
    }
    return faults.get(asked.number % 12)


@pytest.fixture(params=["posix", "posix-not-made-yet", "memory", "gcs", "gcs-behind-a-proxy"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[Store]:
    if request.param.startswith("gcs"):
        uri: str = request.getfixturevalue("bucket_environment")
        if request.param == "gcs":
            yield open_store(uri)
            return
        server: ObjectServer = request.getfixturevalue("object_server")
        with UnkindProxy(server.url, mildly_unkind) as proxy:
            use(proxy.url, monkeypatch)
            yield quick_store(uri)
        return
    makers: dict[str, Callable[[], Store]] = {
        "posix": lambda: open_store(str(tmp_path)),
        "posix-not-made-yet": lambda: open_store(f"file://{tmp_path}/a/b"),
        "memory": MemoryStore,
    }
    yield makers[request.param]()


def test_what_was_written_is_read(store: Store) -> None:
    store.write_durable("a/b", b"1")
    store.write_durable("a/b", b"22")
    assert store.read("a/b") == b"22"
    assert store.exists("a/b")
    assert store.exists("a")
    assert not store.exists("a/c")


def test_missing_is_an_answer_of_its_own(store: Store) -> None:
    with pytest.raises(StorageMissing) as caught:
        store.read("nowhere/b")
    assert "nowhere/b" in caught.value.field


def test_list_gives_the_names_of_one_folder_only(store: Store) -> None:
    assert store.list("") == ()
    for path in ("x/b", "x/a", "x/c/d", "xy/e"):
        store.write_durable(path, b"")
    assert store.list("x") == ("a", "b", "c")
    assert store.list("") == ("x", "xy")
    assert store.list("y") == ()


def test_create_exclusive_is_true_once_and_changes_nothing_later(store: Store) -> None:
    assert store.create_exclusive("l/1", b"mine")
    assert not store.create_exclusive("l/1", b"yours")
    assert store.read("l/1") == b"mine"
    assert store.list("l") == ("1",)


def test_create_exclusive_knows_its_own_earlier_success(store: Store) -> None:
    # The write was done and its answer lost.
    assert store.create_exclusive("l/1", b"mine")
    assert store.create_exclusive("l/1", b"mine")


def test_of_many_who_create_the_same_one_wins(store: Store) -> None:
    barrier = threading.Barrier(8)
    won: list[bytes] = []

    def create(content: bytes) -> None:
        barrier.wait()
        if store.create_exclusive("l/1", content):
            won.append(content)

    threads = [threading.Thread(target=create, args=(b"%d" % i * 5000,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [store.read("l/1")]


def test_a_reader_never_sees_a_part_of_an_entry(store: Store) -> None:
    content = b"x" * 200_000
    torn: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for name in store.list("l"):
                found = len(store.read(f"l/{name}"))
                if found != len(content):
                    torn.append(found)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20):
        assert store.create_exclusive(f"l/{number}", content)
        store.write_durable("l/replaced", content)
    stop.set()
    reader.join()
    assert torn == []


def test_delete_tree_deletes_what_is_below_and_nothing_beside(store: Store) -> None:
    for path in ("x/a", "x/c/d", "xy", "z/a"):
        store.write_durable(path, b"")
    store.delete_tree("x")
    store.delete_tree("x")
    store.delete_tree("z/a")
    assert "x" not in store.list("")
    assert store.exists("xy")
    assert not store.exists("z/a")


def test_arrays_are_kept_listed_and_deleted_with_their_folder(store: Store) -> None:
    tree = tree_of(array("w", shape=(64, 64)))
    values = random_values(tree)
    commit = save(store, claimed(store), 1, tree, values)
    assert same_bits(load(store, commit), values)
    assert "state" in store.list(commit.folder)
    store.delete_tree(commit.folder)
    assert not store.exists(commit.folder)
    with pytest.raises(Exception, match=r"everstep\.json"):
        load(store, commit)


def test_a_file_where_a_folder_should_be_is_refused_by_path(store: Store) -> None:
    store.write_durable("x", b"")
    with pytest.raises(StorageRefused, match="x"):
        store.write_durable("x/y", b"")
    store.write_durable("f/y", b"")
    with pytest.raises(StorageRefused, match="f"):
        store.write_durable("f", b"")


@pytest.mark.parametrize("path", ["", "/a", "a/../b", "a//b", "../a", "a/.hidden", "a/"])
def test_a_path_that_leaves_the_run_is_our_bug(store: Store, path: str) -> None:
    with pytest.raises(InvariantViolated):
        store.write_durable(path, b"")


def test_settle_and_sweep_leave_what_is_there(store: Store) -> None:
    store.write_durable("x/y/z", b"1")
    store.create_exclusive("l/1", b"2")
    store.settle("x")
    store.sweep("l")
    store.sweep("never-made")
    assert store.read("x/y/z") == b"1"
    assert store.list("l") == ("1",)
    assert np.frombuffer(store.read("l/1"), np.uint8).tolist() == [ord("2")]


def test_files_that_are_written_together_are_all_there_and_replace_older_ones(
    store: Store,
) -> None:
    store.write_durable("step/item/a", b"old")
    store.write_together("step", {"item/a": b"1", "item/deep/er/b": b"2", "c": b""})
    assert store.read("step/item/a") == b"1"
    assert store.read("step/item/deep/er/b") == b"2"
    assert store.read("step/c") == b""
    assert store.list("step/item") == ("a", "deep")
    store.write_together("other", {})


@pytest.mark.parametrize("path", ["", "/a", "../a", "a/.hidden"])
def test_a_path_that_leaves_the_folder_is_our_bug(store: Store, path: str) -> None:
    with pytest.raises(InvariantViolated):
        store.write_together("step", {"good": b"1", path: b""})
