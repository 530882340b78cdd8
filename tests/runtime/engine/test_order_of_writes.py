"""The order of system calls of a save, from a trace of a whole program: what the ledger names is on
storage before, and what is deleted was dropped there before."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import everstep.runtime as es
from tiny_parts import make_run, read_all

HARNESS = str(Path(__file__).parents[2] / "harness")
RETENTION = es.Retention(latest=2)

PROGRAM = """
import contextlib, os, sys, threading
sys.path.insert(0, sys.argv[1])
import everstep.runtime as es
from tiny_parts import parts_of
from watched_disk import watched

run, trace, told = sys.argv[2:5]
lock = threading.Lock()

def note(operation):
    if operation.is_change:
        with lock:
            print(operation.kind, operation.path.rstrip("/"), operation.target, sep="\\t", file=out)

with open(trace, "w") if trace else contextlib.nullcontext() as out:
    with watched(run, note) if trace else contextlib.nullcontext():
        with es.Checkpoints(run, retention=es.Retention(latest=2)) as checkpoints:
            checkpoints.save(3, parts_of(3)).wait()
            # A trace sees this as well.
            os.mkdir(told)
            if trace:
                with lock:
                    print("told", run, "", sep="\\t", file=out)
print("saved", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Call:
    kind: str
    """`create`, `write`, `sync`, `name` (a file's new one), `unlink`, `mkdir`, `rmdir`, `told`."""
    path: str
    target: str = ""


def run_program(run: Path, trace: Path | None, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-c", PROGRAM, HARNESS, str(run), str(trace or ""),
         str(run.parent / "told")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


class Trace:
    """Calls in their order, and what they say of a run that saved step 3 and dropped step 1."""

    def __init__(self, calls: Sequence[Call], run: Path) -> None:
        self.calls = calls
        self.ledger = run / "_everstep/ledger"
        (self.folder,) = run.glob("step-0000000003-*")
        self.files = [found for found in self.folder.rglob("*") if found.is_file()]
        self.named = {c.target: n for n, c in enumerate(calls) if c.kind == "name"}
        self._made: dict[tuple[str, str], int] = {}
        for number, call in enumerate(calls):
            self._made.setdefault((call.kind, call.path), number)
        entries = [n for t, n in self.named.items() if os.path.dirname(t) == str(self.ledger)]
        # The claim, the commit, the drop.
        _, self.committed, self.dropped = sorted(entries)

    def first(self, kind: str, path: object, after: int = -1) -> int:
        """The first such call after one; beyond the end when there is none."""
        found = (
            number
            for number, call in enumerate(self.calls)
            if number > after and (call.kind, call.path) == (kind, str(path))
        )
        return next(found, len(self.calls))

    def made(self, kind: str, path: Path) -> int:
        """When something came to be; at the merge, what came without a call of ours."""
        item = self.folder / path.relative_to(self.folder).parts[0]
        found = (self._made.get((kind, str(path))), self._made.get(("merge", str(item))))
        return next(number for number in found if number is not None)

    @property
    def of_writers(self) -> list[Path]:
        """Files of the writers' databases, which no temporary name has."""
        return [file for file in self.files if "ocdbt.process_" in str(file)]

    def check_all_is_synced(self) -> None:
        """Content and name of every file, and every folder's name, before the ledger's entry."""
        for file in self.files:
            given = self.named.get(str(file))
            if given is None:
                given = self.made("create", file)
                assert self.first("sync", file, given) < self.committed, file
            else:
                # Under a temporary name: made, synced, then named. A merged index is the array
                # library's, which names it first.
                source = self.calls[given].path
                synced = self.first("sync", source, self._made["create", source])
                is_merged = file.name == "manifest.ocdbt" or file.parent.name == "d"
                assert synced < given or (
                    is_merged and self.first("sync", file, given) < self.committed
                ), file
            assert self.first("sync", file.parent, given) < self.committed, f"the name of {file}"
        for folder in (found for found in self.folder.rglob("*") if found.is_dir()):
            assert self.first("sync", folder.parent, self.made("mkdir", folder)) < self.committed

    def check_order_within(self) -> None:
        """Data and its names, then the writer's record, the manifest, the marker, the entry."""
        assert len(self.of_writers) >= 4
        manifest = self.named[str(self.folder / "everstep.json")]
        for item in ("model", "optimizer"):
            record = self.named[str(self.folder / f"everstep.{item}_0.json")]
            for file in self.of_writers:
                if file.is_relative_to(self.folder / item):
                    content = self.first("sync", file, self.made("create", file))
                    assert content < self.first("sync", file.parent, content) < record, file
            assert record < manifest
        marker = self.named[str(self.folder / "commit_success.txt")]
        assert manifest < marker < self.committed

    def check_entry(self) -> None:
        """It is linked, which succeeds for one only; its name is synced before anybody is told."""
        source = self.calls[self.committed].path
        assert source != self.calls[self.committed].target
        made = self._made["create", source]
        assert made < self.first("sync", source, made) < self.committed
        told = next(n for n, call in enumerate(self.calls) if call.kind == "told")
        assert self.first("sync", self.ledger, self.committed) < told

    def check_deletion(self) -> None:
        """A step is dropped in the ledger before its first file goes; no other step is touched."""
        durable = self.first("sync", self.ledger, self.dropped)
        deleted = [
            number
            for number, call in enumerate(self.calls)
            if call.kind in ("unlink", "rmdir") and "step-0000000001-" in call.path
        ]
        assert len(deleted) > 20
        assert self.committed < self.dropped < durable < min(deleted)
        for number, call in enumerate(self.calls):
            assert "step-0000000002-" not in call.path, call
            if number > self.committed and call.kind != "sync":
                assert str(self.folder) not in call.path, call


def check_order(calls: Sequence[Call], run: Path) -> None:
    """The promises of `docs/reference/checkpoint-format.md`, "Order of writes"."""
    trace = Trace(calls, run)
    trace.check_all_is_synced()
    trace.check_order_within()
    trace.check_entry()
    trace.check_deletion()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    make_run(made, RETENTION, 1, 2)
    return made


@pytest.mark.processes
def test_the_order_of_a_save_and_a_clean_up_as_the_program_calls_it(
    tmp_path: Path, run: Path
) -> None:  # G1
    trace = tmp_path / "trace"
    done = run_program(run, trace)
    assert done.stdout == "saved\n", done.stderr
    kinds = {"rename": "name", "link": "name"}
    calls = [
        Call(kinds.get(kind, kind), path, target)
        for kind, path, target in (line.split("\t") for line in trace.read_text().splitlines())
    ]
    check_order(calls, run)
    assert sum(call.kind == "merge" for call in calls) == 2
    assert read_all(run) == (2, 3)


@pytest.mark.processes
def test_the_order_of_a_save_and_a_clean_up_as_the_system_sees_it(
    tmp_path: Path, run: Path
) -> None:  # G1
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed; the test before has seen our own calls")
    trace = tmp_path / "trace"
    names = "openat,rename,renameat,renameat2,link,linkat,fsync,fdatasync,mkdir,mkdirat,unlink,"
    names += "unlinkat,rmdir"
    done = run_program(run, None, strace, "-f", "-y", "-e", f"trace={names}", "-o", str(trace))
    if "ptrace" in done.stderr and done.stdout != "saved\n":
        pytest.skip("tracing is not permitted here")
    assert done.stdout == "saved\n", done.stderr
    check_order(_calls_of(trace, run), run)
    assert read_all(run) == (2, 3)


_CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (?:0|\d+<[^>]*>)$")
_QUOTED = re.compile(r'"([^"]*)"')
_DESCRIPTOR = re.compile(r"^\d+<([^>]*)>$")
_KINDS = {"mkdir": "mkdir", "mkdirat": "mkdir", "unlink": "unlink", "rmdir": "rmdir"}


def _calls_of(trace: Path, run: Path) -> list[Call]:
    """What succeeded, each call in the order in which it ended."""
    begun: dict[str, str] = {}
    calls: list[Call] = []
    for line in trace.read_text().splitlines():
        thread = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>").rstrip()
            continue
        if "resumed>" in line:
            line = begun.pop(thread, "") + line.split("resumed>", 1)[1]
        match = _CALL.match(line)
        if match is None:
            continue
        name, arguments = match[1], match[2]
        quoted = [os.path.join(run, path).rstrip("/") for path in _QUOTED.findall(arguments)]
        if name in ("fsync", "fdatasync"):
            described = _DESCRIPTOR.match(arguments.strip())
            if described is not None:
                calls.append(Call("sync", described[1]))
        elif name.startswith(("rename", "link")):
            calls.append(Call("name", quoted[0], quoted[1]))
        elif name == "openat" and "O_CREAT" in arguments:
            calls.append(Call("create", quoted[0]))
        elif name in _KINDS or name == "unlinkat":
            is_told = quoted[0] == str(run.parent / "told")
            kind = "rmdir" if "AT_REMOVEDIR" in arguments else _KINDS.get(name, "unlink")
            calls.append(Call("told" if is_told else kind, quoted[0]))
    return [c for c in calls if c.kind == "told" or str(run) in c.path]
