"""A second reader, written from `docs/reference/checkpoint-format.md` and nothing of ours: it reads
what we write. Where it cannot, the page lacks something."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

import everstep.runtime as es

PAGE_FORMATS = (1, 2)
AS_BYTES = ("uint2", "uint4", "float8_e4m3")


class PageReader:
    """The newest step of a run."""

    def __init__(self, run: Path) -> None:
        entries = [_entry(run / "_everstep/ledger", n + 1) for n in range(_entry_count(run))]
        dropped = {e["folder"] for e in entries if e["type"] == "step dropped"}
        commits = [
            e for e in entries if e["type"] == "step committed" and e["folder"] not in dropped
        ]
        lowest: int | None = None
        live: list[dict[str, Any]] = []
        # C5: no later claim has committed an earlier or equal step.
        for entry in sorted(commits, key=lambda e: (e["claim"], e["step"]), reverse=True):
            if lowest is None or entry["step"] < lowest:
                lowest = entry["step"]
                live.append(entry)
        self.steps = [entry["step"] for entry in reversed(live)]
        newest = live[0]
        self.folder = run / newest["folder"]
        data = (self.folder / "everstep.json").read_bytes()
        assert _digest(data) == newest["digest"]
        self.manifest = json.loads(data)
        assert self.manifest["format"] in PAGE_FORMATS
        assert self.manifest["step"] == newest["step"]
        for path, digest in self.manifest["files"].items():
            assert _digest((self.folder / path).read_bytes()) == digest, path

    def item(self, name: str) -> Any:
        item = self.manifest["items"][name]
        if item["handler"] == "json":
            return json.loads((self.folder / name / "metadata").read_text())
        if item["handler"] == "bytes":
            return (self.folder / name / "data").read_bytes()
        if item["handler"] == "iterator":
            (file,) = item["files"]
            data = (self.folder / name / file).read_bytes()
            return data[1:] if data[:1] == b"b" else json.loads(data[1:])
        assert item["handler"] == "pytree"
        return self._tree(name, item)

    def _tree(self, name: str, item: dict[str, Any]) -> dict[tuple[str, ...], Any]:
        """Leaves by the text of their keys."""
        extra = self.manifest["extra"] if name == "state" else item["extra"]
        inline = json.loads(extra.get("inline", "{}"))
        crcs = self._crcs(name, item)
        base = {"driver": "file", "path": f"{self.folder / name}/"}
        database: Any = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
        leaves: dict[tuple[str, ...], Any] = {}
        for index, leaf in enumerate(item["tree"]["leaves"]):
            value: Any = None
            match leaf["kind"]:
                case "array" | "numpy" | "prng-key":
                    chunk = item["chunks"][str(index)]
                    array = item["arrays"][index]
                    value = _array(database, array, leaf, chunk, crcs.get(index, {}))
                    if leaf["kind"] == "prng-key":
                        value = (leaf["impl"], value)
                case "scalar":
                    value = _scalar(leaf["dtype"], inline[str(index)])
                case "empty":
                    value = {"list": [], "tuple": (), "dict": {}}.get(leaf["value"])
                case kind:
                    assert kind == "none"
            leaves[tuple(text for _, text in leaf["path"])] = value
        return leaves

    def _crcs(self, name: str, item: dict[str, Any]) -> dict[int, dict[tuple[int, ...], int]]:
        noted: dict[int, dict[tuple[int, ...], int]] = {}
        for writer in item["writers"]:
            part = f"part_{writer}" if name == "state" else f"{name}_{writer}"
            record = json.loads((self.folder / f"everstep.{part}.json").read_text())
            for (leaf, (start, stop)), crcs in zip(record["regions"], record["crcs"], strict=True):
                chunk = record["chunks"][str(leaf)]
                grid = [
                    range(a // c, -(-b // c)) for a, b, c in zip(start, stop, chunk, strict=True)
                ]
                noted.setdefault(leaf, {}).update(
                    zip(itertools.product(*grid), crcs, strict=True)
                )  # fmt: skip
        return noted


def _entry_count(run: Path) -> int:
    return len(list((run / "_everstep/ledger").glob("*.json")))


def _entry(folder: Path, number: int) -> dict[str, Any]:
    text = (folder / f"{number:020d}.json").read_text()
    body = text[text.index(":") + 1 : text.rindex(',"crc32c"')]
    found: dict[str, Any] = json.loads(text)
    assert found["crc32c"] == f"{int(google_crc32c.value(body.encode())):08x}"
    entry: dict[str, Any] = found["entry"]
    assert entry["number"] == number
    return entry


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _array(
    database: Any,
    name: str,
    leaf: dict[str, Any],
    chunk: list[int],
    crcs: dict[tuple[int, ...], int],
) -> np.ndarray[Any, Any]:
    described = json.loads(database.read(f"{name}/zarr.json").result().value)
    assert described["shape"] == leaf["shape"]
    stored = "uint8" if leaf["dtype"] in AS_BYTES else leaf["dtype"]
    assert described["data_type"] == stored
    assert described["chunk_grid"]["configuration"]["chunk_shape"] == chunk
    out = np.zeros(leaf["shape"], _dtype(leaf["dtype"]))
    grid = [range(-(-n // c)) for n, c in zip(leaf["shape"], chunk, strict=True)]
    for cell in itertools.product(*grid):
        value = bytes(database.read("/".join((name, "c", *map(str, cell)))).result().value)
        data, crc = value[:-4], int.from_bytes(value[-4:], "little")
        assert crc == int(google_crc32c.value(data)) == crcs[cell]
        whole = np.frombuffer(data, out.dtype).reshape(chunk)
        place = tuple(slice(i * c, (i + 1) * c) for i, c in zip(cell, chunk, strict=True))
        part = out[place]
        out[place] = whole[tuple(slice(0, n) for n in part.shape)]
    return out


def _scalar(kind: str, text: str) -> Any:
    match kind:
        case "bool":
            return text == "True"
        case "int":
            return int(text)
        case "float":
            return float.fromhex(text)
        case "complex":
            return complex(*map(float.fromhex, text.split(" ")))
        case _:
            return ast.literal_eval(text)


class Position:
    """A data iterator."""

    def __init__(self) -> None:
        self.at = 41

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def tree(step: int) -> dict[str, Any]:
    dice = np.random.default_rng(step)
    return {
        "w": dice.normal(size=(300, 170)).astype(np.float32),
        "layers": [{"k": jnp.asarray(dice.normal(size=(7, 5)), jnp.bfloat16)}, (np.int8(step),)],
        "odd": jnp.arange(9, dtype=jnp.uint4),
        "zero": np.zeros((3, 0), np.float64),
        "key": jax.random.key(step),
        "step": step,
        "rate": 0.1,
        "on": True,
        "c": 1 - 2j,
        "big": 2**70,
        "name": "run é\n",
        "none": None,
        "empty": {},
        "numbered": {3: np.ones(2, np.uint16)},
    }


def check(found: dict[tuple[str, ...], Any], state: dict[str, Any]) -> None:
    expected = {
        ("w",): state["w"],
        ("layers", "0", "k"): state["layers"][0]["k"],
        ("layers", "1", "0"): state["layers"][1][0],
        ("odd",): state["odd"],
        ("zero",): state["zero"],
        ("numbered", "3"): state["numbered"][3],
    }
    for path, value in expected.items():
        array = np.asarray(value)
        assert found[path].dtype == array.dtype, path
        assert found[path].shape == array.shape, path
        assert found[path].tobytes() == array.tobytes(), path
    impl, data = found["key",]
    assert impl == str(jax.random.key_impl(state["key"]))
    np.testing.assert_array_equal(data, jax.random.key_data(state["key"]))
    for name in ("step", "rate", "on", "c", "big", "name", "none", "empty"):
        assert found[name,] == state[name], name
        assert type(found[name,]) is type(state[name]), name
    assert len(found) == len(expected) + 9


@pytest.mark.parametrize("is_one_tree", [True, False], ids=["one tree", "parts"])
def test_a_reader_made_from_the_page_alone_reads_what_we_write(
    tmp_path: Path, *, is_one_tree: bool
) -> None:
    run = tmp_path / "run"
    again: Any = None
    with es.Checkpoints(run, retention=es.Retention(latest=2)) as checkpoints:
        for step in (1, 2, 3):
            state: Any = tree(step)
            if not is_one_tree:
                state = es.Parts(
                    model=state,
                    optimizer={"mu": np.full(1000, step)},
                    settings=es.Json({"a": [1, "é"]}),
                    raw=b"\0\1",
                    data=Position(),
                )
            checkpoints.save(step, state, metadata={"loss": 1.5})
            again = state
    # A run that goes back, and on from there, has other steps.
    wanted: Any = tree(0) if is_one_tree else es.Parts(model=tree(0))
    with es.Checkpoints(run, retention=es.Retention(latest=2)) as checkpoints:
        checkpoints.restore(wanted, 2)
        checkpoints.save(3, again, metadata={"loss": 0.5})
        checkpoints.wait()
        assert checkpoints.steps() == (2, 3)
    reader = PageReader(run)
    assert reader.steps == [2, 3]
    assert json.loads(reader.manifest["extra"]["metadata"]) == {"loss": 0.5}
    if is_one_tree:
        check(reader.item("state"), tree(3))
        return
    check(reader.item("model"), tree(3))
    np.testing.assert_array_equal(reader.item("optimizer")["mu",], np.full(1000, 3))
    assert reader.item("settings") == {"a": [1, "é"]}
    assert reader.item("raw") == b"\0\1"
    assert reader.item("data") == {"at": 41}
