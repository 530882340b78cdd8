"""`es.Checkpoints` in several real JAX processes, which nobody but JAX itself has started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep.runtime as es
from many_processes import Processes

pytestmark = pytest.mark.processes

VALUES = """
rows = np.arange(24 * 10, dtype=np.float32).reshape(24, 10)
odd = np.arange(7 * 5, dtype=np.int8).reshape(7, 5)
"""
SAVE = (
    VALUES
    + """
m = mesh(COUNT)
state = {
    "rows": placed(rows, NamedSharding(m, P("x"))),
    "columns": placed(rows.T.copy(), NamedSharding(m, P(None, "x") if COUNT in (2, 4) else P())),
    "replicated": placed(odd, NamedSharding(m, P())),
    "key": jax.random.key(5),
    "n": 3,
}
with es.Checkpoints(RUN, deadline_s=60) as checkpoints:
    for step in (1, 2):
        checkpoints.save(step, state, metadata={"loss": step})
    checkpoints.wait()
    assert checkpoints.steps() == (1, 2), checkpoints.steps()
"""
)
RESTORE = (
    VALUES
    + """
shape = tuple(map(int, os.environ["MESH"].split("x")))
m = mesh(*shape)
spec = {"rows": P("x"), "columns": P(None, "x"), "blocks": P("x", "y"), "none": P()}[
    os.environ["LAYOUT"]
]
def of(value, dtype):
    return jax.ShapeDtypeStruct(value.shape, dtype, sharding=NamedSharding(m, spec))
like = {
    "rows": of(rows, jnp.float32),
    "columns": jax.ShapeDtypeStruct(rows.T.shape, jnp.float32, sharding=NamedSharding(m, P())),
    "replicated": jax.ShapeDtypeStruct(odd.shape, jnp.int8, sharding=NamedSharding(m, P())),
    "key": placed(np.zeros(()), NamedSharding(m, P())) if False else jax.random.key(0),
    "n": 0,
}
with es.Checkpoints(RUN, deadline_s=60) as checkpoints:
    state = checkpoints.restore(like)
assert same(state["rows"], rows)
assert same(state["columns"], rows.T)
assert same(state["replicated"], odd)
assert state["rows"].sharding == like["rows"].sharding
assert state["n"] == 3
assert np.array_equal(jax.random.key_data(state["key"]), jax.random.key_data(jax.random.key(5)))
"""
)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def test_what_some_processes_saved_any_number_restores_in_any_layout(
    processes: Processes,
) -> None:
    processes.run(4, SAVE)
    with es.Checkpoints(processes.folder / "run") as checkpoints:
        assert checkpoints.metadata(2).metadata == {"loss": 2}
    processes.run(4, RESTORE, MESH="2x2", LAYOUT="blocks")
    processes.run(2, RESTORE, MESH="2", LAYOUT="columns")
    processes.run(3, RESTORE, MESH="3", LAYOUT="rows")
    processes.run(1, RESTORE, MESH="1", LAYOUT="none")


DIES = """
import signal
m = mesh(COUNT)
big = np.ones((COUNT * 64, 1024), np.float32)
state = {"a": placed(big, NamedSharding(m, P("x")))}
checkpoints = es.Checkpoints(RUN, deadline_s=4)
checkpoints.save(1, state).wait()
if RANK == 1:
    os.kill(os.getpid(), signal.SIGKILL)
saved = checkpoints.save(2, state)
try:
    saved.wait(30)
except es.CheckpointFailed as failed:
    print("FAILED", failed, flush=True)
print("STEPS", checkpoints.steps(), flush=True)
os._exit(0)
"""


def test_the_others_are_told_who_was_missing_and_the_step_does_not_exist(
    processes: Processes,
) -> None:
    started = processes.start(3, DIES)
    outputs = processes.outputs(started)
    assert "process 1 has not written its part" in outputs[0]
    assert "FAILED step 2 could not be saved" in outputs[2]
    assert "STEPS (1,)" in outputs[0]
    assert "STEPS (1,)" in outputs[2]


DIFFERENT = """
m = mesh(COUNT)
state = {"a": placed(np.ones((COUNT, 2), np.float32), NamedSharding(m, P("x")))}
checkpoints = es.Checkpoints(RUN, deadline_s=20)
saved = checkpoints.save(5 + RANK, state)
try:
    saved.wait(40)
except es.CheckpointFailed as failed:
    print("FAILED", failed, flush=True)
print("STEPS", checkpoints.steps(), flush=True)
os._exit(0)
"""


def test_processes_that_save_different_steps_are_told_and_nothing_is_committed(
    processes: Processes,
) -> None:
    outputs = processes.run(2, DIFFERENT)
    assert "6 here, 5 on process 0" in outputs[1]
    assert "FAILED" in outputs[0]
    assert all("STEPS ()" in output for output in outputs)


DAMAGED = """
m = mesh(COUNT)
def state(step):
    return {"a": placed(np.full((COUNT * 600, 8), step, np.float32), NamedSharding(m, P("x")))}
checkpoints = es.Checkpoints(RUN, deadline_s=60)
for step in (1, 2):
    checkpoints.save(step, state(step)).wait()
if RANK == 0:
    import glob
    for name in glob.glob(RUN + "/step-0000000002-*/state/ocdbt.process_1/d/*"):
        data = bytearray(open(name, "rb").read())
        data[len(data) // 2] ^= 1
        open(name, "wb").write(data)
import jax.experimental.multihost_utils as hosts
hosts.sync_global_devices("damaged")
restored = checkpoints.restore(state(0))
assert same(restored["a"], np.full((COUNT * 600, 8), 1, np.float32))
checkpoints.close()
"""


def test_all_take_the_older_step_when_one_of_them_finds_its_part_damaged(
    processes: Processes,
) -> None:
    processes.run(2, DAMAGED)


NOTHING = """
checkpoints = es.Checkpoints(RUN, deadline_s=20)
try:
    checkpoints.restore({"n": 0})
except es.ConfigurationError as error:
    print("REFUSED", error)
checkpoints.close()
"""


def test_where_there_is_no_step_every_process_says_so(processes: Processes) -> None:
    outputs = processes.run(2, NOTHING)
    assert all("REFUSED" in output for output in outputs)


REFUSED = """
m = mesh(COUNT)
state = {"a": placed(np.ones((COUNT, 2), np.float32), NamedSharding(m, P("x"))), "odd": 1}
checkpoints = es.Checkpoints(RUN, deadline_s=100)
if FIRST:
    checkpoints.save(0, state).wait()
begun = time.monotonic()
try:
    checkpoints.save(1, {**state, "odd": object()} if RANK == 1 else state).wait()
except (es.StateRefused, es.CheckpointFailed) as error:
    print("FAILED", error, flush=True)
assert time.monotonic() - begun < 60, "the deadline was waited for"
checkpoints.save(2, state).wait()
assert checkpoints.steps()[-1] == 2, checkpoints.steps()
assert 1 not in checkpoints.steps()
checkpoints.close()
"""


@pytest.mark.parametrize("first", [True, False], ids=["a later step", "the first step"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_refuses_a_step_keeps_nobody_waiting_and_the_next_step_is_saved(
    processes: Processes, rank: int, *, first: bool
) -> None:
    program = REFUSED.replace("RANK == 1", f"RANK == {rank}").replace("FIRST", str(first))
    outputs = processes.run(2, program)
    assert "['odd']" in outputs[rank]
    assert "FAILED step 1 could not be saved" in outputs[1 - rank]
    assert "['odd']" in outputs[1 - rank]


PARTLY = """
m = mesh(2, 2)
rows = np.arange(24 * 10, dtype=np.float32).reshape(24, 10)
state = {
    "twice": placed(rows, NamedSharding(m, P("x"))),
    "split": placed(rows, NamedSharding(m, P("y", "x"))),
}
with es.Checkpoints(RUN, deadline_s=60) as checkpoints:
    checkpoints.save(1, state).wait()
    restored = checkpoints.restore(state)
for name in state:
    assert same(restored[name], rows), name
    assert restored[name].sharding == state[name].sharding
import json, glob
(folder,) = glob.glob(RUN + "/step-*")
written = [json.load(open(f))["bytes_written"] for f in glob.glob(folder + "/everstep.part_*.json")]
assert sum(written) == 2 * rows.nbytes, written
"""


def test_what_is_held_more_than_once_is_written_once(processes: Processes) -> None:
    processes.run(4, PARTLY)
