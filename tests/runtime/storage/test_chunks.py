"""From values to stored bytes and back, and the index of where they lie."""

from __future__ import annotations

import itertools
import random
import secrets
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts

from everstep.runtime.errors import StorageRefused
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.layout.dtypes import STORABLE, numpy_dtype
from everstep.runtime.storage.chunks import cells, decode, encoded, part_in, taking
from everstep.runtime.storage.ocdbt import Entry, Extent, encode_tree
from everstep.runtime.storage.store import Location
from everstep.runtime.storage.tensors import ArrayPlan, PartWriter, stored_dtype
from everstep.runtime.storage.zarr import differences, encode_metadata


def stored(part: np.ndarray[Any, Any], chunk: tuple[int, ...]) -> bytes:
    data = b"".join(block.tobytes() for block in encoded(part, chunk))
    return data + int(google_crc32c.value(data)).to_bytes(4, "little")


@pytest.mark.parametrize("seed", range(20))
def test_any_box_of_any_chunk_comes_back_into_memory_of_any_strides(seed: int) -> None:
    dice = random.Random(seed)
    rank = dice.randint(1, 4)
    shape = tuple(dice.randint(1, 9) for _ in range(rank))
    chunk = tuple(dice.randint(1, 5) for _ in range(rank))
    values = np.random.default_rng(seed).integers(0, 1 << 31, shape, dtype=np.int32)
    box = Box(
        tuple(dice.randint(0, n - 1) for n in shape),
        shape,
    )
    frame = np.zeros([2 * n for n in box.shape], np.int32)
    target = frame[tuple(slice(None, None, 2) for _ in shape)]
    for cell in cells(box, chunk):
        source, _ = part_in(whole(shape), cell, chunk)
        place, part = part_in(box, cell, chunk)
        data = np.frombuffer(stored(values[source.slices()], chunk), np.uint8)
        computed, noted = decode(taking(data), chunk, part, target[place.slices()])
        assert computed == noted
    assert np.array_equal(target, values[box.slices()])


def test_a_chunk_of_several_blocks_is_the_same_from_contiguous_and_from_strided_memory() -> None:
    values = np.random.default_rng(1).standard_normal((3, 700, 900)).astype(np.float32)
    frame = np.zeros((3, 700, 1800), np.float32)
    frame[:, :, ::2] = values
    assert stored(values, values.shape) == stored(frame[:, :, ::2], values.shape)


def test_a_chunk_over_the_end_of_its_array_is_filled_up_with_zeros() -> None:
    data = stored(np.full((2, 1), 7, np.uint8), (2, 3))
    assert data[:-4] == bytes([7, 0, 0, 7, 0, 0])


@pytest.mark.parametrize("dtype", sorted(STORABLE))
def test_a_description_is_what_the_array_library_writes_itself(dtype: str) -> None:
    kind = stored_dtype(dtype)
    metadata: dict[str, Any] = {
        "data_type": kind,
        "shape": [5, 3],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}}
            if numpy_dtype(kind).itemsize > 1
            else {"name": "bytes"},
            {"name": "crc32c"},
        ],
    }
    spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": metadata}
    array: Any = ts.open(spec, create=True).result()
    assert array.kvstore["zarr.json"] == encode_metadata(kind, (5, 3), (2, 3))


def test_a_description_of_another_array_is_told_by_the_field_that_differs() -> None:
    data = encode_metadata("float32", (4, 4), (2, 2))
    assert differences(data, "float32", (4, 4), (2, 2)) is None
    assert differences(data.replace(b"[4,4]", b"[4, 4]"), "float32", (4, 4), (2, 2)) is None
    found = differences(data, "float32", (4, 5), (2, 2))
    assert found == ("shape [4, 5]", "[4, 4]")
    assert differences(b"{", "float32", (4, 4), (2, 2)) is not None


@pytest.mark.parametrize(("count", "node_bytes"), [(1, 1000), (2, 10), (300, 400), (300, 1 << 20)])
def test_the_array_library_finds_every_key_of_an_index(
    tmp_path: Path, count: int, node_bytes: int
) -> None:
    # From one entry to trees of several levels; inline values and values in two files.
    (tmp_path / "d").mkdir()
    (tmp_path / "d/values").write_bytes(bytes(range(256)) * 4)
    entries: list[Entry] = []
    for number in range(count):
        key = f"läyer.{number // 7}/c/{number}".encode()
        file = ("d/values", "d/index")[number % 5 == 0]
        is_inline = number % 3 == 0
        entries.append((key, b"v" * (number % 200) if is_inline else Extent(file, number % 9, 5)))
    entries.sort()
    head = b"other"
    nodes, root = encode_tree(entries, file="d/index", offset=len(head), node_bytes=node_bytes)
    (tmp_path / "d/index").write_bytes(head + nodes)
    assert root.key_count == count
    manifest = {
        "config": {
            "compression": None,
            "max_decoded_node_bytes": 1 << 20,
            "max_inline_value_bytes": 1024,
            "uuid": secrets.token_hex(16),
            "version_tree_arity_log2": 4,
        },
        "version_tree_nodes": [],
        "versions": [
            {
                "commit_time": 1,
                "generation_number": 1,
                "root": {
                    "location": f"btreenode::d/index:{root.extent.offset}:{root.extent.length}",
                    "statistics": {
                        "num_indirect_value_bytes": root.stored_bytes,
                        "num_keys": root.key_count,
                        "num_tree_bytes": root.tree_bytes,
                    },
                },
                "root_height": root.height,
            }
        ],
    }
    (tmp_path / "manifest.ocdbt").write_bytes(ts.ocdbt.undump_manifest(manifest))
    base = {"driver": "file", "path": f"{tmp_path}/"}
    database = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    assert sorted(database.list().result()) == [key for key, _ in entries]
    whole_files = {name: (tmp_path / name).read_bytes() for name in ("d/values", "d/index")}
    for key, value in entries:
        if isinstance(value, Extent):
            expected = whole_files[value.file][value.offset : value.offset + value.length]
        else:
            expected = value
        assert database.read(key).result().value == expected


def test_what_is_written_by_our_own_calls_is_an_array_to_the_array_library(tmp_path: Path) -> None:
    shape, chunk = (37, 53), (16, 10)
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    location = Location(driver="file", path=f"{tmp_path}/")
    with PartWriter(location, "part", file_bytes=2000) as part:
        plan = ArrayPlan(name="w", dtype="float32", shape=shape, chunk=chunk)
        part.write(plan, whole(shape), values)
        part.flush()
    base = {"driver": "file", "path": f"{tmp_path}/part/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": "w/"}
    array = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
    assert np.array_equal(array.read().result(), values)


def test_a_part_that_is_given_up_leaves_no_data_file(tmp_path: Path) -> None:
    location = Location(driver="file", path=f"{tmp_path}/")
    values = np.ones((64, 1 << 16), np.float32)
    plan = ArrayPlan(name="w", dtype="float32", shape=values.shape, chunk=(4, 1 << 16))
    with PartWriter(location, "part", file_bytes=1 << 20) as part:
        part.write(plan, whole(values.shape), values)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_cannot_be_made_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"a file")
    location = Location(driver="file", path=f"{tmp_path}/")
    plan = ArrayPlan(name="w", dtype="float32", shape=(4,), chunk=(4,))
    with PartWriter(location, "part", file_bytes=1 << 20) as part:
        part.write(plan, whole((4,)), np.ones(4, np.float32))
        with pytest.raises(StorageRefused, match="part/d"):
            part.flush()


def test_cells_of_an_empty_box_are_none() -> None:
    assert list(cells(Box((2, 2), (2, 5)), (2, 2))) == []
    assert list(itertools.islice(cells(whole(()), ()), 2)) == [()]
