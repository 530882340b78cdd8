"""One process, a folder, nothing else: it resumes exactly, whatever ended it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from everstep.runtime.agent.link import EXIT_CODES, EndKind
from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.layout.boxes import whole
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.reader import CheckpointReader
from waiting import wait_for

pytestmark = pytest.mark.processes
PROGRAM = (
    "import everstep.runtime as es; from everstep.runtime.examples import tiny; "
    "es.main(tiny.train, every_steps=10)"
)


WITH_HANDLERS = """
import os
import signal
import sys
import everstep.runtime as es
from everstep.runtime.examples import tiny


def handler_of(name):
    def handle(number, frame):
        # Not by `print`: a signal may come in the middle of the write of the one before.
        os.write(2, f"{name} was called\\n".encode())
        if "leaves" in name:
            sys.exit(3)

    return handle


def train(run):
    steps = run.steps

    def with_handler_in_a_step(count):
        for step in steps(count):
            if step == 5 and "step" in sys.argv[1]:
                signal.signal(signal.SIGTERM, handler_of(sys.argv[1]))
            yield step

    run.steps = with_handler_in_a_step
    if "train" in sys.argv[1]:
        signal.signal(signal.SIGTERM, handler_of(sys.argv[1]))
    tiny.train(run)


if "before" in sys.argv[1]:
    signal.signal(signal.SIGTERM, handler_of(sys.argv[1]))
es.main(train, every_steps=10)
"""


@dataclass
class Alone:
    """Runs of the tiny example over one folder."""

    folder: Path
    compiled: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def start(self, *program: str, **settings: object) -> subprocess.Popen[str]:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_COMPILATION_CACHE_DIR": str(self.compiled),
            "EVERSTEP_CHECKPOINTS": str(self.folder),
            **{name: str(value) for name, value in settings.items()},
        }
        process = subprocess.Popen(
            [sys.executable, "-c", *(program or (PROGRAM,))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def run(self, **settings: object) -> tuple[int, str]:
        process = self.start(**settings)
        _, errors = process.communicate(timeout=120)
        return process.returncode, errors

    def steps(self) -> list[int]:
        return [commit.step for commit in list_commits(open_store(str(self.folder)))]

    def newest(self) -> dict[str, bytes]:
        """Every leaf of the newest checkpoint."""
        store = open_store(str(self.folder))
        reader = CheckpointReader(store, list_commits(store)[-1])
        found: dict[str, bytes] = {}
        for index, leaf in enumerate(reader.tree.leaves):
            if leaf.is_stored_as_bytes:
                values = np.empty(leaf.shape, leaf.dtype)
                reader.read_into(index, whole(leaf.shape), values)
                found[leaf.name] = values.tobytes()
        return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def alone(tmp_path: Path, compiled: Path) -> Iterator[Alone]:
    one = Alone(tmp_path / "checkpoints", compiled)
    yield one
    for process in one.running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> dict[str, bytes]:
    one = Alone(tmp_path_factory.mktemp("undisturbed") / "checkpoints", compiled)
    code, errors = one.run(STEPS=35)
    assert code == 0, errors
    assert one.steps() == [20, 30, 35]
    return one.newest()


def test_a_killed_run_resumes_to_the_same_bits(alone: Alone, undisturbed: dict[str, bytes]) -> None:
    process = alone.start(STEPS=35, STEP_S="0.05")
    wait_for(lambda: alone.folder.exists() and alone.steps(), what="a checkpoint", timeout_s=120)
    process.kill()
    process.wait()
    seen = alone.steps()
    assert seen
    assert max(seen) < 35
    code, errors = alone.run(STEPS=35)
    assert code == 0, errors
    assert alone.newest() == undisturbed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_holds_the_step_under_way_and_says_so(
    number: signal.Signals, alone: Alone, undisturbed: dict[str, bytes]
) -> None:
    process = alone.start(STEPS=35, STEP_S="0.2")
    wait_for(lambda: alone.folder.exists() and alone.steps(), what="a checkpoint", timeout_s=120)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    held = alone.steps()[-1]
    assert f"step {held} is saved" in errors
    assert held % 10, "a step of its own, not the last due one"
    code, errors = alone.run(STEPS=35)
    assert code == 0, errors
    assert alone.newest() == undisturbed


@pytest.mark.parametrize(
    "name",
    ["before es.main, and leaves", "within train, and leaves", "within a step", "before and train"],
)
def test_a_handler_of_the_programs_own_is_called_and_the_step_is_held_all_the_same(
    name: str, alone: Alone
) -> None:
    process = alone.start(WITH_HANDLERS, name, STEPS=35, STEP_S="0.2")
    wait_for(lambda: alone.folder.exists() and alone.steps(), what="a checkpoint", timeout_s=120)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert errors.count(f"{name} was called") == 1
    held = alone.steps()[-1]
    assert f"step {held} is saved" in errors
    assert held % 10, "a step of its own, not the last due one"


def test_a_second_signal_ends_a_step_that_never_does(alone: Alone) -> None:
    process = alone.start(
        WITH_HANDLERS, "within train", STEPS=35, FAULT="hang", FAULT_STEP=11, FAULT_RANK=0
    )
    wait_for(lambda: alone.folder.exists() and alone.steps(), what="a checkpoint", timeout_s=120)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    errors = [process.stderr.readline()]
    while "was called" not in errors[-1]:
        assert errors[-1], errors
        errors.append(process.stderr.readline())
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, rest
    assert "within train was called" in rest
    assert alone.steps() == [10]


def test_a_failed_save_is_raised_at_a_later_step_with_its_step(alone: Alone) -> None:
    process = alone.start(STEPS=100_000, STEP_S="0.02")
    wait_for(lambda: alone.folder.exists() and alone.steps(), what="a checkpoint", timeout_s=120)
    # Whoever wrote there is no longer wanted: another training took the folder over.
    code, errors = alone.run(STEPS=1)
    assert code == 0, errors
    _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODES[EndKind.FENCED], errors
    assert re.search(r"step \d+ could not be saved: Fenced: .* is at incarnation 2", errors), errors
    assert "Traceback" not in errors


def test_a_users_exception_is_shown_once_from_his_own_frames_on(alone: Alone) -> None:
    code, errors = alone.run(STEPS=20, FAULT="raise", FAULT_STEP=4)
    assert code == 1
    assert errors.count("RuntimeError: the tiny example was told to raise in step 4") == 1
    assert errors.count("Traceback") == 1
    assert "examples/tiny.py" in errors
    assert "loop/alone.py" not in errors


def test_another_model_over_an_old_folder_is_refused_by_leaf(alone: Alone) -> None:
    assert alone.run(STEPS=10)[0] == 0
    code, errors = alone.run(STEPS=20, WIDTH=64)
    assert code == 77
    for leaf in ("params", "momentum", "first", "second"):
        assert leaf in errors
    assert alone.steps() == [10]


def _fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        pytest.param(lambda p: p.write_text("a file"), "a file", id="a file"),
        pytest.param(_fill, "notes.txt", id="something else"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_and_left_alone(
    prepare: Callable[[Path], object], says: str, alone: Alone
) -> None:
    prepare(alone.folder)
    code, errors = alone.run(STEPS=5)
    assert code != 0
    assert says in errors
    assert "Traceback" not in errors


def test_a_finished_run_has_nothing_left_to_do(alone: Alone) -> None:
    assert alone.run(STEPS=10)[0] == 0
    before = alone.newest()
    assert alone.run(STEPS=10)[0] == 0
    assert alone.newest() == before
