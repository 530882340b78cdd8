"""Any layout to any layout in real JAX processes: bytes read once, and nobody waits for ever."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from many_processes import Processes

pytestmark = pytest.mark.processes

STATE = """
MIB = 1 << 20
def values():
    # Bits that differ everywhere, of several dtypes; a replicated and a host array among them.
    square = np.arange(4 * MIB, dtype=np.uint32).reshape(2048, 2048)
    return {
        "square": square.view(np.float32),
        "tall": (np.arange(3 * MIB, dtype=np.uint32) * 7).astype(np.int8).reshape(-1, 12),
        "cube": np.arange(24 * 96 * 180, dtype=np.int32).reshape(24, 96, 180),
        "half": (np.arange(MIB, dtype=np.uint32) * 31).astype(np.uint16).reshape(1024, -1),
        "bias": np.arange(12 * 1000, dtype=np.float32),
    }
def layout(name):
    n = len(jax.devices())
    if name == "blocks":
        return NamedSharding(mesh(2, n // 2), P("x", "y"))
    if name == "partly":
        return NamedSharding(mesh(2, n // 2), P("y"))
    spec = {"rows": P("x"), "columns": P(None, "x"), "whole": P()}[name]
    return NamedSharding(mesh(n), spec)
def sharding_of(value, name):
    wanted = layout(name)
    if value.ndim < 2 or (name == "rows" and value.shape[0] % len(jax.devices())):
        return NamedSharding(wanted.mesh, P())
    return wanted
def like(name):
    return {
        key: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding_of(v, name))
        for key, v in values().items()
    }
def bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
TOTAL = sum(v.nbytes for v in values().values())
"""
SAVE = (
    STATE
    + """
name = os.environ["LAYOUT"]
state = {k: placed(v, sharding_of(v, name)) for k, v in values().items()}
with es.Checkpoints(RUN, deadline_s=60) as checkpoints:
    checkpoints.save(1, state).wait()
"""
)
RESTORE = (
    STATE
    + """
with es.Checkpoints(RUN, deadline_s=60) as checkpoints:
    for name in os.environ["LAYOUTS"].split():
        # The first brings what is imported late; only then reading is the checkpoint's alone.
        for turn in range(2):
            restored = None
            before, started_s = bytes_read(), time.perf_counter()
            restored = checkpoints.restore(like(name))
            took_s, read = time.perf_counter() - started_s, bytes_read() - before
        for key, value in values().items():
            assert same(restored[key], value), (name, key)
            assert restored[key].sharding == sharding_of(value, name)
        print("READ", name, read, TOTAL, f"{took_s:.3f}", flush=True)
"""
)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def ratios(outputs: list[str]) -> dict[str, float]:
    """Bytes read by all processes over those of the state, by layout."""
    found: dict[str, float] = {}
    for output in outputs:
        for name, read, total in re.findall(r"READ (\w+) (\d+) (\d+)", output):
            found[name] = found.get(name, 0.0) + int(read) / int(total)
    return found


def check_once(outputs: list[str], layouts: str) -> None:
    found = ratios(outputs)
    assert set(found) == set(layouts.split())
    # Every process reads the index, too; arrays are read once, whatever the layout.
    assert all(1.0 <= ratio <= 1.05 for ratio in found.values()), found


def test_four_processes_read_each_byte_once_whatever_the_layout(processes: Processes) -> None:
    processes.run(4, SAVE, LAYOUT="rows")
    layouts = "rows columns blocks partly whole"
    check_once(processes.run(4, RESTORE, LAYOUTS=layouts), layouts)
    check_once(processes.run(1, RESTORE, LAYOUTS="whole"), "whole")


def test_what_four_saved_in_blocks_two_and_three_restore(processes: Processes) -> None:
    processes.run(4, SAVE, LAYOUT="blocks")
    check_once(processes.run(2, RESTORE, LAYOUTS="columns blocks whole"), "columns blocks whole")
    # Three processes over what four saved: no border of a shard is one of before.
    check_once(processes.run(3, RESTORE, LAYOUTS="rows whole"), "rows whole")


FAILS = (
    STATE
    + """
import signal, threading
import everstep.runtime.restore.passing as passing
checkpoints = es.Checkpoints(RUN, deadline_s=6)
give = passing.Passing.give
def stop(self, *arguments):
    os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
if RANK == 1:
    passing.Passing.give = stop
started_s = time.monotonic()
try:
    checkpoints.restore(like("columns"))
except es.EverstepError as error:
    print("ERROR", type(error).__name__, error, flush=True)
print("AFTER", time.monotonic() - started_s, flush=True)
os._exit(0)
"""
)


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"], ids=["dies", "hangs"])
def test_a_process_that_is_lost_in_the_exchange_is_named_within_the_deadline(
    processes: Processes, signal: str
) -> None:
    processes.run(4, SAVE, LAYOUT="rows")
    started = processes.start(4, FAILS, SIGNAL=signal)
    survivors = [process for rank, process in enumerate(started) if rank != 1]
    for output in processes.outputs(survivors):
        assert re.search(r"ERROR \w+ process 1 has not restored", output), output
        (after_s,) = re.findall(r"AFTER ([\d.]+)", output)
        # Once in the exchange, once where all say that they have restored.
        assert float(after_s) < 30
