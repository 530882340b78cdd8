"""A child that the user's program forks ends by itself, and the training does not notice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.runtime.agent.link import EndKind
from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.storage.open import open_store
from everstep.runtime.testing.local_slices import LocalSlices

pytestmark = [pytest.mark.processes, pytest.mark.slow]
TIMEOUT_S = 200.0
STEPS = 12
PROGRAM = Path(__file__).parents[2] / "harness" / "forking_program.py"
COMMAND = [sys.executable, "-W", "ignore:os.fork:RuntimeWarning", str(PROGRAM)]
WHO = r"everstep: a process that the program forked \(pid \d+\)"
MISUSE = "called in a process that the program forked"

KINDS = [
    pytest.param(
        "raises", 1, rf"{WHO} raised; .*\nTraceback [^@]*ValueError: in the child", id="raises"
    ),
    pytest.param("exits", 1, rf"{WHO} ended with: in the child", id="exits with words"),
    pytest.param("returns", 0, None, id="returns"),
    pytest.param("reports", 1, rf"run.step_done: found '{MISUSE}'", id="reports a step"),
    pytest.param("steps", 1, rf"run.steps: found '{MISUSE}'", id="asks for steps"),
    pytest.param("restores", 1, rf"run.restore: found '{MISUSE}'", id="restores"),
    pytest.param("is-terminated", -15, None, id="is terminated"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def assert_told(said: str, code: int, words: str | None) -> None:
    assert len(re.findall(rf"the child \d+ ended with {code}\n", said)) == 1, said
    assert len(re.findall(WHO, said)) == (words is not None), said
    assert said.count("Traceback") <= 1, said
    if words is not None:
        assert re.search(words, said), said


@pytest.mark.parametrize(("forked", "code", "words"), KINDS)
def test_a_forked_child_takes_no_part_in_a_workers_training(
    forked: str, code: int, words: str | None, compiled: Path, tmp_path: Path
) -> None:
    with (tmp_path / "stderr").open("wb") as stderr:
        world = LocalSlices(
            COMMAND,
            slices=[0],
            environment={
                "STEPS": str(STEPS),
                "FORKED": forked,
                "JAX_COMPILATION_CACHE_DIR": str(compiled),
            },
            stderr=stderr,
        )
        with world:
            world.wait_until_ended(timeout_s=TIMEOUT_S)
            (host,) = world.hosts
            assert host.ending is not None
            assert (host.ending.kind, host.ending.step) == (EndKind.DONE, STEPS)
            assert sorted(host.metrics()) == list(range(1, STEPS + 1))
            assert host.process.returncode == 0
    assert_told((tmp_path / "stderr").read_text(), code, words)


def test_with_other_members_the_child_does_not_come_to_their_end(
    compiled: Path, tmp_path: Path
) -> None:
    environment = {
        "STEPS": str(STEPS),
        "FORKED": "raises",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
    }
    with (tmp_path / "stderr").open("wb") as stderr:
        world = LocalSlices(COMMAND, slices=[0, 1], environment=environment, stderr=stderr)
        with world:
            world.wait_until_ended(timeout_s=TIMEOUT_S)
            ends = [one.ending and (one.ending.kind, one.ending.step) for one in world.hosts]
            assert ends == [(EndKind.DONE, STEPS)] * 2
    said = (tmp_path / "stderr").read_text()
    assert said.count("ValueError: in the child") == 2, "one child of each rank"


@pytest.mark.parametrize(("forked", "code", "words"), KINDS)
def test_a_forked_child_takes_no_part_in_a_training_alone(
    forked: str, code: int, words: str | None, compiled: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        COMMAND,
        env=os.environ
        | {
            "STEPS": str(STEPS),
            "FORKED": forked,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "EVERSTEP_CHECKPOINTS": str(tmp_path / "checkpoints"),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"finished at step {STEPS}, which is saved") == 1
    steps = [one.step for one in list_commits(open_store(str(tmp_path / "checkpoints")))]
    assert steps == [10, STEPS]
    assert_told(done.stderr, code, words)
