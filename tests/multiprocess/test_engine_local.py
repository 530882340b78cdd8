"""`es.Checkpoints(…, local=…)` in several real JAX processes, each with a disk of its own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from many_processes import Processes

pytestmark = pytest.mark.processes

PROGRAM = """
import logging, shutil
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
rows = np.arange(1536 * 512, dtype=np.float32).reshape(1536, 512)
every = np.arange(512 * 1024, dtype=np.int32).reshape(512, 1024)
m = mesh(COUNT)
layout = P(None, "x") if os.environ.get("LAYOUT") == "columns" else P("x")
state = {
    "rows": placed(rows, NamedSharding(m, layout)),
    "every": placed(every, NamedSharding(m, P())),
    "n": 3,
}
def opened():
    return es.Checkpoints(RUN, local=f"{RUN}-disk-{RANK}", deadline_s=60)

if os.environ["DO"] == "save":
    with opened() as checkpoints:
        checkpoints.save(1, state)
    if RANK == 0:
        # Not one array is left in the run. The other restores when this process does.
        shutil.copytree(RUN, f"{RUN}-kept")
        for base, _, names in os.walk(RUN):
            for name in names if os.path.basename(base) == "d" else ():
                os.unlink(os.path.join(base, name))
with opened() as checkpoints:
    found = checkpoints.restore(jax.tree.map(lambda a: a * 0, state))
    assert same(found["rows"], rows) and same(found["every"], every) and found["n"] == 3
"""
BYTES = re.compile(r"(\d+) bytes from local copies, (\d+) from")
ROWS, EVERY = 1536 * 512 * 4, 512 * 1024 * 4


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def figures(output: str) -> tuple[int, int]:
    """Bytes that a process has had from its disk, and from the run or another process."""
    found = BYTES.search(output)
    return (int(found[1]), int(found[2])) if found is not None else (0, 0)


def test_each_process_reads_its_own_disk_and_lacks_only_what_it_never_held(
    processes: Processes,
) -> None:
    outputs = processes.run(2, PROGRAM, DO="save")
    assert [figures(output) for output in outputs] == [(ROWS // 2 + EVERY, 0)] * 2

    # Both want other columns than the rows that they have; one has lost its disk altogether.
    run = processes.folder / "run"
    shutil.rmtree(run)
    shutil.copytree(processes.folder / "run-kept", run)
    shutil.rmtree(processes.folder / "run-disk-1")
    outputs = processes.run(2, PROGRAM, DO="restore", LAYOUT="columns")
    assert figures(outputs[0]) == (ROWS // 4 + EVERY, ROWS // 4)
    assert figures(outputs[1]) == (0, 0)
    assert "passed over" not in "".join(outputs)
