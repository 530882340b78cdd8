"""Reading a checkpoint: every dtype, any box, and damage of every file."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import (
    Values,
    array,
    claimed,
    load,
    path,
    random_array,
    random_values,
    same_bits,
    save,
    tree_of,
)
from everstep.runtime.errors import (
    CheckpointInvalid,
    ChecksumMismatch,
    InvariantViolated,
    ManifestCorrupt,
    StateRefused,
)
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.dtypes import STORABLE
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import Leaf, LeafKind, TreeSpec
from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.manifest import decode_manifest, digest
from everstep.runtime.storage.posix import PosixStore
from everstep.runtime.storage.reader import CheckpointReader
from everstep.runtime.storage.tensors import stored_dtype

DTYPES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
    *("uint2", "uint4", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def test_every_dtype_that_a_state_may_have_is_in_the_list() -> None:
    assert set(DTYPES) == STORABLE
    assert {stored_dtype(name) for name in STORABLE} <= STORABLE


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    shapes = [(), (1,), (7,), (16,), (3, 5), (4, 6), (0,), (3, 0, 2), (2, 3, 4, 2)]
    tree = tree_of(*(array("leaf", i, dtype=dtype, shape=s) for i, s in enumerate(shapes)))
    values = random_values(tree, seed=7)
    store = PosixStore(str(tmp_path))
    commit = save(store, claimed(store), 1, tree, values)
    assert same_bits(load(store, commit), values)


def test_negative_zero_and_nan_payloads_survive_where_fill_values_are_equal(tmp_path: Path) -> None:
    tree = tree_of(array("zero", shape=(8,)), array("minus", shape=(8,)), array("nan", shape=(8,)))
    quiet = np.frombuffer(np.array([0x7FC00001, 0xFFC00000] * 4, np.uint32).tobytes(), np.float32)
    values: Values = {0: np.zeros(8, "f4"), 1: np.full(8, -0.0, "f4"), 2: quiet}
    store = PosixStore(str(tmp_path))
    assert same_bits(load(store, save(store, claimed(store), 1, tree, values)), values)


def test_a_dtype_that_nobody_knows_is_refused_by_leaf(tmp_path: Path) -> None:
    tree = tree_of(array("good"), array("odd", dtype="datetime64"))
    store = PosixStore(str(tmp_path))
    with pytest.raises(StateRefused, match="odd"):
        save(store, claimed(store), 1, tree, {0: random_array("float32", (4, 6), 0)})
    with pytest.raises(StateRefused):
        stored_dtype("float6_e2m3fn")


def test_small_things_travel_with_the_step(tmp_path: Path) -> None:
    # They are of the same step, or it does not exist.
    tree = tree_of(
        array("w"), Leaf(path=path("n"), kind=LeafKind.SCALAR, dtype="int", value=str(2**70))
    )
    store = PosixStore(str(tmp_path))
    extra = {"data": "position é", "empty": ""}
    commit = save(store, claimed(store), 1, tree, random_values(tree), extra=extra)
    reader = CheckpointReader(store, commit)
    assert reader.extra == extra
    assert reader.tree == tree
    assert commit.extra == extra


class Saved:
    """One checkpoint on disk, made once for many reads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = tree_of(
            array("w", shape=(48, 40)),
            array("layers", 0, "k", dtype="bfloat16", shape=(8, 6, 10)),
            array("b", dtype="int8", shape=(30,)),
            array("s", dtype="float64", shape=()),
        )
        self.values = random_values(self.tree, seed=3)
        self.store = PosixStore(str(root))
        self.commit = save(self.store, claimed(self.store), 5, self.tree, self.values)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("run"))


def inside(region: Region) -> tuple[Any, ...]:
    """Where the region lies in a room that has a margin of one; a view for rank 0 as well."""
    return (*(slice(1, n + 1) for n in region.box.shape), ...)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_reads_as_the_same_part_of_the_leaf(saved: Saved, data: st.DataObject) -> None:
    reader = CheckpointReader(saved.store, saved.commit)
    reads: list[tuple[Region, np.ndarray]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        leaf = data.draw(st.integers(0, len(saved.tree.leaves) - 1))
        ends = [
            sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
            for n in saved.tree.leaves[leaf].shape
        ]
        box = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
        dtype = saved.values[leaf].dtype
        # A view into a larger array, in either memory order: nothing beside it may change.
        padded = tuple(n + 2 for n in box.shape)
        is_fortran = data.draw(st.booleans())
        room = np.zeros(padded, dtype, order="F") if is_fortran else np.zeros(padded, dtype)
        reads.append((Region(leaf, box), room))
    reader.read_many([(r, room[inside(r)]) for r, room in reads])
    for region, room in reads:
        expected = saved.values[region.leaf][region.box.slices()]
        assert room[inside(region)].tobytes() == expected.tobytes()
        room[inside(region)] = np.zeros((), room.dtype)
        assert not room.tobytes().strip(b"\0")


def test_a_box_outside_or_of_another_type_is_our_bug(saved: Saved) -> None:
    reader = CheckpointReader(saved.store, saved.commit)
    with pytest.raises(InvariantViolated, match="w"):
        reader.read_into(0, Box((0, 0), (49, 1)), np.empty((49, 1), np.float32))
    with pytest.raises(InvariantViolated, match="float64"):
        reader.read_into(0, Box((0, 0), (1, 1)), np.empty((1, 1), np.float64))


def copy_of(saved: Saved, tmp_path: Path) -> tuple[PosixStore, Path]:
    run = tmp_path / "run"
    shutil.copytree(saved.root, run)
    return PosixStore(str(run)), run / saved.commit.folder


def outcome(store: PosixStore, commit: Commit, values: Values) -> CheckpointInvalid | None:
    """None when all is read exactly; wrong numbers fail the test at once."""
    try:
        found = load(store, commit)
    except CheckpointInvalid as error:
        return error
    assert same_bits(found, values), "wrong numbers were read without a word"
    return None


def all_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size)


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_in_any_file_is_found_or_harmless(
    saved: Saved, tmp_path: Path, seed: int
) -> None:
    # 25 flips a seed, spread over all files.
    store, folder = copy_of(saved, tmp_path)
    dice = random.Random(seed)
    found = 0
    for file in dice.choices(all_files(folder), k=25):
        good = file.read_bytes()
        bad = bytearray(good)
        bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        file.write_bytes(bad)
        error = outcome(store, saved.commit, saved.values)
        file.write_bytes(good)
        if error is not None:
            found += 1
            assert str(folder) in error.checkpoint
    assert found >= 10
    assert outcome(store, saved.commit, saved.values) is None


def test_every_flip_in_a_large_leaf_is_named_by_leaf_and_region(tmp_path: Path) -> None:
    tree = tree_of(array("params", "kernel", shape=(512, 512)))
    values = random_values(tree)
    store = PosixStore(str(tmp_path))
    commit = save(store, claimed(store), 1, tree, values)
    data = [f for f in all_files(tmp_path / commit.folder) if f.parent.name == "d"]
    largest = max(data, key=lambda f: f.stat().st_size)
    dice = random.Random(1)
    for _ in range(20):
        with open(largest, "r+b") as file:
            position = dice.randrange(4096, largest.stat().st_size - 4096)
            file.seek(position)
            old = file.read(1)[0]
            file.seek(position)
            file.write(bytes([old ^ (1 << dice.randrange(8))]))
        error = outcome(store, commit, values)
        assert isinstance(error, ChecksumMismatch)
        assert "['params']['kernel'] region [0, 0] to [512, 512]" in error.leaf
        assert "params.kernel/c/" in f"{error.found}{error.expected}"
        with open(largest, "r+b") as file:
            file.seek(position)
            file.write(bytes([old]))
    assert outcome(store, commit, values) is None


@pytest.mark.parametrize("how", ["missing", "empty", "half"])
def test_a_lost_or_truncated_file_is_found_or_not_needed(
    saved: Saved, tmp_path: Path, how: str
) -> None:
    store, folder = copy_of(saved, tmp_path)
    needed = 0
    for file in all_files(folder):
        good = file.read_bytes()
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes(good[: len(good) // 2] if how == "half" else b"")
        needed += outcome(store, saved.commit, saved.values) is not None
        file.write_bytes(good)
    assert needed >= 8


def test_two_sound_files_that_changed_places_are_found(tmp_path: Path) -> None:
    # Every checksum inside of them is right.
    tree = tree_of(array("w", shape=(256, 64)), array("v", shape=(256, 64)))
    values = random_values(tree)
    store = PosixStore(str(tmp_path))
    commit = save(store, claimed(store), 1, tree, values)
    folder = tmp_path / commit.folder
    data = [
        file for file in all_files(folder) if "process_" in str(file) and file.parent.name == "d"
    ]
    large = [file for file in data if file.stat().st_size > 60_000]
    assert len(large) == 2
    pairs = [(large[0], large[1])]
    pairs.append((folder / "everstep.part_0.json", folder / "everstep.part_1.json"))
    for first, second in pairs:
        swap(first, second)
        assert outcome(store, commit, values) is not None, first
        swap(first, second)
    assert outcome(store, commit, values) is None


def swap(first: Path, second: Path) -> None:
    spare = first.parent / "spare"
    for source, target in ((first, spare), (second, first), (spare, second)):
        os.rename(source, target)


def test_a_manifest_of_a_newer_format_is_refused_and_says_so(saved: Saved, tmp_path: Path) -> None:
    store, folder = copy_of(saved, tmp_path)
    file = folder / "everstep.json"
    file.write_bytes(file.read_bytes().replace(b'"format":2', b'"format":3'))
    with pytest.raises(ManifestCorrupt, match="sha256"):
        CheckpointReader(store, saved.commit)


def test_many_small_leaves_are_few_files(tmp_path: Path) -> None:
    tree = TreeSpec(leaves=tuple(array("p", str(i), shape=(4,)) for i in range(1000)))
    values = random_values(tree)
    store = PosixStore(str(tmp_path))
    commit = save(store, claimed(store), 1, tree, values)
    assert same_bits(load(store, commit), values)
    assert len(all_files(tmp_path / commit.folder)) < 40


def test_a_run_begun_anew_in_the_same_folder_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    tree = tree_of(array("w", shape=(256, 64)))
    for seed in range(3):
        store = PosixStore(str(tmp_path / "run"))
        commit = save(store, claimed(store), 1, tree, random_values(tree, seed))
        assert same_bits(load(store, commit), random_values(tree, seed))
        shutil.rmtree(tmp_path / "run")


def test_a_manifest_of_format_1_reads_as_one_item() -> None:
    old = {
        "format": 1,
        "step": 5,
        "incarnation": 1,
        "job_uid": "job-a",
        "tree": {"leaves": [{"path": [["dict", "a"]], "kind": "array", "dtype": "int8"}]},
        "arrays": ["a"],
        "chunks": {"0": []},
        "writers": [0, 1],
        "files": {"everstep.part_0.json": "sha256:0"},
        "extra": {"inline": "{}"},
        "versions": {"everstep": "0.1"},
    }
    data = msgspec.json.encode(old)
    manifest = decode_manifest(data, expected_digest=digest(data), where="run")
    (item,) = manifest.items.values()
    assert list(manifest.items) == ["state"]
    assert (item.handler, item.arrays, item.writers) == ("pytree", ("a",), (0, 1))
    assert item.tree.leaves[0].name == "['a']"
    assert manifest.extra == {"inline": "{}"}
