"""A small step of several parts, made of its number, so that whoever reads it knows what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import everstep.runtime as es

PARTS = ("model", "optimizer", "settings", "raw")


def parts_of(step: int) -> es.Parts:
    """Arrays in data files and in the index, plain values, JSON, bytes."""
    dice = np.random.default_rng(step)
    return es.Parts(
        model={
            "w": dice.normal(size=(40, 30)).astype(np.float32),
            "b": np.full(3, step % 100, np.int8),
        },
        optimizer={"mu": dice.normal(size=400), "count": step, "none": None},
        settings=es.Json({"step": step}),
        raw=b"raw %d" % step,
    )


def like() -> es.Parts:
    return parts_of(0)


def step_of(parts: es.Parts) -> int:
    """Which step these parts are of. Fails unless all of them are, bit for bit."""
    step = int(parts.settings["step"])
    expected = parts_of(step)
    for name in ("model", "optimizer"):
        assert parts[name].keys() == expected[name].keys()
        for leaf, value in expected[name].items():
            found = parts[name][leaf]
            if isinstance(value, np.ndarray):
                assert found.dtype == value.dtype, (name, leaf)
                assert found.tobytes() == value.tobytes(), (step, name, leaf)
            else:
                assert found == value, (step, name, leaf)
    assert parts.settings == {"step": step}
    assert parts.raw == expected.raw
    return step


def read_all(run: Path) -> tuple[int, ...]:
    """The steps of a run, each of them read by a new reader and whole."""
    with es.Checkpoints(run) as reader:
        steps = reader.steps()
        for step in steps:
            assert step_of(reader.restore(like(), step)) == step
    return steps


def save_next(run: Path, step: int, retention: es.Retention) -> tuple[int, ...]:
    """Go on as the next program would; the steps after that. Nothing is left beside them."""
    with es.Checkpoints(run, retention=retention) as checkpoints:
        checkpoints.save(step, parts_of(step)).wait(60)
        assert step_of(checkpoints.restore(like())) == step
        steps = checkpoints.steps()
    assert steps[-1] == step
    folders = [int(found.name.split("-")[1]) for found in run.glob("step-*")]
    assert sorted(folders) == list(steps)
    return steps


def make_run(run: Path, retention: es.Retention, *steps: int) -> None:
    with es.Checkpoints(run, retention=retention) as checkpoints:
        for step in steps:
            checkpoints.save(step, parts_of(step))


def names_of(value: Any) -> str:
    """All words of an error, with those of what caused it."""
    words: list[str] = []
    while value is not None:
        words.append(str(value))
        value = value.__cause__
    return " | ".join(words)
