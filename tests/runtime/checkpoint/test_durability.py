"""Real processes, killed and starved: a step is there whole, or not at all."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import array, claimed, load, random_values, same_bits, save, tree_of
from everstep.runtime.checkpoint.clean import collect
from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.storage.posix import PosixStore
from waiting import wait_for

HARNESS = str(Path(__file__).parents[2] / "harness")
TREE = tree_of(*(array("w", i, shape=(256, 512)) for i in range(8)))

_WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from checkpoints import array, claimed, random_values, save, tree_of
from everstep.runtime.errors import EverstepError
from everstep.runtime.storage.posix import PosixStore
tree = tree_of(*(array("w", i, shape=(256, 512)) for i in range(8)))
store = PosixStore(sys.argv[2])
number = int(sys.argv[3])
ledger = claimed(store, number)
print("claimed", flush=True)
for step in map(int, sys.argv[4].split(",")):
    try:
        save(store, ledger, step, tree, random_values(tree, seed=step), incarnation=number)
    except EverstepError as error:
        print(type(error).__name__, error, flush=True)
        break
    print("committed", step, flush=True)
"""


def writer(run: Path, incarnation: int, steps: str, *before: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", _WRITER, HARNESS, str(run), str(incarnation), steps],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.processes
@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_the_old_step_or_the_new_one(tmp_path: Path) -> None:
    # The child saves step after step; it is killed when a randomly chosen number of
    # files has appeared, so the kills are spread over all of a save.
    store = PosixStore(str(tmp_path))
    save(store, claimed(store, 1), 1, TREE, random_values(TREE, seed=1))
    dice = random.Random(4)
    moments: set[int] = set()
    for incarnation in range(2, 12):
        first = incarnation * 100
        before = {c.step for c in list_commits(store)}
        child = writer(tmp_path, incarnation, ",".join(str(first + i) for i in range(50)))
        assert child.stdout is not None
        assert child.stdout.readline() == "claimed\n", child.communicate()[1]
        target = count_files(tmp_path) + dice.randrange(1, 45)
        wait_for(
            lambda target=target: count_files(tmp_path) >= target,  # type: ignore[misc]
            what="files of a save",
            look_every_s=0.0005,
        )
        child.kill()
        said = [int(line.split()[1]) for line in child.communicate()[0].splitlines()]
        reader = PosixStore(str(tmp_path))
        commits = list_commits(reader)
        after = {c.step for c in commits} - before
        # What was said to be committed is; at most one more was, before it could be said.
        assert set(said) <= after
        assert len(after) <= len(said) + 1
        moments.add(len(os.listdir(tmp_path)))
        for found in commits[-2:]:
            assert same_bits(load(reader, found), random_values(TREE, seed=found.step))
        collect(store, claimed(store, incarnation))
    ledger = claimed(store, 99)
    collect(store, ledger)
    folders = [name for name in store.list("") if name.startswith("step-")]
    assert sorted(folders) == sorted(c.folder for c in list_commits(store))
    assert len(moments) > 3, "the kills hit different moments"


def count_files(run: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(run))


@pytest.mark.processes
def test_two_processes_over_one_folder_the_newer_commits_and_the_older_stops(
    tmp_path: Path,
) -> None:
    steps = ",".join(str(i) for i in range(1, 400))
    old = writer(tmp_path, 1, steps)
    assert old.stdout is not None
    assert old.stdout.readline() == "claimed\n"
    assert old.stdout.readline() == "committed 1\n"
    new = writer(tmp_path, 2, "1000,1001")
    out, err = new.communicate(timeout=60)
    assert out == "claimed\ncommitted 1000\ncommitted 1001\n", err
    out, err = old.communicate(timeout=60)
    assert "Fenced incarnation 1 is fenced" in out.splitlines()[-1], err
    assert "incarnation 2" in out.splitlines()[-1]
    commits = list_commits(PosixStore(str(tmp_path)))
    assert [c.step for c in commits[-2:]] == [1000, 1001]
    assert commits[-3].incarnation == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m,nr_inodes=400", "everstep-test", str(folder)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("no permission to mount a small file system")
    return folder


@pytest.mark.processes
def test_a_full_disk_refuses_the_step_and_keeps_the_older(small_disk: Path) -> None:
    try:
        store = PosixStore(str(small_disk))
        save(store, claimed(store, 1), 1, TREE, random_values(TREE, seed=1))
        child = writer(small_disk, 2, "2,3,4")
        out, err = child.communicate(timeout=60)
        last = out.splitlines()[-1]
        assert last.startswith("StorageRefused"), (out, err)
        assert str(small_disk) in last
        assert "No space left" in last or "no space left" in last
        commits = list_commits(store)
        assert same_bits(load(store, commits[0]), random_values(TREE, seed=1))
        # The space comes back, and a smaller step fits.
        collect(store, claimed(store, 3))
        small = tree_of(array("w", shape=(64, 64)))
        save(store, claimed(store, 3), 9, small, random_values(small), incarnation=3)
        assert list_commits(store)[-1].step == 9
    finally:
        subprocess.run(["umount", str(small_disk)], check=True)


@pytest.mark.processes
def test_everything_is_synced_before_the_ledger_names_it(tmp_path: Path) -> None:
    # G1: the order of system calls, from a trace.
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    trace = tmp_path / "trace"
    run = tmp_path / "run"
    calls = "trace=openat,rename,renameat,renameat2,link,linkat,fsync,fdatasync,mkdir,mkdirat"
    child = writer(run, 1, "7", strace, "-f", "-y", "-e", calls, "-o", str(trace))
    out, err = child.communicate(timeout=120)
    if "ptrace" in err and "committed 7" not in out:
        pytest.skip("tracing is not permitted here")
    assert "committed 7" in out, err
    events = read_trace(trace, run)
    entry = str(run / "_everstep/ledger/00000000000000000002.json")
    named = next(i for i, (kind, path) in enumerate(events) if (kind, path) == ("name", entry))
    synced: dict[str, int] = {}
    for index, (kind, path) in enumerate(events[:named]):
        if kind == "sync":
            synced[path] = index
    folder = next(run.glob("step-*"))
    unsynced: list[str] = []
    for directory, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(directory, name)
            given = max(i for i, event in enumerate(events) if event == ("name", path))
            assert given < named, f"{path} got its name after the ledger's entry"
            # The content is synced under a temporary name or its own, the name by its folder.
            is_content_synced = ("content", path) in events[:named] or synced.get(path, -1) > given
            if synced.get(directory, -1) < given or not is_content_synced:
                unsynced.append(path)
    assert unsynced == []
    for directory, _, _ in os.walk(folder):
        made = next(i for i, event in enumerate(events) if event == ("make", directory))
        assert made < synced[os.path.dirname(directory)] < named, directory
    # And the entry's own name.
    assert ("sync", os.path.dirname(entry)) in events[named:]


_CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (?:0|\d+<[^>]*>)$")
_QUOTED = re.compile(r'"([^"]*)"')
_DESCRIPTOR = re.compile(r"^\d+<([^>]*)>$")


def read_trace(trace: Path, run: Path) -> list[tuple[str, str]]:
    """`sync` of a path, `name` given to a path, `content` synced before, `make` of a folder."""
    # A call that another thread interrupts is written as two lines.
    open_calls: dict[str, str] = {}
    lines: list[str] = []
    for line in trace.read_text().splitlines():
        thread = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            open_calls[thread] = line.removesuffix("<unfinished ...>").rstrip()
        elif "resumed>" in line:
            rest = line.split("resumed>", 1)[1]
            lines.append(open_calls.pop(thread, "") + rest)
        else:
            lines.append(line)
    events: list[tuple[str, str]] = []
    contents: set[str] = set()
    for line in lines:
        match = _CALL.match(line)
        if match is None:
            continue
        call, arguments = match[1], match[2]
        if call in ("fsync", "fdatasync"):
            described = _DESCRIPTOR.match(arguments.strip())
            if described is not None:
                contents.add(described[1])
                events.append(("sync", described[1]))
        elif call in ("rename", "renameat", "renameat2", "link", "linkat"):
            source, target = (os.path.join(run, p) for p in _QUOTED.findall(arguments))
            if source in contents:
                events.append(("content", target))
            events.append(("name", target))
        elif call == "openat" and "O_CREAT" in arguments:
            events.append(("name", os.path.join(run, _QUOTED.findall(arguments)[0])))
        elif call in ("mkdir", "mkdirat"):
            events.append(("make", _QUOTED.findall(arguments)[0].rstrip("/")))
    return events
