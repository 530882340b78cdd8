"""The demo's verdict: it must be able to say no."""

from __future__ import annotations

import pytest

from everstep.controller.api.ids import Incarnation, SliceId, Step
from everstep.controller.api.status import Recovery
from everstep.controller.cli.demo.story import ALL, Act, Deed
from everstep.controller.cli.demo.verdict import Result, judge_act, judge_end


def _recovery(
    *,
    lost: int = 0,
    restored: int = 50,
    storage: int = 0,
    drain_s: float = 1.0,
) -> Recovery:
    return Recovery(
        incarnation=Incarnation(2),
        cause="SliceLost",
        at_s=0.0,
        from_slices=3,
        to_slices=2,
        step_before=Step(restored + lost),
        step_restored=Step(restored),
        lost_steps=lost,
        storage_bytes=storage,
        detect_s=0.1,
        drain_s=drain_s,
        first_step_s=0.5,
    )


def _act(deed: Deed, notice_s: float | None = None) -> Act:
    return Act(
        after_step=10, deed=deed, slices=(SliceId(1),), left=(ALL[0], ALL[2]), notice_s=notice_s
    )


def _holds(act: Act, recovery: Recovery, committed: int = 40) -> dict[str, bool]:
    checks = judge_act(act, [recovery], step_committed=committed, snapshot_every_steps=5)
    return {check.name: check.holds for check in checks}


@pytest.mark.parametrize(
    ("act", "recovery", "broken"),
    [
        (_act(Deed.NOTICE, 20.0), _recovery(lost=1), "no step lost"),
        (_act(Deed.NOTICE, 20.0), _recovery(drain_s=25.0), "held before the deadline"),
        (_act(Deed.RETURN), _recovery(lost=2), "no step lost"),
        (_act(Deed.KILL), _recovery(lost=6), "loss within the snapshots"),
        (_act(Deed.KILL), _recovery(lost=2, storage=1), "restored from memory"),
        (
            _act(Deed.KILL_ALL),
            _recovery(restored=39, storage=1),
            "resumed from the last commit or later",
        ),
        (_act(Deed.KILL_ALL), _recovery(restored=40, storage=0), "restored from disk"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_promise_is_named(act: Act, recovery: Recovery, broken: str) -> None:
    verdicts = _holds(act, recovery)
    assert [name for name, holds in verdicts.items() if not holds] == [broken]


@pytest.mark.parametrize(
    ("act", "recovery"),
    [
        (_act(Deed.NOTICE, 20.0), _recovery()),
        (_act(Deed.KILL), _recovery(lost=5)),
        (_act(Deed.KILL_ALL), _recovery(restored=40, lost=30, storage=9)),
    ],
    ids=["notice", "kill", "kill-all"],
)
def test_kept_promises_hold(act: Act, recovery: Recovery) -> None:
    assert all(_holds(act, recovery).values())


def _end(found: Result, expected: Result, conflicts: tuple[int, ...] = ()) -> tuple[bool, bool]:
    losses, parameters = judge_end(found, expected, step_count=2, conflicts=conflicts)
    return losses.holds, parameters.holds


CALM = Result(losses={1: 0.5, 2: 0.25}, digests={"w": "aa", "b": "bb"})


def test_equal_results_hold() -> None:
    assert _end(CALM, CALM) == (True, True)


def test_one_bit_of_one_loss_is_seen() -> None:
    found = Result(losses={1: 0.5, 2: 0.25000000000000006}, digests=CALM.digests)
    assert _end(found, CALM) == (False, True)


def test_a_missing_step_is_seen() -> None:
    assert _end(Result(losses={2: 0.25}, digests=CALM.digests), CALM) == (False, True)


def test_a_replay_with_other_values_is_seen() -> None:
    assert _end(CALM, CALM, conflicts=(1,)) == (False, True)


@pytest.mark.parametrize(
    "digests", [{}, {"w": "aa"}, {"w": "aa", "b": "bc"}, {"w": "aa", "b": "bb", "c": "cc"}]
)
def test_any_difference_of_parameters_is_seen(digests: dict[str, str]) -> None:
    assert _end(Result(losses=CALM.losses, digests=digests), CALM) == (True, False)


def test_two_empty_results_are_not_called_equal() -> None:
    empty = Result(losses={}, digests={})
    assert _end(empty, empty) == (False, False)


def test_two_losses_that_are_no_numbers_are_equal() -> None:
    diverged = Result(losses={1: 0.5, 2: float("nan")}, digests=CALM.digests)
    assert _end(diverged, diverged) == (True, True)
    assert _end(diverged, CALM) == (False, True)
