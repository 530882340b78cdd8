"""We restore what Orbax writes: goldens, fresh ones, and those in Orbax's own wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import array, claimed, random_array, random_values, save, tree_of
from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step
from everstep.runtime.agent.link import Source
from everstep.runtime.checkpoint.foreign import foreign_steps, is_foreign, open_foreign
from everstep.runtime.engine.state import flatten
from everstep.runtime.errors import (
    CheckpointInvalid,
    ChecksumMismatch,
    ConfigurationError,
    ManifestCorrupt,
    StateRefused,
    StorageRefused,
)
from everstep.runtime.layout.boxes import whole
from everstep.runtime.layout.dtypes import STORABLE, numpy_dtype
from everstep.runtime.layout.tree import LeafKind
from everstep.runtime.restore.assemble import restore_state
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.posix import PosixStore
from everstep.runtime.storage.reader import CheckpointReader
from many_devices import in_fresh_process
from tests.compat.golden.make_goldens import FOLDER, MAKERS, example

pytestmark = pytest.mark.filterwarnings("ignore")

v0 = pytest.importorskip("orbax.checkpoint")

GOLDENS = sorted(path for path in FOLDER.glob("orbax-*/*") if path.is_dir())
WITHOUT_TEXT = ("standard", "orbax_run")


class Order:
    """A restore from storage alone."""

    host = HostId(SliceId(0), 0)
    incarnation = Incarnation(1)
    token = ""
    holdings = ()

    def __init__(self, folder: Path, step: int, item: str = "state") -> None:
        self.restore_step = Step(step)
        self.storage = Source(uri=str(folder), step=Step(step), item=item)


def restore(folder: Path, like: Any, *, step: int = 0, item: str = "state") -> Any:
    order = Order(folder, step, item)
    return restore_state(
        flatten(like), None, assignment=order, own_slots={}, memory_bytes=1 << 28
    ).state


def bits(value: Any) -> object:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return str(value.dtype), bits(jax.random.key_data(value))
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        array = np.asarray(value)
        return type(value).__name__, array.dtype.name, array.shape, array.tobytes()
    return type(value), value


def assert_same(found: Any, expected: Any) -> None:
    structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(expected)]
    assert structures[0] == structures[1]
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        assert bits(a) == bits(b), jax.tree_util.keystr(path)


def other(leaf: Any) -> Any:
    """The same kind of leaf with another value, so that nothing passes by being kept."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    return type(leaf)("" if isinstance(leaf, str) else 0)


@pytest.fixture(params=[*GOLDENS, *MAKERS], ids=lambda p: getattr(p, "name", f"fresh-{p}"))
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    if isinstance(request.param, Path):
        return request.param, request.param.name
    folder = tmp_path / "orbax"
    MAKERS[request.param](folder)
    return folder, request.param


def test_every_golden_is_small() -> None:
    assert {path.name for path in GOLDENS} == set(MAKERS)
    files = [file for file in FOLDER.rglob("orbax-*/**/*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 250_000


def test_a_state_comes_back_bit_for_bit_in_the_words_of_the_program(
    checkpoint: tuple[Path, str],
) -> None:
    folder, name = checkpoint
    state = example(has_text=name not in WITHOUT_TEXT)
    found = restore(folder, jax.tree.map(other, state), step=12 if name == "orbax_run" else 0)
    assert_same(found, state)


def test_items_json_and_what_was_said_of_a_step_are_read() -> None:
    (folder,) = [path for path in GOLDENS if path.name == "orbax_run"]
    found = open_foreign(str(folder))
    assert (found.step, found.steps()) == (12, (12,))
    assert {name: kind.value for name, kind in found.items.items()} == {
        "params": "tree",
        "notes": "json",
    }
    assert found.json("notes") == {"lines": [1, "two"]}
    assert found.metadata["custom_metadata"] == {"seed": 5}
    assert found.committed_at_s is not None
    with pytest.raises(ConfigurationError, match="params"):
        found.reader("weights")
    with pytest.raises(ConfigurationError, match="12"):
        open_foreign(str(folder), 13)


def test_an_array_without_checksums_is_said_to_be_unverified() -> None:
    (golden,) = [path for path in GOLDENS if path.name == "zarr3-folders-zstd"]
    reader = open_foreign(str(golden)).reader()
    assert not reader.is_verified
    assert "['params'][0]['kernel']" in reader.unverified


def test_an_array_with_checksums_is_verified_when_it_is_read(tmp_path: Path) -> None:
    tree = tree_of(array("w", shape=(64, 64)))
    values = random_values(tree)
    store = PosixStore(str(tmp_path))
    # A step of ours, looked at as Orbax would: without its ledger and manifest.
    folder = tmp_path / save(store, claimed(store), 1, tree, values, hosts=1).folder
    reader = open_foreign(str(folder)).reader()
    assert reader.is_verified
    out = np.empty((64, 64), np.float32)
    reader.read_into(0, whole((64, 64)), out)
    assert out.tobytes() == values[0].tobytes()
    data = max((folder / "state").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(ChecksumMismatch, match="'w'"):
        open_foreign(str(folder)).reader().read_into(0, whole((64, 64)), out)


def test_every_dtype_that_orbax_holds_comes_back(tmp_path: Path) -> None:
    lacking = {"uint2", "uint4", "float8_e4m3"}
    state = {
        f"{name}{shape}": random_array(name, shape, seed)
        for seed, name in enumerate(sorted(STORABLE - lacking))
        for shape in ((7,), (3, 5))
    }
    for is_zarr3 in (True, False):
        held = dict(state)
        if not is_zarr3:
            names = ("int2", "float4_e2m1fn", "float8_e3m4", "float8_e8m0fnu")
            held = {name: value for name, value in held.items() if not name.startswith(names)}
        folder = tmp_path / f"zarr3-{is_zarr3}"
        with v0.Checkpointer(v0.PyTreeCheckpointHandler(use_zarr3=is_zarr3)) as checkpointer:
            checkpointer.save(folder, held)
        assert_same(restore(folder, jax.tree.map(np.zeros_like, held)), held)


def test_what_another_process_sees_of_an_orbax_run_is_in_any_layout(tmp_path: Path) -> None:
    in_fresh_process(sharded_arrays_come_back_in_any_layout, str(tmp_path), devices=8)


def sharded_arrays_come_back_in_any_layout(root: str) -> None:
    devices = np.array(jax.devices())
    places = {
        "rows": NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x")),
        "columns": NamedSharding(Mesh(devices, ("x",)), PartitionSpec(None, "x")),
        "blocks": NamedSharding(Mesh(devices.reshape(4, 2), ("x", "y")), PartitionSpec("x", "y")),
        "partly": NamedSharding(Mesh(devices.reshape(4, 2), ("x", "y")), PartitionSpec("y")),
        "all": NamedSharding(Mesh(devices, ("x",)), PartitionSpec()),
        "one": jax.sharding.SingleDeviceSharding(devices[3]),
    }
    dtypes = sorted(STORABLE - {"uint2", "uint4", "float8_e4m3", "int2", "float4_e2m1fn"})
    dtypes = [d for d in dtypes if jax.dtypes.canonicalize_dtype(d) == numpy_dtype(d)]
    values = {name: random_array(name, (16, 24), 3) for name in dtypes}
    for name, place in places.items():
        state = {dtype: jax.device_put(value, place) for dtype, value in values.items()}
        with v0.Checkpointer(v0.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
            checkpointer.save(Path(root) / name, state)
    for name in places:
        for wanted in places.values():
            like = {
                dtype: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=wanted)
                for dtype, value in values.items()
            }
            found = restore(Path(root) / name, like)
            for dtype, value in values.items():
                assert found[dtype].sharding == wanted
                assert np.asarray(found[dtype]).tobytes() == value.tobytes(), (name, dtype)


# What is not there, or is not finished.


def test_steps_without_their_final_name_do_not_exist(tmp_path: Path) -> None:
    with v0.CheckpointManager(tmp_path) as orbax_run:
        for step in (1, 5, 10):
            orbax_run.save(step, args=v0.args.StandardSave({"w": jnp.full(2, step)}))
            orbax_run.wait_until_finished()
    os.rename(tmp_path / "10", tmp_path / "10.orbax-checkpoint-tmp-1234")
    (tmp_path / "notes_3").mkdir()
    assert foreign_steps(str(tmp_path)) == (1, 5)
    # Where Orbax commits by marker, it begins a step under its final name.
    os.unlink(tmp_path / "5" / "commit_success.txt")
    file = tmp_path / "5" / "_CHECKPOINT_METADATA"
    file.write_text(json.dumps({**json.loads(file.read_text()), "commit_timestamp_nsecs": None}))
    assert foreign_steps(str(tmp_path)) == (1,)


def test_two_folders_of_one_step_are_refused(tmp_path: Path) -> None:
    (golden,) = [path for path in GOLDENS if path.name == "orbax_run"]
    for name in ("a_3", "b_3"):
        shutil.copytree(golden / "ckpt_000012", tmp_path / name)
    with pytest.raises(ConfigurationError, match="a_3, b_3"):
        foreign_steps(str(tmp_path))


def test_what_is_not_of_orbax_has_no_steps(tmp_path: Path) -> None:
    (tmp_path / "3").mkdir()
    (tmp_path / "file_4").write_text("")
    assert not is_foreign(str(tmp_path))
    assert not is_foreign(str(tmp_path / "nowhere"))


def test_the_file_of_old_versions_is_refused_with_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "3" / "default").mkdir(parents=True)
    (tmp_path / "3" / "default" / "checkpoint").write_bytes(b"\x80")
    with pytest.raises(CheckpointInvalid, match="restore it with Orbax, and save it again"):
        open_foreign(str(tmp_path)).reader()


def test_missing_arrays_and_other_trees_are_named(tmp_path: Path) -> None:
    (golden,) = [path for path in GOLDENS if path.name == "zarr2-folders-plain"]
    state = example(has_text=True)
    like = {**state, "mask": jnp.zeros(2, jnp.int8), "more": jnp.zeros(1)}
    with pytest.raises(StateRefused, match=r"mask.*more"):
        restore(golden, like)
    folder = tmp_path / "copy"
    shutil.copytree(golden, folder)
    (folder / "params.0.kernel" / "0.0").unlink()
    with pytest.raises(CheckpointInvalid, match="kernel"):
        restore(folder, state)
    shutil.rmtree(folder / "mask")
    with pytest.raises(ManifestCorrupt, match="mask"):
        open_foreign(str(folder)).reader()


def test_typed_keys_without_their_kind_are_not_guessed(tmp_path: Path) -> None:
    (golden,) = [path for path in GOLDENS if path.name == "standard"]
    folder = tmp_path / "copy"
    shutil.copytree(golden, folder)
    shutil.rmtree(folder / "array_metadatas")
    (folder / "_sharding").unlink()
    with pytest.raises(StateRefused, match=r"key.*keys"):
        restore(folder, example(has_text=False))
    kinds = {leaf.name: leaf.kind for leaf in open_foreign(str(folder)).reader().tree.leaves}
    assert kinds["['key']"] is LeafKind.ARRAY


def wheel() -> list[Path]:
    """Checkpoints of earlier versions that Orbax ships to test itself."""
    spec = importlib.util.find_spec("orbax.checkpoint")
    places = spec.submodule_search_locations if spec is not None else None
    below = "experimental/v1/_src/testing/compatibility/checkpoints/v0_checkpoints"
    return [
        case
        for place in places or ()
        for case in sorted((Path(place) / below).glob("*/*/*"))
        if case.is_dir()
    ]


@pytest.mark.parametrize("case", wheel(), ids=lambda p: f"{p.parts[-3]}-{p.name}")
def test_checkpoints_of_earlier_versions_are_read_or_refused(case: Path) -> None:
    like = {"a": jnp.zeros(8, jnp.int32), "b": {"c": jnp.zeros(3, jnp.int32)}}
    if case.parent.name == "critical_metadata_alterations" or "missing_metadata" in case.name:
        with pytest.raises((CheckpointInvalid, ConfigurationError)):
            open_foreign(str(case)).reader()
        return
    found = restore(case, like)
    assert np.asarray(found["a"]).tolist() == list(range(8))
    assert np.asarray(found["b"]["c"]).tolist() == [1, 2, 3]


# Beside a run of ours.


def test_a_run_may_begin_beside_steps_of_orbax_but_not_inside_one(tmp_path: Path) -> None:
    (golden,) = [path for path in GOLDENS if path.name == "orbax_run"]
    shutil.copytree(golden, tmp_path / "run")
    with pytest.raises(StorageRefused):
        RunLedger(PosixStore(str(tmp_path / "run" / "ckpt_000012"))).claim(Incarnation(1), "job")
    RunLedger(PosixStore(str(tmp_path / "run"))).claim(Incarnation(1), "job")
    assert foreign_steps(str(tmp_path / "run")) == (12,)


def test_the_reader_has_the_methods_of_ours() -> None:
    (golden,) = [path for path in GOLDENS if path.name == "v1"]
    reader = open_foreign(str(golden)).reader()
    for name in ("tree", "extra", "chunks", "read_many", "read_into"):
        assert hasattr(reader, name)
        assert hasattr(CheckpointReader, name)
