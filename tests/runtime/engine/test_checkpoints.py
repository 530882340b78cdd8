"""`es.Checkpoints` in one process: what people write in any JAX program."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import everstep.runtime as es
from everstep.runtime.errors import CheckpointInvalid, Fenced, StorageRefused
from waiting import wait_for


class Moments(NamedTuple):
    mu: Any
    nu: Any


def state_of(seed: int = 0) -> dict[str, Any]:
    key = jax.random.key(seed)
    return {
        "params": {"kernel": jax.random.normal(key, (8, 6)), "bias": jnp.ones(6, jnp.bfloat16)},
        "opt": (Moments(jnp.full((6,), -0.0), jnp.array([jnp.nan, 1.0])), {}),
        "key": key,
        "step": seed,
        "host": np.arange(5, dtype=np.int64) + seed,
        "none": None,
    }


def bits(tree: Any) -> list[Any]:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return ("key", np.asarray(jax.random.key_data(leaf)).tobytes())
        if isinstance(leaf, jax.Array | np.ndarray):
            array = np.asarray(leaf)
            return (array.dtype.name, array.shape, array.tobytes())
        return leaf

    return [one(leaf) for leaf in jax.tree.leaves(tree)]


def test_a_state_comes_back_bit_for_bit_in_its_own_containers(tmp_path: Path) -> None:
    state = state_of(3)
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        saved = checkpoints.save(7, state, metadata={"loss": 2.5})
        saved.wait()
        assert saved.done()
        restored = checkpoints.restore(state)
    assert bits(restored) == bits(state)
    structure: Any = jax.tree.structure(restored)
    assert structure == jax.tree.structure(state)
    assert type(restored["opt"][0]) is Moments


def test_steps_latest_and_metadata_need_no_arrays(tmp_path: Path) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.steps() == ()
        assert checkpoints.latest() is None
        for step in (1, 5, 9):
            checkpoints.save(step, state_of(step), metadata={"loss": 1 / step, "tags": ["a"]})
        checkpoints.wait()
        assert checkpoints.steps() == (1, 5, 9)
        assert checkpoints.latest() == 9
        found = checkpoints.metadata(5)
    assert (found.step, found.metadata, found.parts) == (
        5,
        {"loss": 0.2, "tags": ["a"]},
        ("state",),
    )
    assert found.size_bytes == 8 * 6 * 4 + 6 * 2 + 6 * 4 + 2 * 4 + 2 * 4 + 5 * 8


def test_what_is_saved_is_what_was_given_whatever_becomes_of_it_afterwards(tmp_path: Path) -> None:
    host = np.arange(1 << 20, dtype=np.float32)
    device = jnp.arange(1 << 20, dtype=jnp.float32)
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        saved = checkpoints.save(1, {"host": host, "device": device, "words": "before"})
        host[:] = -1
        device = overwrite(device)
        saved.wait()
        like = {"host": host, "device": device, "words": ""}
        restored = checkpoints.restore(like)
    np.testing.assert_array_equal(restored["host"], np.arange(1 << 20, dtype=np.float32))
    np.testing.assert_array_equal(restored["device"], np.arange(1 << 20, dtype=np.float32))
    assert restored["words"] == "before"


def test_a_target_of_shapes_alone_places_the_arrays(tmp_path: Path) -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"a": jnp.arange(6.0), "n": 4})
        like = {"a": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=sharding), "n": 0}
        restored = checkpoints.restore(like)
    assert restored["a"].sharding == sharding
    assert restored["n"] == 4


@pytest.mark.parametrize(
    ("change", "leaf"),
    [
        (lambda s: {**s, "more": jnp.ones(2)}, "['more']"),
        (lambda s: {k: v for k, v in s.items() if k != "host"}, "['host']"),
        (lambda s: {**s, "host": s["host"].astype(np.int32)}, "['host']"),
        (lambda s: {**s, "host": s["host"][:4]}, "['host']"),
    ],
    ids=["missing", "unexpected", "dtype", "shape"],
)
def test_a_difference_names_the_leaf_what_was_expected_and_what_was_found(
    tmp_path: Path, change: Any, leaf: str
) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state_of())
        with pytest.raises(es.StateRefused) as refused:
            checkpoints.restore(change(state_of()))
    assert leaf in refused.value.field


def test_the_tree_may_change_between_saves(tmp_path: Path) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(3)})
        checkpoints.save(2, {"a": jnp.ones(4), "b": jnp.zeros((2, 2))})
        checkpoints.save(3, {"a": jnp.full(3, 3.0)})
        assert float(checkpoints.restore({"a": jnp.zeros(3)})["a"][0]) == 3.0
        assert checkpoints.restore({"a": jnp.zeros(4), "b": jnp.zeros((2, 2))}, 2)["a"].sum() == 4


# Parts.


@dataclass
class Table:
    """A part of a user's own kind."""

    rows: list[str]

    def describe(self) -> str:
        return "table"

    def write(self, files: es.PartFiles) -> None:
        for number, row in enumerate(self.rows):
            files.write(f"row-{number}.txt", row.encode())

    def read(self, files: es.PartFiles) -> Table:
        return Table([files.read(name).decode() for name in sorted(files.names())])


class Numbers:
    """A data iterator as grain has them."""

    def __init__(self) -> None:
        self.position = 0

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_named_parts_come_back_each_in_its_kind(tmp_path: Path) -> None:
    numbers = Numbers()
    numbers.position = 41
    parts = es.Parts(
        model={"w": jnp.arange(4.0)},
        optimizer={"mu": jnp.ones(4), "count": 3},
        settings=es.Json({"rate": 0.1, "names": ["é"]}),
        raw=b"\x00\x01",
        data=numbers,
        table=Table(["one", "two"]),
    )
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, parts)
        numbers.position = 99
        later = Numbers()
        restored = checkpoints.restore(
            es.Parts(
                model={"w": jnp.zeros(4)},
                optimizer={"mu": jnp.zeros(4), "count": 0},
                settings=es.Json(),
                raw=b"",
                data=later,
                table=Table([]),
            )
        )
        assert checkpoints.metadata(1).parts == tuple(parts)
    assert float(restored.model["w"].sum()) == 6.0
    assert restored.optimizer["count"] == 3
    assert restored.settings == {"rate": 0.1, "names": ["é"]}
    assert restored.raw == b"\x00\x01"
    assert later.position == 41
    assert restored.table == Table(["one", "two"])


def test_a_part_alone_is_restored_though_the_others_are_gone(tmp_path: Path) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, es.Parts(model={"w": jnp.ones(3)}, optimizer={"mu": jnp.ones(9)}))
        checkpoints.wait()
        for file in (tmp_path / "run").glob("step-*/optimizer/**/*"):
            if file.is_file():
                file.unlink()
        restored = checkpoints.restore(es.Parts(model={"w": jnp.zeros(3)}))
    assert list(restored) == ["model"]
    assert float(restored["model"]["w"].sum()) == 3.0


def test_parts_may_have_cadences_of_their_own(tmp_path: Path) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        for step in range(1, 4):
            parts: dict[str, Any] = {"model": {"w": jnp.full(2, float(step))}}
            if step == 2:
                parts["dataset"] = es.Json(step)
            checkpoints.save(step, es.Parts(**parts))
        checkpoints.wait()
        assert checkpoints.restore(es.Parts(dataset=None), 2).dataset == 2
        # The newest step that has the part.
        assert checkpoints.restore(es.Parts(dataset=None)).dataset == 2
        with pytest.raises(es.ConfigurationError, match="dataset"):
            checkpoints.restore(es.Parts(dataset=None), 3)


def test_orbax_reads_the_parts_that_it_knows(tmp_path: Path) -> None:
    from orbax.checkpoint import v1

    with es.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, es.Parts(model={"w": jnp.arange(4.0)}, settings=es.Json({"a": [1]})))
    (folder,) = (tmp_path / "run").glob("step-*")
    loaded = v1.load_checkpointables(str(folder))
    np.testing.assert_array_equal(loaded["model"]["w"], np.arange(4.0))
    assert loaded["settings"] == {"a": [1]}


@pytest.mark.parametrize(
    "parts",
    [{}, {"_x": 1}, {"a/b": 1}, {"everstep": 1}, {"a.b": 1}, {"x" * 65: 1}],
    ids=lambda p: ",".join(p) or "none",
)
def test_a_part_that_cannot_be_named_so_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(es.ConfigurationError, match=r"es\.Parts"):
        es.Parts(**parts)


class Gate:
    """A part whose writing stops until it is let go on."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def describe(self) -> str:
        return "gate"

    def write(self, files: es.PartFiles) -> None:
        self.reached.set()
        assert self.opened.wait(60)
        files.write("gate", b"")

    def read(self, files: es.PartFiles) -> Any:
        return files.names()


# Refusals before `save` returns.


def test_what_cannot_be_stored_is_refused_by_its_name_and_the_step_is_none(tmp_path: Path) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        with pytest.raises(es.StateRefused, match=r"\['bad'\]"):
            checkpoints.save(1, {"ok": jnp.ones(2), "bad": object()})
        with pytest.raises(es.StateRefused, match="metadata"):
            checkpoints.save(1, {"ok": jnp.ones(2)}, metadata={"x": object()})
        checkpoints.save(1, {"ok": jnp.ones(2)}).wait()
        assert checkpoints.steps() == (1,)


@pytest.mark.parametrize("step", [-1, 3, 2, True, 1.5])
def test_a_step_that_is_no_later_one_is_refused(tmp_path: Path, step: Any) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(3, {"a": jnp.ones(2)})
        with pytest.raises(es.ConfigurationError, match="step"):
            checkpoints.save(step, {"a": jnp.ones(2)})


def test_a_folder_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary.txt").write_text("mine")
    with es.Checkpoints(tmp_path / "home") as checkpoints, pytest.raises(StorageRefused):
        checkpoints.save(1, {"a": jnp.ones(2)})
    assert [file.name for file in (tmp_path / "home").iterdir()] == ["diary.txt"]


def test_a_state_that_does_not_fit_on_the_disk_is_refused_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def full(path: Any) -> os.statvfs_result:
        found = list(real(path))
        found[4] = 0  # f_bavail
        return os.statvfs_result(found)

    with es.Checkpoints(tmp_path / "run") as checkpoints:
        monkeypatch.setattr(os, "statvfs", full)
        with pytest.raises(StorageRefused, match="0 bytes free"):
            checkpoints.save(1, {"a": jnp.ones(2)})


def test_a_newer_program_takes_the_run_and_the_older_one_is_told(tmp_path: Path) -> None:
    older = es.Checkpoints(tmp_path / "run")
    older.save(1, {"a": jnp.ones(2)}).wait()
    with es.Checkpoints(tmp_path / "run") as newer:
        newer.save(2, {"a": jnp.ones(2)}).wait()
        with pytest.raises(Fenced):
            older.save(3, {"a": jnp.ones(2)})
        older.close()
        assert newer.steps() == (1, 2)


def test_a_program_that_is_fenced_while_it_writes_is_told_and_its_step_does_not_exist(
    tmp_path: Path,
) -> None:
    older = es.Checkpoints(tmp_path / "run")
    gate = Gate()
    saved = older.save(1, es.Parts(model={"a": jnp.ones(2)}, gate=gate))
    gate.reached.wait(60)
    with es.Checkpoints(tmp_path / "run") as newer:
        newer.save(2, {"a": jnp.ones(2)}).wait()
        gate.opened.set()
        with pytest.raises(es.CheckpointFailed, match="fenced") as failed:
            saved.wait(60)
        assert isinstance(failed.value.__cause__, Fenced)
        assert newer.steps() == (2,)
    older.close()


def test_a_reader_claims_nothing(tmp_path: Path) -> None:
    writer = es.Checkpoints(tmp_path / "run")
    writer.save(1, {"a": jnp.ones(2)}).wait()
    with es.Checkpoints(tmp_path / "run") as reader:
        assert float(reader.restore({"a": jnp.zeros(2)})["a"].sum()) == 2.0
    writer.save(2, {"a": jnp.ones(2)}).wait()
    writer.close()


# Failures behind.


class Breaks:
    """A part that cannot be written."""

    def describe(self) -> str:
        return "breaks"

    def write(self, files: es.PartFiles) -> None:
        raise OSError(f"the part broke after {len(files.names())} files")

    def read(self, files: es.PartFiles) -> Any:
        return files.names()


def test_a_failed_write_is_raised_at_the_next_call_and_the_step_does_not_exist(
    tmp_path: Path,
) -> None:
    checkpoints = es.Checkpoints(tmp_path / "run")
    checkpoints.save(1, {"a": jnp.ones(2)}).wait()

    saved = checkpoints.save(2, es.Parts(model={"a": jnp.ones(2)}, odd=Breaks()))
    with pytest.raises(es.CheckpointFailed, match="step 2"):
        saved.wait(60)
    # Told once.
    third = checkpoints.save(3, es.Parts(model={"a": jnp.ones(2)}, odd=Breaks()))
    wait_for(third.done, what="the third step to fail")
    with pytest.raises(
        es.CheckpointFailed,
        match="step 3 could not be saved: OSError: the part broke after 0 files",
    ):
        checkpoints.save(4, {"a": jnp.ones(2)})
    checkpoints.save(5, {"a": jnp.ones(2)})
    checkpoints.close()
    assert checkpoints.steps() == (1, 5)


def test_the_programs_own_error_is_raised_and_the_failed_step_is_noted_on_it(
    tmp_path: Path,
) -> None:
    def train() -> None:
        with es.Checkpoints(tmp_path / "run") as checkpoints:
            checkpoints.save(1, {"a": jnp.ones(2)}).wait()
            checkpoints.save(3, es.Parts(model={"a": jnp.ones(2)}, odd=Breaks()))
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as raised:
        train()
    assert any("step 3 could not be saved" in note for note in raised.value.__notes__)


def test_a_damaged_newest_step_is_passed_over_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"a": jnp.full((1000,), float(step))})
        checkpoints.wait()
        _damage(tmp_path / "run", 2)
        restored = checkpoints.restore({"a": jnp.zeros(1000)})
        assert float(restored["a"][0]) == 1.0
        assert "step 2 is passed over" in caplog.text
        with pytest.raises(CheckpointInvalid):
            checkpoints.restore({"a": jnp.zeros(1000)}, 2)
        _damage(tmp_path / "run", 1)
        with pytest.raises(CheckpointInvalid, match=r"step 2: .*; step 1: "):
            checkpoints.restore({"a": jnp.zeros(1000)})


def _damage(run: Path, step: int) -> None:
    for file in run.glob(f"step-{step:010d}-*/state/ocdbt.process_*/d/*"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        with pytest.raises(es.ConfigurationError, match="a committed step"):
            checkpoints.restore({"a": jnp.zeros(2)})
        checkpoints.save(1, {"a": jnp.ones(2)})
        checkpoints.wait()
        with pytest.raises(es.ConfigurationError, match="step"):
            checkpoints.restore({"a": jnp.zeros(2)}, 7)
        with pytest.raises(es.ConfigurationError, match="one of 1"):
            checkpoints.metadata(7)


def test_a_draft_that_failed_gives_its_room_back(tmp_path: Path) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        saved = checkpoints.save(1, es.Parts(model={"a": jnp.ones(2)}, odd=Breaks()))
        with pytest.raises(es.CheckpointFailed) as failed:
            saved.wait(60)
        checkpoints.wait()
        assert (failed.value.step, failed.value.leaf) == (1, "odd")
        assert not list((tmp_path / "run").glob("step-*"))


def test_a_leaf_that_storage_did_not_take_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everstep.runtime.storage.tensors import PartWriter

    real = PartWriter.write

    def full(self: PartWriter, plan: Any, box: Any, array: Any) -> None:
        if plan.name == "b":
            raise StorageRefused("a file", "no space left", "room")
        real(self, plan, box, array)

    monkeypatch.setattr(PartWriter, "write", full)
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        saved = checkpoints.save(1, {"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(2)})
        with pytest.raises(es.CheckpointFailed, match="no space left") as failed:
            saved.wait(60)
    assert failed.value.leaf == "['b']"


def test_a_folder_of_another_user_is_refused_before_anything_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with (
        es.Checkpoints(tmp_path / "run") as checkpoints,
        pytest.raises(StorageRefused, match="no permission"),
    ):
        checkpoints.save(1, {"a": jnp.ones(2)})
    assert not (tmp_path / "run").exists()


def test_close_that_is_not_done_in_time_says_which_step_is_lost(tmp_path: Path) -> None:
    gate = Gate()
    checkpoints = es.Checkpoints(tmp_path / "run", deadline_s=0.2)
    checkpoints.save(4, es.Parts(model={"a": jnp.ones(2)}, gate=gate))
    with pytest.raises(es.CheckpointFailed, match="not written after") as failed:
        checkpoints.close()
    assert failed.value.step == 4
    gate.opened.set()


def test_a_step_dropped_while_it_is_read_is_said_and_the_newest_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer goes on, and drops what a slow reader has just begun to read."""
    from everstep.runtime.restore.assemble import restore_state as real

    place = "everstep.runtime.engine.restoring.restore_state"
    like = {"a": jnp.zeros(1000)}
    writer = es.Checkpoints(tmp_path / "run", retention=es.Retention(latest=1))
    for step in (1, 2):
        writer.save(step, {"a": jnp.full(1000, float(step))})
    writer.wait()
    overtaken: list[int] = []

    def slow(*args: Any, **kwargs: Any) -> Any:
        if not overtaken:
            overtaken.append(1)
            for step in (3, 4, 5):
                writer.save(step, {"a": jnp.full(1000, float(step))})
            writer.wait()
        return real(*args, **kwargs)

    monkeypatch.setattr(place, slow)
    with es.Checkpoints(tmp_path / "run") as reader:
        assert float(reader.restore(like)["a"][0]) == 5.0
        assert "step 2 is passed over" in caplog.text
        assert "dropped meanwhile" in caplog.text
        overtaken.clear()
        monkeypatch.setattr(place, _drop_first(writer, real))
        with pytest.raises(CheckpointInvalid, match=r"step 4: .*dropped meanwhile"):
            reader.restore(like, 4)
    writer.close()


def _drop_first(writer: es.Checkpoints, real: Any) -> Any:
    def slow(*args: Any, **kwargs: Any) -> Any:
        for step in (6, 7):
            writer.save(step, {"a": jnp.ones(1000)})
        writer.wait()
        return real(*args, **kwargs)

    return slow


# Retention.


def test_a_clean_up_that_fails_is_no_failure_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from everstep.runtime.storage.posix import PosixStore

    def refuse(_: PosixStore, path: str) -> None:
        raise StorageRefused(path, "an I/O error", "another disk")

    with es.Checkpoints(tmp_path / "run", retention=es.Retention(latest=1)) as checkpoints:
        with monkeypatch.context() as broken:
            broken.setattr(PosixStore, "delete_tree", refuse)
            for step in (1, 2, 3):
                checkpoints.save(step, {"a": jnp.ones(2)})
            checkpoints.wait()
        assert checkpoints.latest() == 3
        assert "old steps of" in caplog.text
        checkpoints.save(4, {"a": jnp.ones(2)})
        checkpoints.wait()
        assert checkpoints.steps() == (3, 4)
    assert len(list((tmp_path / "run").glob("step-*"))) == 2


def test_the_leftover_of_a_program_that_was_killed_is_collected_by_the_next(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(run)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    assert len(list(run.glob("step-*"))) == 2
    with es.Checkpoints(run) as checkpoints:
        assert checkpoints.steps() == (1,)
        checkpoints.save(3, {"a": jnp.ones(2)})
    assert len(list(run.glob("step-*"))) == 2
    assert es.Checkpoints(run).steps() == (1, 3)


KILLED = """
import os, signal, sys
import jax.numpy as jnp
import everstep.runtime as es

class Kills:
    def describe(self):
        return "kills"
    def write(self, files):
        os.kill(os.getpid(), signal.SIGKILL)
    def read(self, files):
        return None

checkpoints = es.Checkpoints(sys.argv[1])
checkpoints.save(1, {"a": jnp.ones(2)}).wait()
checkpoints.save(2, es.Parts(model={"a": jnp.ones(2)}, kills=Kills())).wait()
"""


def test_the_best_steps_stay_by_their_metric_and_the_newest_two_always(tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 2.0, 5: 9.0, 6: float("inf")}
    retention = es.Retention(latest=1, best=2, metric="loss")
    with es.Checkpoints(tmp_path / "run", retention=retention) as checkpoints:
        for step, loss in losses.items():
            note = {"loss": loss} if loss != float("inf") else {"other": 1}
            checkpoints.save(step, {"a": jnp.ones(2)}, metadata=note)
        checkpoints.wait()
        assert checkpoints.steps() == (2, 4, 5, 6)
    assert len(list((tmp_path / "run").glob("step-*"))) == 4


@pytest.mark.parametrize(
    ("field", "value"), [("latest", 0), ("best", -1), ("every_steps", 0), ("mode", "least")]
)
def test_a_retention_that_means_nothing_is_refused(field: str, value: Any) -> None:
    with pytest.raises(es.ConfigurationError, match=field):
        es.Retention(**{field: value})


# Where it may be used.


def test_it_works_inside_a_running_event_loop_and_from_another_thread(tmp_path: Path) -> None:
    async def inside() -> None:
        with es.Checkpoints(tmp_path / "loop") as checkpoints:
            checkpoints.save(1, {"a": jnp.ones(2)}).wait()
            assert float(checkpoints.restore({"a": jnp.zeros(2)})["a"][0]) == 1.0

    asyncio.run(inside())
    found: list[int] = []

    def in_thread() -> None:
        with es.Checkpoints(tmp_path / "thread") as checkpoints:
            checkpoints.save(1, {"a": jnp.ones(2)})
            checkpoints.wait()
            found.extend(checkpoints.steps())

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join(60)
    assert found == [1]


def test_after_close_it_says_so(tmp_path: Path) -> None:
    checkpoints = es.Checkpoints(tmp_path / "run")
    checkpoints.close()
    checkpoints.close()
    with pytest.raises(es.ConfigurationError, match="closed"):
        checkpoints.save(1, {"a": jnp.ones(2)})


EXIT = """
import sys
import jax.numpy as jnp
import everstep.runtime as es
checkpoints = es.Checkpoints(sys.argv[1])
for step in range(1, 4):
    checkpoints.save(step, {"a": jnp.full((1000, 1000), float(step))})
"""


def test_a_program_that_ends_without_close_keeps_its_last_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    subprocess.run([sys.executable, "-c", EXIT, str(run)], check=True, timeout=120)
    with es.Checkpoints(run) as checkpoints:
        assert checkpoints.latest() == 3


FORGOTTEN = """
import gc, sys
import jax.numpy as jnp
import everstep.runtime as es

def train():
    checkpoints = es.Checkpoints(sys.argv[1])
    checkpoints.save(1, {"a": jnp.ones((1000, 1000))})

train()
gc.collect()
"""


def test_a_step_of_checkpoints_that_nobody_holds_any_more_is_still_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    subprocess.run([sys.executable, "-c", FORGOTTEN, str(run)], check=True, timeout=120)
    assert es.Checkpoints(run).latest() == 1


FAILED_AT_EXIT = """
import sys
import everstep.runtime as es

class Breaks:
    def describe(self):
        return "breaks"
    def write(self, files):
        raise OSError("broken")
    def read(self, files):
        return None

checkpoints = es.Checkpoints(sys.argv[1])
checkpoints.save(1, es.Parts(odd=Breaks()))
"""


def test_a_failure_that_nobody_asked_for_is_said_at_the_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILED_AT_EXIT, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "step 1 could not be saved: OSError: broken" in done.stderr


FORK = """
import os, sys
import everstep.runtime as es
checkpoints = es.Checkpoints(sys.argv[1])
pid = os.fork()
if pid == 0:
    try:
        checkpoints.save(1, {"a": 1})
    except es.ConfigurationError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_after_a_fork_it_is_refused_in_the_child(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "after a fork" in done.stdout


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "everstep-save":
            thread.join(20)


# Going on, going back.


def test_a_program_that_restored_nothing_does_not_go_back_behind_what_was_reached(
    tmp_path: Path,
) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(5, {"a": jnp.ones(2)})
    with es.Checkpoints(tmp_path / "run") as fresh:
        with pytest.raises(es.ConfigurationError, match="more than 5, the newest of this run"):
            fresh.save(1, {"a": jnp.zeros(2)})
        # It has taken nothing either.
        assert fresh.steps() == (5,)
        fresh.save(6, {"a": jnp.zeros(2)})
    assert es.Checkpoints(tmp_path / "run").steps() == (5, 6)


@pytest.mark.parametrize("again", ["the same program", "a later one"])
def test_a_step_that_is_restored_is_gone_on_from_and_what_came_after_it_is_replaced(
    tmp_path: Path, again: str
) -> None:
    like = {"a": jnp.zeros(2)}
    retention = es.Retention(latest=9)
    checkpoints = es.Checkpoints(tmp_path / "run", retention=retention)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {"a": jnp.full(2, float(step))})
    if again == "a later one":
        checkpoints.close()
        checkpoints = es.Checkpoints(tmp_path / "run", retention=retention)
    restored = checkpoints.restore(like, 2)
    with pytest.raises(es.ConfigurationError, match="2 or more"):
        checkpoints.save(1, restored)
    for step in (3, 5):
        checkpoints.save(step, {"a": jnp.full(2, step + 0.5)})
    checkpoints.wait()
    assert checkpoints.steps() == (1, 2, 3, 5)
    assert float(checkpoints.restore(like, 3)["a"][0]) == 3.5
    checkpoints.close()
    assert len(list((tmp_path / "run").glob("step-*"))) == 4


def test_a_look_back_at_an_older_step_takes_nothing_away(tmp_path: Path) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"a": jnp.ones(2)})
        checkpoints.restore({"a": jnp.zeros(2)}, 1)
        checkpoints.save(3, {"a": jnp.ones(2)})
        checkpoints.wait()
        assert checkpoints.steps() == (1, 2, 3)


def test_metadata_is_in_the_file_that_orbax_shows(tmp_path: Path) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(2)}, metadata={"loss": 0.5})
    (file,) = (tmp_path / "run").glob("step-*/_CHECKPOINT_METADATA")
    assert json.loads(file.read_text())["custom_metadata"] == {"loss": 0.5}


# A folder of Orbax.


def test_steps_that_orbax_wrote_are_gone_on_from_in_the_same_folder(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    like = {"w": jnp.zeros(4), "b": jnp.zeros((), jnp.bfloat16)}
    with ocp.CheckpointManager(tmp_path / "run") as orbax_run:
        for step in (1, 2):
            state = {"w": jnp.full(4, float(step)), "b": jnp.ones((), jnp.bfloat16)}
            orbax_run.save(step, args=ocp.args.StandardSave(state))
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.steps() == (1, 2)
        assert checkpoints.metadata(2).size_bytes == 4 * 4 + 2
        assert float(checkpoints.restore(like, 1)["w"][0]) == 1.0
        with pytest.raises(es.ConfigurationError, match="that Orbax wrote"):
            checkpoints.save(2, like)
        state = checkpoints.restore(like)
        assert float(state["w"][0]) == 2.0
        assert state["b"].dtype == jnp.bfloat16
        checkpoints.save(3, state)
        checkpoints.wait()
        assert checkpoints.steps() == (1, 2, 3)
    with ocp.CheckpointManager(tmp_path / "run") as orbax_run:
        assert orbax_run.all_steps() == [1, 2]
