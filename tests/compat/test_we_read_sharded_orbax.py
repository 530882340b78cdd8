"""We restore what several processes of Orbax wrote, with as many processes as there are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import everstep.runtime as es
from many_devices import in_fresh_process
from many_processes import Processes
from tests.compat.golden.make_sharded import FOLDER, KINDS, STEP, example, make_all

pytestmark = pytest.mark.filterwarnings("ignore")

v0 = pytest.importorskip("orbax.checkpoint")

GOLDENS = sorted(path for path in FOLDER.glob("orbax-*/*") if path.is_dir())
ROOT = Path(__file__).parents[2]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def assert_same(found: Any, expected: Any) -> None:
    structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(expected)]
    assert structures[0] == structures[1]
    leaves = jax.tree_util.tree_leaves_with_path(found)
    for (path, a), b in zip(leaves, jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        if isinstance(b, int):
            assert (type(a), a) == (int, b), name
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert np.asarray(a).tobytes() == b.tobytes(), name


def like() -> Any:
    """Where one process wants it, with nothing of the values in it."""
    return jax.tree.map(
        lambda leaf: 0 if isinstance(leaf, int) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
        example(),
    )


def restore_alone(folder: Path) -> Any:
    with es.Checkpoints(folder) as checkpoints:
        return checkpoints.restore(like())


def test_there_is_a_golden_of_each_kind_by_each_number_of_processes() -> None:
    wanted = {f"{count}-{name}" for count, names in KINDS.items() for name in names}
    assert {path.name for path in GOLDENS} == wanted
    # With OCDBT each process writes a database of its own, and values of all are in use.
    for golden in GOLDENS:
        count = int(golden.name[0])
        parts = [path for path in golden.rglob("ocdbt.process_*") if path.is_dir()]
        assert len(parts) == (0 if "folders" in golden.name else count), golden.name


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.name)
def test_one_process_restores_what_several_wrote(golden: Path) -> None:
    assert_same(restore_alone(golden), example())


def test_one_process_restores_onto_many_devices_what_several_wrote() -> None:
    in_fresh_process(restored_onto_devices, "", devices=4)


def restored_onto_devices(_: str) -> None:
    from tests.compat.golden.make_sharded import shardings

    wanted = jax.tree.map(
        lambda leaf, sharding: (
            0
            if isinstance(leaf, int)
            else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        ),
        example(),
        {**shardings(), "step": 0},
    )
    for golden in GOLDENS:
        with es.Checkpoints(golden) as checkpoints:
            found = checkpoints.restore(wanted)
        assert_same(found, example())
        assert found["params"][0]["a/b"].sharding == wanted["params"][0]["a/b"].sharding


RESTORE = """
from pathlib import Path
from tests.compat.golden.make_sharded import STEP, example
m = mesh(COUNT)
def sharding(value):
    # The first axis that this number of processes divides; whole where there is none.
    axes = [n for n, size in enumerate(value.shape) if size % COUNT == 0]
    spec = [None] * value.ndim
    if axes:
        spec[axes[-1]] = "x"
    return NamedSharding(m, P(*spec))
def wanted(value):
    if isinstance(value, int):
        return 0
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding(value))
def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)
split = 0
for folder in os.environ["FOLDERS"].split():
    with es.Checkpoints(folder, deadline_s=60) as checkpoints:
        found = checkpoints.restore(jax.tree.map(wanted, example()))
    assert found["step"] == STEP
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(example()), strict=True):
        if isinstance(b, int):
            continue
        assert a.sharding == sharding(b) and a.dtype == b.dtype
        split += not a.is_fully_replicated
        for shard in a.addressable_shards:
            assert np.array_equal(bits(shard.data), bits(b[shard.index])), folder
assert split or COUNT == 1
print("RESTORED", flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("count", [2, 3], ids=["two", "three"])
def test_another_number_of_processes_restores_what_several_wrote(
    processes: Processes, count: int
) -> None:
    folders = " ".join(map(str, GOLDENS))
    outputs = processes.run(count, RESTORE, FOLDERS=folders, PYTHONPATH=str(ROOT))
    assert all("RESTORED" in output for output in outputs)


@pytest.mark.processes
@pytest.mark.slow
def test_what_two_processes_of_orbax_write_now_is_restored_too(tmp_path: Path) -> None:
    make_all(tmp_path, 2)
    made = sorted(tmp_path.iterdir())
    assert [path.name for path in made] == sorted(f"2-{name}" for name in KINDS[2])
    for folder in made:
        assert_same(restore_alone(folder), example())


@pytest.mark.parametrize("process", [0, 1])
def test_what_a_process_wrote_and_is_gone_is_missed(tmp_path: Path, process: int) -> None:
    (golden,) = [path for path in GOLDENS if path.name == "2-zarr3-ocdbt-plain"]
    copy = tmp_path / "copy"
    shutil.copytree(golden, copy)
    shutil.rmtree(copy / f"ocdbt.process_{process}" / "d")
    with pytest.raises(es.CheckpointInvalid, match="rows"):
        restore_alone(copy)


def test_the_run_of_several_processes_has_its_step() -> None:
    (golden,) = [path for path in GOLDENS if path.name == "2-orbax_run"]
    assert es.Checkpoints(os.fspath(golden)).steps() == (STEP,)
