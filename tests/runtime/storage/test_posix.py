from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.runtime.errors import ConfigurationError, StorageRefused, StorageUnavailable
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.posix import PosixStore
from everstep.runtime.storage.retry import Verdict, judge
from everstep.runtime.storage.store import StorageMissing


def failing(monkeypatch: pytest.MonkeyPatch, name: str, numbers: Iterator[int]) -> list[int]:
    """Let an `os` function fail with these error numbers first; what it failed with so far."""
    real = getattr(os, name)
    seen: list[int] = []

    def call(*args: object, **kwargs: object) -> object:
        number = next(numbers, 0)
        if number:
            seen.append(number)
            raise OSError(number, os.strerror(number), "/the/file")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)
    return seen


@pytest.mark.parametrize("number", [errno.EINTR, errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_what_passes_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    store = PosixStore(str(tmp_path))
    seen = failing(monkeypatch, "fsync", iter([number, number]))
    store.write_durable("a", b"1")
    assert store.create_exclusive("b", b"2")
    assert seen == [number, number]
    assert store.read("a") == b"1"
    assert store.list("") == ("a", "b")
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_what_does_not_pass_ends_after_a_bounded_number_of_tries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # An unreadable folder is never an empty one.
    store = PosixStore(str(tmp_path))
    seen = failing(monkeypatch, "listdir", iter([errno.ESTALE] * 1000))
    with pytest.raises(StorageUnavailable, match="/the/file"):
        store.list("")
    assert 2 <= len(seen) <= 10


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EBUSY, errno.EFBIG]
)
def test_a_refusal_is_not_tried_again_and_says_what_would_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    store = PosixStore(str(tmp_path))
    seen = failing(monkeypatch, "fsync", iter([number] * 10))
    with pytest.raises(StorageRefused) as caught:
        store.write_durable("a", b"1")
    assert len(seen) == 1
    assert caught.value.field.endswith("/a")
    assert errno.errorcode[number] in str(caught.value.found)
    assert caught.value.expected
    assert os.listdir(tmp_path) == []


def test_every_error_number_of_the_system_has_a_judgement() -> None:
    for number in errno.errorcode:
        judgement = judge(number, os.strerror(number))
        assert judgement.found
        assert judgement.remedy
    assert judge(errno.ENOENT, "").verdict is Verdict.MISSING
    assert judge(None, "odd").verdict is Verdict.PASSING
    assert "odd" in judge(99999, "odd").found


def test_a_success_whose_answer_was_lost_is_a_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # on a file system whose `link` is carried out and then reported as failed.
    real = os.link
    calls: list[str] = []

    def link(source: str, target: str) -> None:
        real(source, target)
        calls.append(target)
        if len(calls) == 1:
            raise OSError(errno.ETIMEDOUT, "timed out", target)

    monkeypatch.setattr(os, "link", link)
    assert PosixStore(str(tmp_path)).create_exclusive("a", b"mine")
    assert not PosixStore(str(tmp_path)).create_exclusive("a", b"other")


def test_sweep_removes_leftovers_of_lost_races_only(tmp_path: Path) -> None:
    store = PosixStore(str(tmp_path))
    store.create_exclusive("l/1", b"won")
    (tmp_path / "l" / ".1.aaaa.tmp").write_bytes(b"lost")
    (tmp_path / "l" / ".2.bbbb.tmp").write_bytes(b"being written")
    assert store.list("l") == ("1",)
    store.sweep("l")
    assert sorted(os.listdir(tmp_path / "l")) == [".2.bbbb.tmp", "1"]


def test_names_are_durable_before_they_are_relied_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The file is synced before it gets its name, its folder after.
    events: list[tuple[str, str]] = []
    real_sync, real_rename, real_link = os.fsync, os.rename, os.link

    def sync(descriptor: int) -> None:
        events.append(("sync", os.path.realpath(f"/proc/self/fd/{descriptor}")))
        real_sync(descriptor)

    def rename(source: str, target: str) -> None:
        events.append(("name", target))
        real_rename(source, target)

    def link(source: str, target: str) -> None:
        events.append(("name", target))
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "link", link)
    store = PosixStore(str(tmp_path))
    for write in (store.write_durable, store.create_exclusive):
        events.clear()
        name = write.__name__
        write(f"{name}/entry", b"1")
        kinds = [kind for kind, _ in events]
        named = kinds.index("name")
        folder = str(tmp_path / name)
        assert events[0] == ("sync", str(tmp_path)), "the new folder's own name"
        assert os.path.basename(events[named - 1][1]).startswith(".entry.")
        assert events[named] == ("name", f"{folder}/entry")
        assert events[named + 1] == ("sync", folder)


# A child that is another user, where the tests run as root: root may write anywhere.
_AS_NOBODY = """
import os, sys
from everstep.runtime.errors import StorageRefused
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.posix import PosixStore
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
try:
    RunLedger(PosixStore(sys.argv[1])).claim(1, "job")
except StorageRefused as error:
    print(error)
else:
    print("written")
"""


def test_a_folder_that_may_not_be_written_is_refused_with_its_path() -> None:
    # Not below pytest's own folder, which another user may not enter.
    with tempfile.TemporaryDirectory(dir="/tmp") as outer:
        os.chmod(outer, 0o755)
        folder = os.path.join(outer, "run")
        os.mkdir(folder)
        os.chmod(folder, 0o555)
        done = subprocess.run(
            [sys.executable, "-c", _AS_NOBODY, folder],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert folder in done.stdout, done.stderr
        assert "not permitted" in done.stdout
        assert os.listdir(folder) == []


_AT_LIMIT = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
from everstep.runtime.errors import StorageRefused
from everstep.runtime.storage.posix import PosixStore
store = PosixStore(sys.argv[1])
for write in (store.write_durable, store.create_exclusive):
    try:
        write("a", b"x" * 10000)
    except StorageRefused as error:
        print(error)
"""


def test_a_file_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _AT_LIMIT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all("EFBIG" in line and f"{tmp_path}/a" in line for line in lines)
    assert os.listdir(tmp_path) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_open_takes_paths_and_file_addresses(tmp_path: Path) -> None:
    spaced = tmp_path / "a b_é"
    for address in (str(spaced), f"file://{tmp_path}/a%20b_%C3%A9", f"file://localhost{spaced}"):
        store = open_store(address)
        store.write_durable("x", b"1")
        assert store.uri == f"file://{spaced}"
    assert (spaced / "x").read_bytes() == b"1"
    assert os.listdir(tmp_path) == ["a b_é"], "nothing is made by opening"


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("gs://b/run", "gs://bucket/path"),
        ("gs://Bucket/run", "gs://bucket/path"),
        ("gs://bucket/a//b", "gs://bucket/path"),
        ("gs://bucket/../b", "gs://bucket/path"),
        ("s3://bucket/run", "creates an object only if it"),
        ("hdfs://host/run", "not supported"),
        ("relative/run", "absolute"),
        ("", "absolute"),
        ("file://host/run", "three slashes"),
        ("/a\0b", "absolute"),
    ],
)
def test_open_refuses_other_addresses_by_field(address: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        open_store(address)
    assert caught.value.field == "spec.checkpoint.uri"


def test_open_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(StorageRefused, match="a file"):
        open_store(str(tmp_path / "f"))


def test_reading_from_an_unmade_folder_makes_none(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    assert store.list("") == ()
    assert not store.exists("a")
    with pytest.raises(StorageMissing):
        store.read("a")
    assert os.listdir(tmp_path) == []


def test_a_sync_of_what_others_wrote_is_not_tried_again_where_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step/index").write_bytes(b"by the array library")
    real, failed = os.fsync, list[str]()

    def fsync(descriptor: int) -> None:
        # As the system does: an error once, and then no more word of it.
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith("/index") and not failed:
            failed.append(name)
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store = PosixStore(str(tmp_path))
    with pytest.raises(StorageUnavailable, match=r"step/index.*Input/output error"):
        store.write_together("step", {"a": b"1"}, unsynced=["index"])
    assert failed
    assert not any(name.endswith(".tmp") for name in os.listdir(tmp_path / "step"))


def test_a_file_system_that_takes_no_folders_is_named_as_such() -> None:
    store = PosixStore("/proc/nope/run")
    for write in (store.write_durable, store.create_exclusive):
        with pytest.raises(StorageRefused) as refused:
            write("_everstep/ledger/1", b"x")
        assert not isinstance(refused.value, StorageMissing)
        assert refused.value.field == "/proc/nope"
        assert "a folder that cannot be made: the file system of /proc takes none" in str(
            refused.value
        )
