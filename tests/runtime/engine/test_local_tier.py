"""`es.Checkpoints(…, local=…)`: what this host's disk has is not read from the run."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import everstep.runtime as es
from everstep.runtime.disk.copies import find_copies
from local_copies import files_of, flip
from waiting import wait_for


def state_of(seed: int = 0) -> dict[str, Any]:
    return {
        "w": jax.random.normal(jax.random.key(seed), (700, 600)),
        "small": jnp.arange(5, dtype=jnp.bfloat16) + seed,
        "host": np.arange(9, dtype=np.int64) * seed,
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(seed),
        "n": seed,
    }


def bits(tree: Any) -> list[Any]:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        return (array.dtype.name, array.shape, array.tobytes())

    return [one(leaf) for leaf in jax.tree.leaves(tree)]


class Folders:
    """A run and a disk."""

    def __init__(self, root: Path) -> None:
        self.run, self.disk = root / "run", root / "disk"

    def open(self, **more: Any) -> es.Checkpoints:
        options: dict[str, Any] = {"local": self.disk, **more}
        return es.Checkpoints(self.run, **options)

    def save(self, *steps: int, **more: Any) -> None:
        for step in steps:
            # Closed each time, so that no copy is left out because the disk is busy.
            with self.open(**more) as checkpoints:
                checkpoints.save(step, state_of(step)).wait()

    def restore(self, step: int | None = None, **more: Any) -> Any:
        with self.open(**more) as checkpoints:
            return checkpoints.restore(state_of(0), step)

    def steps_copied(self) -> list[int]:
        return [copy.record.step for copy in find_copies(str(self.disk), str(self.run))[0]]

    def lose_arrays(self) -> None:
        """Take away every array of the run: whoever reads one from there fails."""
        for base, _, names in os.walk(self.run):
            if os.path.basename(base) == "d":
                for name in names:
                    os.unlink(os.path.join(base, name))


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Warnings, in order."""
    caplog.set_level(logging.INFO, "everstep")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_what_the_disk_has_is_not_read_from_the_run(folders: Folders) -> None:
    folders.save(1, 2)
    assert folders.steps_copied() == [2]
    folders.lose_arrays()
    assert bits(folders.restore()) == bits(state_of(2))
    with pytest.raises(es.EverstepError, match="step 2"):
        folders.restore(local=None)


def test_only_what_the_disk_lacks_is_read_from_the_run(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "everstep")
    folders.save(1)
    (path,) = (path for path in files_of(folders.disk) if path.suffix == ".bytes")
    # The array is in two blocks of a MiB; this is in the first one.
    flip(path, 8 * 1000)
    assert bits(folders.restore()) == bits(state_of(1))
    assert "checksum differs" in caplog.text
    whole = sum(np.asarray(a).nbytes for a in (state_of()["w"], state_of()["small"]))
    whole += 9 * 8 + 8
    assert f"{whole - (1 << 20)} bytes from local copies, {1 << 20} from file://" in caplog.text


@pytest.mark.parametrize("seed", range(24))
def test_a_flipped_bit_on_the_disk_never_becomes_a_wrong_value(folders: Folders, seed: int) -> None:
    folders.save(3)
    files = files_of(folders.disk)
    path = files[seed % len(files)]
    flip(path, (seed * 7919 + 13) * 104_729 % (path.stat().st_size * 8))
    assert bits(folders.restore()) == bits(state_of(3))


def test_a_copy_is_only_read_for_the_very_content_that_is_committed(
    folders: Folders, said: Callable[[], list[str]]
) -> None:
    folders.save(5)
    # The run is begun anew: there is a step 5 again, of other content, by an equal incarnation.
    shutil.rmtree(folders.run)
    with es.Checkpoints(folders.run) as checkpoints:
        checkpoints.save(5, state_of(6))
    assert folders.steps_copied() == [5]
    assert bits(folders.restore()) == bits(state_of(6))
    assert said() == []


def test_a_copy_makes_no_step_exist_and_holds_none_back(folders: Folders) -> None:
    folders.save(5)
    with es.Checkpoints(folders.run) as checkpoints:
        checkpoints.save(6, state_of(6))
    assert bits(folders.restore()) == bits(state_of(6)), "a newer commit counts"
    shutil.rmtree(folders.run)
    with folders.open() as checkpoints:
        assert checkpoints.steps() == ()
        with pytest.raises(es.ConfigurationError, match="a committed step"):
            checkpoints.restore(state_of())


def test_a_copy_of_an_older_step_is_read_when_that_step_is_asked_for(folders: Folders) -> None:
    folders.save(1, local=es.LocalTier(folders.disk, latest=2))
    folders.save(2, local=es.LocalTier(folders.disk, latest=2))
    assert folders.steps_copied() == [2, 1]
    folders.lose_arrays()
    assert bits(folders.restore(1)) == bits(state_of(1))


def test_every_part_has_its_copy_and_a_part_is_restored_alone(folders: Folders) -> None:
    model, optimizer = {"w": jnp.arange(6.0)}, {"m": jnp.ones((3, 2))}
    with folders.open() as checkpoints:
        parts = es.Parts(model=model, optimizer=optimizer, note=es.Json({"a": 1}))
        checkpoints.save(1, parts)
    folders.lose_arrays()
    with folders.open() as checkpoints:
        found = checkpoints.restore(es.Parts(model=model, note=es.Json()))
        assert bits(found.model) == bits(model)
        assert found.note == {"a": 1}
        assert bits(checkpoints.restore(es.Parts(optimizer=optimizer)).optimizer) == bits(optimizer)


def test_casts_patterns_and_new_layouts_are_served_from_the_disk(folders: Folders) -> None:
    folders.save(1)
    folders.lose_arrays()
    like = {**state_of(0), "w": jnp.zeros((700, 600), jnp.bfloat16)}
    with folders.open() as checkpoints:
        found = checkpoints.restore(like, only=("w", "n"), cast="w")
    assert bits(found["w"]) == bits(state_of(1)["w"].astype(jnp.bfloat16))
    assert bits(found["small"]) == bits(like["small"])


def test_copies_are_made_as_often_as_was_said(folders: Folders) -> None:
    local = es.LocalTier(folders.disk, every_saves=3)
    with folders.open(local=local) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, state_of(step)).wait()
    assert folders.steps_copied() == [3]


def failing(number: int) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        del arguments, named
        raise OSError(number, os.strerror(number))

    return call


def is_disk_idle() -> bool:
    return not any(thread.name == "everstep-local" for thread in threading.enumerate())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_fails_no_step_and_is_said_once(
    folders: Folders,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], list[str]],
    number: int,
) -> None:
    folders.save(1)
    with monkeypatch.context() as patched:
        # What the run is written with goes another way.
        patched.setattr("everstep.runtime.disk.tier.os.ftruncate", failing(number))
        with folders.open() as checkpoints:
            for step in (2, 3, 4):
                checkpoints.save(step, state_of(step)).wait()
                wait_for(is_disk_idle, what="the copy to fail")
            assert checkpoints.steps()[-1] == 4
    (words,) = said()
    assert str(folders.disk) in words
    assert errno.errorcode[number] in words
    assert bits(folders.restore()) == bits(state_of(4))
    folders.save(5)
    assert folders.steps_copied() == [5]


def test_a_disk_that_hangs_holds_no_step_up(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, go_on = threading.Event(), threading.Event()
    real = os.ftruncate

    def hang(descriptor: int, length: int) -> None:
        hung.set()
        assert go_on.wait(60)
        real(descriptor, length)

    with folders.open(deadline_s=20) as checkpoints:
        monkeypatch.setattr("everstep.runtime.disk.tier.os.ftruncate", hang)
        checkpoints.save(1, state_of(1)).wait()
        assert hung.wait(20)
        for step in (2, 3, 4, 5):
            checkpoints.save(step, state_of(step)).wait(20)
        assert checkpoints.steps()[-1] == 5
        go_on.set()
    assert folders.steps_copied() == [1]
    assert bits(folders.restore()) == bits(state_of(5))


def test_a_folder_that_cannot_be_used_is_said_and_the_run_goes_on(
    folders: Folders, said: Callable[[], list[str]]
) -> None:
    folders.disk.write_text("a file")
    folders.save(1)
    assert bits(folders.restore()) == bits(state_of(1))
    written, read = said()
    assert "are not written" in written
    assert "are not read" in read
    assert "a file is where a folder should be" in written


def test_a_second_program_on_the_same_disk_writes_no_copies(
    folders: Folders, said: Callable[[], list[str]]
) -> None:
    with folders.open() as first:
        first.save(1, state_of(1)).wait()
        with folders.open() as second:
            second.restore(state_of())
            second.save(2, state_of(2)).wait()
    assert folders.steps_copied() == [1]
    assert any("another live process" in words for words in said())
    assert bits(folders.restore()) == bits(state_of(2))


@pytest.mark.parametrize("local", ["gs://bucket/folder", ""])
def test_what_is_no_disk_is_refused(tmp_path: Path, local: str) -> None:
    with pytest.raises(es.ConfigurationError, match="disk"):
        es.Checkpoints(tmp_path / "run", local=local)
    with pytest.raises(es.ConfigurationError, match="every_saves"):
        es.LocalTier(tmp_path, every_saves=0)
