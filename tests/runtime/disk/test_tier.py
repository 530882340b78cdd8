"""Local copies on a real disk: written, found, damaged, crowded out."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import random_values, same_bits
from everstep.runtime.disk.copies import find_copies
from everstep.runtime.disk.record import RECORD, decode_record
from everstep.runtime.errors import (
    CheckpointInvalid,
    EverstepError,
    ManifestCorrupt,
    StorageRefused,
    StorageUnavailable,
)
from local_copies import RUN, TREE, files_of, flip, read, steps_in, tier_of, write
from waiting import wait_for


def test_a_copy_says_whose_it_is_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    write(tier_of(tmp_path), 7)
    (copy,), passed = find_copies(str(tmp_path), RUN)
    assert passed == ()
    record = copy.record
    assert (record.run, record.owner, record.step, record.incarnation, record.digest) == (
        RUN,
        "one",
        7,
        3,
        "sha256:a",
    )
    assert record.items["state"].plot.tree.fingerprint == TREE.fingerprint
    assert same_bits(read(copy), random_values(TREE, 7))


def test_only_the_newest_copies_stay(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, latest=2)
    for step in (1, 2, 3, 4):
        write(tier, step)
    assert steps_in(tmp_path) == [4, 3]
    assert len(files_of(tmp_path)) == 4


def test_a_copy_can_still_be_read_while_it_is_replaced(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    write(tier, 1)
    (copy,), _ = find_copies(str(tmp_path), RUN)
    opened = copy.open("state")
    write(tier, 2)
    values = bytearray(8)
    out = np.frombuffer(values, np.uint8)
    opened.read_into(0, out)
    opened.close()
    assert bytes(values) == random_values(TREE, 1)[0].tobytes()[:8]


@pytest.mark.parametrize("seed", range(60))
def test_any_flipped_bit_is_found(tmp_path: Path, seed: int) -> None:
    write(tier_of(tmp_path), 5)
    files = files_of(tmp_path)
    path = files[seed % len(files)]
    flip(path, (seed * 7919 + 13) * 104_729 % (path.stat().st_size * 8))
    copies, passed = find_copies(str(tmp_path), RUN)
    if passed:
        assert path.name == RECORD
        assert str(path.parent) in passed[0]
        return
    try:
        values = read(copies[0])
    except CheckpointInvalid:
        return
    # Between two shards there are bytes that belong to none.
    assert same_bits(values, random_values(TREE, 5))


def test_a_copy_without_its_record_is_none_and_is_cleaned_up(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    write(tier, 1)
    (folder,) = {path.parent for path in files_of(tmp_path)}
    (folder / RECORD).unlink()
    copies, passed = find_copies(str(tmp_path), RUN)
    assert copies == ()
    assert "never finished" in passed[0]
    write(tier, 2)
    assert steps_in(tmp_path) == [2]
    assert not folder.exists()


@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_a_torn_record_is_named_passed_over_and_cleaned_up(tmp_path: Path, kept: int) -> None:
    tier = tier_of(tmp_path)
    write(tier, 1)
    (path,) = (path for path in files_of(tmp_path) if path.name == RECORD)
    data = path.read_bytes()
    path.write_bytes(data[:kept] if kept >= 0 else data[: len(data) // 2])
    copies, passed = find_copies(str(tmp_path), RUN)
    assert copies == ()
    assert str(path.parent) in passed[0]
    write(tier, 2)
    assert steps_in(tmp_path) == [2]
    assert not path.exists()


def test_bytes_that_are_cut_off_or_missing_are_named(tmp_path: Path) -> None:
    write(tier_of(tmp_path), 1)
    (copy,), _ = find_copies(str(tmp_path), RUN)
    path = Path(copy.folder, "state.bytes")
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(ManifestCorrupt, match=f"{size - 1} bytes"):
        copy.open("state")
    path.unlink()
    with pytest.raises(ManifestCorrupt, match=r"state\.bytes"):
        copy.open("state")


def test_bytes_that_are_cut_off_while_they_are_read_are_a_failure_of_the_disk(
    tmp_path: Path,
) -> None:
    write(tier_of(tmp_path), 1)
    (copy,), _ = find_copies(str(tmp_path), RUN)
    opened = copy.open("state")
    os.truncate(opened.path, 10)
    with pytest.raises(StorageUnavailable, match="ends at byte 10"):
        opened.read_into(0, np.empty(20, np.uint8))
    opened.close()


def test_a_copy_of_another_run_is_passed_over_also_where_ours_should_be(tmp_path: Path) -> None:
    write(tier_of(tmp_path / "theirs", run="run-b"), 9)
    write(tier_of(tmp_path / "ours"), 1)
    (theirs,) = (tmp_path / "theirs").iterdir()
    (ours,) = (tmp_path / "ours").iterdir()
    assert steps_in(tmp_path / "theirs") == []
    (theirs / "one").rename(ours / "two")
    copies, passed = find_copies(str(tmp_path / "ours"), RUN)
    assert [copy.record.step for copy in copies] == [1]
    assert "run-b" in passed[0]


def test_a_record_of_a_newer_version_is_passed_over() -> None:
    body = b'{"format":2,"run":"run-a"}'
    data = body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"
    with pytest.raises(ManifestCorrupt, match="found format 2"):
        decode_record(data, where="here")


def failing(number: int) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        del arguments, named
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate", "rename", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_a_disk_that_refuses_leaves_the_earlier_copy_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    tier = tier_of(tmp_path)
    write(tier, 1)
    before = files_of(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(number))
        with pytest.raises(StorageRefused, match=errno.errorcode[number]):
            write(tier, 2)
    assert files_of(tmp_path) == before
    write(tier, 3)
    assert steps_in(tmp_path) == [3]


def test_a_full_disk_is_refused_with_the_figures_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_of(tmp_path)
    write(tier, 1)
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 3, real.f_frsize

    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _: Full)
        patched.setattr(os, "pwrite", failing(errno.EIO))
        with pytest.raises(StorageRefused, match=f"{3 * real.f_frsize} bytes free"):
            write(tier, 2, durable=0)
    assert steps_in(tmp_path) == [1]


def test_two_live_processes_never_write_to_one_folder(tmp_path: Path) -> None:
    first, second = tier_of(tmp_path), tier_of(tmp_path)
    first.open()
    with pytest.raises(StorageRefused, match="another live process"):
        write(second, 1)
    first.close()
    write(second, 2)
    assert steps_in(tmp_path) == [2]


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    tier = tier_of(tmp_path / "disk")
    write(tier, 1)
    shutil.rmtree(tmp_path / "disk")
    write(tier, 2)
    assert steps_in(tmp_path / "disk") == [2]


def test_what_an_owner_left_that_is_gone_is_deleted_once_storage_has_it(tmp_path: Path) -> None:
    gone, here = tier_of(tmp_path, owner="gone"), tier_of(tmp_path, owner="here")
    write(gone, 10)
    write(here, 20, durable=20)
    assert steps_in(tmp_path) == [20, 10], "it lives"
    gone.close()
    write(here, 21, durable=9)
    assert steps_in(tmp_path) == [21, 10], "nobody else has step 10"
    write(here, 22, durable=10)
    assert steps_in(tmp_path) == [22]


KILLED = """
import sys
from pathlib import Path
from local_copies import tier_of, write
tier = tier_of(Path(sys.argv[1]))
step = int(sys.argv[2])
while True:
    write(tier, step)
    print(step, flush=True)
    step += 1
"""


def test_whenever_a_writer_is_killed_its_newest_copies_are_whole(tmp_path: Path) -> None:
    harness = Path(__file__).parents[2] / "harness"
    step = 1
    for delay in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), str(step)],
            env={**os.environ, "PYTHONPATH": str(harness)},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            for _ in range(1 + delay % 3):
                step = int(process.stdout.readline())
            # Somewhere in the next one: as soon as a part of it is there.
            wait_for(lambda: len(files_of(tmp_path)) != 2, what="the next copy to begin")
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split()
            step = int(rest[-1]) if rest else step
        copies, _ = find_copies(str(tmp_path), RUN)
        assert copies, "one is always there"
        assert copies[0].record.step in (step, step + 1)
        assert same_bits(read(copies[0]), random_values(TREE, copies[0].record.step))
        step += 2


def test_errors_are_in_our_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EverstepError, match="file is where a folder should be"):
        write(tier_of(tmp_path / "file"), 1)
    assert find_copies(str(tmp_path / "nothing"), RUN) == ((), ())
