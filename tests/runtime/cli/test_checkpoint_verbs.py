"""`everstep checkpoint`: what people read about a run's steps, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

import everstep.runtime as es
from checkpoints import array, claimed, path, random_values, same_bits, save, tree_of
from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.checkpoint.commit import begin
from everstep.runtime.cli.main import app
from everstep.runtime.cli.opened import spans
from everstep.runtime.layout.scalars import INLINE
from everstep.runtime.layout.tree import Leaf, LeafKind, TreeSpec
from everstep.runtime.storage.ledger import entry_path
from everstep.runtime.storage.posix import PosixStore

RATE = Leaf(path=path("rate"), kind=LeafKind.SCALAR, dtype="float", value=(0.5).hex())
NAME = Leaf(path=path("name"), kind=LeafKind.SCALAR, dtype="str", value="'run é'")
TREE = tree_of(
    array("params", "kernel", shape=(96, 64)),
    array("params", "bias", dtype="bfloat16", shape=(7,)),
    array("empty", dtype="int8", shape=(0, 3)),
    array("count", dtype="int64", shape=()),
    RATE,
    NAME,
    Leaf(path=path("nothing"), kind=LeafKind.NONE),
)


class Run:
    """A run on disk with a few steps, and the command line over it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = PosixStore(str(root))
        self.ledger = claimed(self.store)

    def save(self, step: int, *, seed: int = 0, tree: TreeSpec = TREE, **changed: Any) -> None:
        values = random_values(tree, seed)
        for index, value in changed.pop("values", {}).items():
            values[index] = value
        save(self.store, self.ledger, step, tree, values, **changed)

    def type(self, verb: str, *words: str) -> Result:
        return CliRunner().invoke(app, [verb, str(self.root), *words])

    def ok(self, verb: str, *words: str) -> str:
        done = self.type(verb, *words)
        assert done.exit_code == 0, done.output
        return done.output

    def data_files(self, step: int) -> list[Path]:
        return sorted(self.root.glob(f"step-{step:010d}-*/state/ocdbt.process_*/d/*"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "run")
    made.save(10)
    made.save(20, extra={"loss": "2.5"})
    return made


def test_steps_are_listed_with_size_leaves_and_metadata(run: Run) -> None:
    lines = run.ok("ls").splitlines()
    assert lines[0].split() == [
        "STEP", "SIZE", "LEAVES", "AGE", "INCARNATION", "ITEMS", "METADATA",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:]] == ["10", "20"]
    assert "24 KiB" in lines[1]
    assert "loss=2.5" in lines[2]


def test_the_list_is_json_for_programs(run: Run) -> None:
    listed = json.loads(run.ok("ls", "-o", "json"))
    assert [step["step"] for step in listed["steps"]] == [10, 20]
    assert listed["steps"][0]["size_bytes"] == 96 * 64 * 4 + 7 * 2 + 8


def test_leaves_are_shown_by_the_names_that_errors_use(run: Run) -> None:
    shown = run.ok("show", "--step", "10")
    assert "['params']['kernel']" in shown
    assert "float32[96,64]" in shown
    assert "a Python float 0.5" in shown
    only = run.ok("show", "--leaves", "*bias*")
    assert "bfloat16[7]" in only
    assert "kernel" not in only


def test_the_value_of_a_plain_leaf_is_that_of_the_step(run: Run) -> None:
    run.save(30, extra={INLINE: json.dumps({"4": (0.25).hex(), "5": "'later'"})})
    assert "a Python float 0.25" in run.ok("show")
    assert "0.5 → 0.25" in run.type("diff", "20", "30").output


def test_a_sound_run_verifies(run: Run) -> None:
    verified = run.ok("verify", "--all").splitlines()
    assert [line.split(":")[0] for line in verified] == ["step 10", "step 20"]
    assert all("are as written" in line for line in verified)


def test_each_damaged_chunk_is_named_and_the_exit_code_says_so(run: Run) -> None:
    largest = max(run.data_files(20), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    done = run.type("verify", "--all")
    assert done.exit_code == 1
    assert "step 10: " in done.output
    assert "are as written" in done.output.splitlines()[0]
    assert "step 20: ['params']['kernel']: " in done.output
    assert "region" in done.output


def test_a_damaged_small_file_does_not_hide_the_other_steps(run: Run) -> None:
    next(run.root.glob("step-0000000010-*/state/_METADATA")).write_text("{}")
    listed = run.type("ls")
    assert listed.exit_code == 1
    assert "state/_METADATA" in listed.output
    assert "loss=2.5" in listed.output
    assert run.type("verify", "--step", "10").exit_code == 1
    assert run.type("verify", "--step", "20").exit_code == 0


def test_equal_steps_have_no_difference(run: Run) -> None:
    assert "same leaves with the same bytes" in run.ok("diff", "10", "20")


def test_a_difference_is_counted_by_bytes(run: Run) -> None:
    kernel = random_values(TREE)[0].copy()
    kernel[3, 5] = 0.0
    run.save(30, values={0: kernel})
    kernel = kernel.copy()
    kernel[3, 5] = -0.0
    run.save(40, values={0: kernel})
    done = run.type("diff", "30", "40", "-o", "json")
    assert done.exit_code == 1
    [found] = json.loads(done.output)["differences"]
    assert (found["leaf"], found["changed"], found["elements"]) == (
        "['params']['kernel']", 1, 96 * 64,
    )  # fmt: skip
    assert found["largest"] == 0.0


def test_leaves_that_only_one_step_has_are_differences(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.save(1, tree=tree_of(array("a"), array("b", shape=(3,))))
    run.save(2, tree=tree_of(array("a", dtype="float16"), array("c")))
    kinds = {
        found["leaf"]: found["kind"]
        for found in json.loads(run.type("diff", "1", "2", "-o", "json").output)["differences"]
    }
    assert kinds == {"['a']": "other kind", "['b']": "only in A", "['c']": "only in B"}


def test_a_step_is_exported_for_orbax(run: Run, tmp_path: Path) -> None:
    from orbax.checkpoint import v1

    run.ok("export", str(tmp_path / "out" / "10"), "--step", "10")
    loaded = v1.load(str(tmp_path / "out" / "10"))
    values = random_values(TREE)
    assert loaded["params"]["kernel"].tobytes() == values[0].tobytes()
    assert loaded["params"]["bias"].tobytes() == values[1].tobytes()
    assert loaded["rate"] == 0.5
    assert loaded["name"] == "run é"
    assert loaded["nothing"] is None


def test_a_step_is_exported_as_safetensors(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    run.ok("export", str(target), "--format", "safetensors")
    loaded = load_file(target)
    values = random_values(TREE)
    assert loaded.keys() == {"params.kernel", "params.bias", "empty", "count"}
    expected = {0: values[0], 2: values[2], 3: values[3]}
    found = {0: loaded["params.kernel"], 2: loaded["empty"], 3: loaded["count"]}
    assert same_bits(expected, found)
    assert loaded["params.bias"].tobytes() == values[1].tobytes()
    header = target.read_bytes()
    notes = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]
    assert notes["name"] == "run é"
    assert notes["step"] == "20"


def test_what_safetensors_cannot_hold_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.save(1, tree=tree_of(array("a"), array("odd", dtype="int4")))
    target = tmp_path / "out" / "weights.safetensors"
    done = run.type("export", str(target), "--format", "safetensors")
    assert done.exit_code == 2
    assert "['odd']" in done.output
    assert not target.parent.exists()


@pytest.mark.parametrize("form", ["orbax", "safetensors"])
def test_nothing_that_is_there_is_overwritten(run: Run, tmp_path: Path, form: str) -> None:
    target = tmp_path / "mine"
    target.write_text("precious")
    done = run.type("export", str(target), "--format", form)
    assert done.exit_code == 2
    assert target.read_text() == "precious"


@pytest.mark.parametrize("form", ["orbax", "safetensors"])
def test_an_export_of_a_damaged_step_leaves_nothing(run: Run, tmp_path: Path, form: str) -> None:
    for file in run.data_files(20):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    done = run.type("export", str(tmp_path / "out" / "it"), "--format", form)
    assert done.exit_code == 1
    assert not list((tmp_path / "out").glob("*"))
    assert not list((tmp_path / "out").glob(".it*"))


def test_a_clean_up_is_told_and_not_done(run: Run) -> None:
    run.save(30)
    begin(run.store, Step(40), Incarnation(1), ledger=run.ledger)
    run.ledger.claim(Incarnation(2), "job-a")
    told = json.loads(run.ok("gc", "--latest", "2", "-o", "json"))
    assert told["kept"] == [20, 30]
    assert [(one["step"], one["why"]) for one in told["deleted"]] == [
        (10, "not kept by these rules"),
        (40, "the draft of an incarnation that is over"),
    ]
    assert len(list(run.root.glob("step-*"))) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "--step", "11"], "--step: found 11, expected one of 10, 20"),
        (["show", "--leaves", "nosuch*"], "--leaves"),
        (["diff", "10", "11"], "expected one of 10, 20"),
        (["export", "/nowhere/x", "--item", "optimizer"], "--item"),
    ],
)
def test_a_question_that_has_no_answer_says_what_would_have_one(
    run: Run, words: list[str], said: str
) -> None:
    done = run.type(words[0], *words[1:])
    assert done.exit_code == 2
    assert said in done.output


def test_a_folder_without_checkpoints_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["ls", str(tmp_path / "no\nthing")])
    assert done.exit_code == 2
    assert "has none" in done.output
    assert not (tmp_path / "no\nthing").exists()


def test_an_unreadable_ledger_is_no_empty_one(run: Run) -> None:
    (run.root / entry_path(2)).write_text("{")
    done = run.type("ls")
    assert done.exit_code == 1
    assert "ledger entry 2" in done.output


def test_reading_goes_on_while_a_job_writes(run: Run) -> None:
    stop = threading.Event()

    def write() -> None:
        step = 20
        while not stop.is_set() and step < 60:
            step += 1
            run.save(step)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            assert run.type("ls").exit_code == 0
            assert run.type("verify").exit_code == 0
    finally:
        stop.set()
        writer.join(timeout=120)
    assert not writer.is_alive()


@pytest.mark.parametrize("limit", [1, 40, 1 << 20])
@pytest.mark.parametrize(
    ("shape", "chunk"),
    [((), ()), ((7,), (3,)), ((4, 6, 5), (2, 3, 5)), ((3, 0), (1, 1)), ((1, 9, 9), (1, 9, 9))],
)
def test_spans_tile_a_leaf_in_whole_chunks(
    shape: tuple[int, ...], chunk: tuple[int, ...], limit: int
) -> None:
    leaf = array("a", shape=shape)
    counts = np.zeros(shape, np.int64)
    for box in spans(leaf, chunk, limit):
        counts[box.slices()] += 1
        assert all(
            a % c == 0 and (b % c == 0 or b == n)
            for a, b, c, n in zip(box.start, box.stop, chunk, shape, strict=True)
        )
    assert (counts == 1).all()


def test_the_verbs_are_part_of_the_one_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "everstep.controller.cli.main", "checkpoint", "--help"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "verify" in done.stdout


def test_named_parts_are_shown_verified_and_exported_each(tmp_path: Path) -> None:
    with es.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(
            5,
            es.Parts(
                model={"w": jnp.arange(4.0)}, opt={"mu": jnp.ones(3)}, data=es.Json({"at": 7})
            ),
            metadata={"loss": 0.5},
        )
    runner = CliRunner()

    def ok(*words: str) -> str:
        done = runner.invoke(app, [*words])
        assert done.exit_code == 0, done.output
        return done.output

    uri = str(tmp_path / "run")
    assert "model,opt,data" in ok("ls", uri)
    assert 'metadata={"loss":' in ok("ls", uri)
    shown = ok("show", uri)
    assert "part data: metadata" in shown
    assert "model" in shown
    assert "28 bytes in 2 leaves" in ok("verify", uri)
    target = tmp_path / "model.safetensors"
    ok("export", uri, str(target), "--format", "safetensors", "--item", "model")
    assert load_file(target)["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    (damaged,) = (tmp_path / "run").glob("step-*/data/metadata")
    damaged.write_text("{}")
    assert runner.invoke(app, ["verify", uri]).exit_code == 1


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_orbax_is_listed_shown_compared_and_exported(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    root = tmp_path / "orbax"
    with ocp.CheckpointManager(root) as orbax_run:
        for step in (1, 2):
            state = {"w": jnp.full((40,), float(step)), "b": jnp.ones(3)}
            orbax_run.save(step, args=ocp.args.StandardSave(state))
    runner = CliRunner()

    def ok(*words: str, code: int = 0) -> str:
        done = runner.invoke(app, [*words])
        assert done.exit_code == code, done.output
        return done.output

    uri = str(root)
    assert [line.split()[0] for line in ok("ls", uri).splitlines()[1:]] == ["1", "2"]
    assert "float32[40]" in ok("show", uri)
    assert "have no checksum" in ok("verify", uri)
    assert "40 of 40 elements, by at most 1" in ok("diff", uri, "1", "2", code=1)
    target = tmp_path / "w.safetensors"
    item = json.loads(ok("ls", uri, "-o", "json"))["steps"][0]["items"][0]
    ok("export", uri, str(target), "--format", "safetensors", "--item", item)
    assert load_file(target)["w"].tolist() == [2.0] * 40
