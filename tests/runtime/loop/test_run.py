from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from everstep.controller.api.ids import Step
from everstep.runtime.agent.link import HoldKind, Word, WorkerPhase
from everstep.runtime.errors import ConfigurationError, StateRefused
from everstep.runtime.loop.ending import Leave
from everstep.runtime.loop.run import Run
from everstep.runtime.testing.memory_keeper import MemoryKeeper

State = dict[str, Any]


def init() -> dict[str, Any]:
    return {"w": jnp.arange(4.0), "n": jnp.zeros((), jnp.int32)}


def advance(state: State) -> State:
    return {"w": state["w"] * 1.5 + 1, "n": state["n"] + 1}


def train(run: Run, count: int, *, until: int | None = None) -> State:
    state: State = run.restore(init)
    for step in run.steps(count):
        state = advance(state)
        run.step_done(step, state, {"loss": state["w"][0]})
        if until is not None and step + 1 == until:
            break
    run.finish()
    return state


def test_a_fresh_run_counts_from_zero_and_holds_its_last_step() -> None:
    keeper = MemoryKeeper()
    run = keeper.start()
    train(run, 7)
    assert (run.restored_step, run.step, run.is_finished) == (None, 7, True)
    assert keeper.steps == [7]
    assert int(keeper.states[Step(7)]["n"]) == 7


def test_a_run_goes_on_after_the_newest_step_with_the_same_bits() -> None:
    whole, parts = MemoryKeeper(), MemoryKeeper()
    train(whole.start(), 10)
    train(parts.start(snapshot_every_steps=4), 10, until=6)
    run = parts.start()
    train(run, 10)
    assert run.restored_step == 4
    np.testing.assert_array_equal(parts.states[Step(10)]["w"], whole.states[Step(10)]["w"])
    assert sorted(parts.metrics()) == [5, 6, 7, 8, 9, 10]


def test_snapshots_fall_on_multiples_of_the_cadence_whatever_step_was_restored() -> None:
    keeper = MemoryKeeper()
    train(keeper.start(snapshot_every_steps=5), 20, until=7)
    run = keeper.start(snapshot_every_steps=4, durable_every_steps=6)
    train(run, 15)
    assert keeper.steps == [5, 6, 8, 12, 15]


def test_a_changed_cadence_counts_from_the_next_step() -> None:
    keeper = MemoryKeeper()
    run = keeper.start()
    state: State = run.restore(init)
    for step in run.steps(9):
        if step == 4:
            keeper.control.write(Word.SNAPSHOT_EVERY, 3)
        run.step_done(step, state)
    assert keeper.steps == [6, 9]


def test_a_hold_captures_the_agreed_step_and_goes_on() -> None:
    keeper = MemoryKeeper()
    run = keeper.start()
    state: State = run.restore(init)
    for step in run.steps(6):
        if step == 2:
            keeper.control.write(Word.HOLD_KIND, HoldKind.CONTINUE)
            keeper.control.write(Word.HOLD_AFTER, 4)
        run.step_done(step, state)
    assert keeper.steps == [4, 6]


def test_a_hold_to_leave_ends_train_after_the_capture_past_except_exception() -> None:
    keeper = MemoryKeeper()
    run = keeper.start()
    state: State = run.restore(init)
    keeper.control.write(Word.HOLD_KIND, HoldKind.LEAVE)
    keeper.control.write(Word.HOLD_AFTER, 3)
    reached: list[int] = []

    def loop() -> None:
        for step in run.steps(6):
            reached.append(step)
            try:
                run.step_done(step, state)
            except Exception:  # noqa: BLE001 - what users write.
                pytest.fail("Leave was caught as an Exception")

    with pytest.raises(Leave) as left:
        loop()
    assert (left.value.step, keeper.steps, reached) == (3, [3], [0, 1, 2])


def test_whoever_swallows_leave_is_told_again() -> None:
    keeper = MemoryKeeper()
    run = keeper.start()
    state: State = run.restore(init)
    keeper.control.write(Word.HOLD_KIND, HoldKind.LEAVE)
    keeper.control.write(Word.HOLD_AFTER, 1)
    steps = run.steps(6)
    with pytest.raises(Leave):
        run.step_done(next(steps), state)
    with pytest.raises(Leave):
        next(steps)
    with pytest.raises(Leave):
        run.step_done(0, state)


def test_leaving_at_the_last_step_is_finishing() -> None:
    keeper = MemoryKeeper()
    run = keeper.start()
    keeper.control.write(Word.HOLD_KIND, HoldKind.LEAVE)
    keeper.control.write(Word.HOLD_AFTER, 3)
    train(run, 3)
    assert run.is_finished
    assert keeper.steps == [3]


def test_a_hold_that_comes_too_late_is_passed_over_and_a_later_one_is_kept() -> None:
    keeper = MemoryKeeper()
    run = keeper.start()
    state: State = run.restore(init)
    steps = run.steps(9)
    run.step_done(next(steps), state)
    run.step_done(next(steps), state)
    keeper.control.write(Word.HOLD_AFTER, 1)
    run.step_done(next(steps), state)
    assert keeper.steps == []
    keeper.control.write(Word.HOLD_AFTER, 5)
    run.step_done(next(steps), state)
    run.step_done(next(steps), state)
    assert keeper.steps == [5]


def test_the_shared_words_tell_where_the_worker_is() -> None:
    keeper = MemoryKeeper()
    run = keeper.start()
    seen = keeper.control
    assert seen.read(Word.STEP_DONE) == -1
    state: State = run.restore(init)
    assert (seen.read(Word.STEP_DONE), seen.read(Word.PHASE)) == (0, WorkerPhase.COMPILING)
    steps = run.steps(3)
    step = next(steps)
    assert (seen.read(Word.STEP_STARTED), seen.read(Word.STEP_DONE)) == (1, 0)
    run.step_done(step, state)
    assert (seen.read(Word.STEP_DONE), seen.read(Word.PHASE)) == (1, WorkerPhase.TRAINING)
    assert keeper.first_steps == [1]


def test_a_tree_that_changes_between_saves_is_refused_by_leaf() -> None:
    keeper = MemoryKeeper()
    run = keeper.start(snapshot_every_steps=2)
    state: State = run.restore(init)

    def loop() -> None:
        for step in run.steps(9):
            extra = {"extra": jnp.zeros(2)} if step >= 3 else {}
            run.step_done(step, {**state, **extra})

    with pytest.raises(StateRefused, match=r"\['extra'\]"):
        loop()
    assert keeper.steps == [2]


def test_steps_are_done_in_order() -> None:
    run = MemoryKeeper().start()
    state: State = run.restore(init)
    next(run.steps(5))
    with pytest.raises(ConfigurationError, match="step 0, once"):
        run.step_done(1, state)


def test_a_step_that_is_not_reported_done_is_missed() -> None:
    run = MemoryKeeper().start()
    run.restore(init)
    steps = run.steps(5)
    next(steps)
    with pytest.raises(ConfigurationError, match=r"step 0 is not done.*run\.step_done"):
        next(steps)


def test_a_step_is_done_once() -> None:
    run = MemoryKeeper().start()
    state: State = run.restore(init)
    step = next(run.steps(5))
    run.step_done(step, state)
    with pytest.raises(ConfigurationError, match="once"):
        run.step_done(step, state)


def test_steps_before_restore_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"run\.restore before run\.steps"):
        MemoryKeeper().start().steps(5)


def test_init_is_not_evaluated_when_a_step_is_restored() -> None:
    keeper = MemoryKeeper()
    train(keeper.start(), 2)
    calls: list[bool] = []

    def counting_init() -> dict[str, Any]:
        calls.append(type(jnp.zeros(())).__name__.endswith("Tracer"))
        return init()

    keeper.start().restore(counting_init)
    assert calls == [True], "only traced for its shapes"


def test_a_background_failure_is_raised_at_the_next_boundary() -> None:
    keeper = MemoryKeeper()
    run = keeper.start()
    state: State = run.restore(init)
    steps = run.steps(9)
    run.step_done(next(steps), state)
    keeper.failure = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        run.step_done(next(steps), state)


def test_metrics_appear_in_step_order_and_keep_every_bit() -> None:
    keeper = MemoryKeeper()
    run = keeper.start()
    state: State = run.restore(init)
    values = [0.1, 1 / 3, float(np.float32(0.1)), -0.0, 1e-308]
    for step in run.steps(len(values)):
        run.step_done(step, state, {"loss": values[step], "on_device": jnp.float32(step)})
    run.finish()
    found = keeper.metrics()
    assert [found[s + 1]["loss"].hex() for s in range(5)] == [v.hex() for v in values]
    assert [found[s + 1]["on_device"] for s in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_other_metric_names_are_refused_with_both_lists() -> None:
    run = MemoryKeeper().start()
    state: State = run.restore(init)
    steps = run.steps(5)
    run.step_done(next(steps), state, {"loss": 1.0})
    with pytest.raises(ConfigurationError, match=r"'accuracy'.*'loss'"):
        run.step_done(next(steps), state, {"accuracy": 1.0})


def test_random_numbers_depend_on_seed_and_step_alone() -> None:
    def draw(seed: int, step: int, incarnations: int) -> tuple[bytes, float]:
        keeper = MemoryKeeper()
        run = [keeper.start(seed=seed) for _ in range(incarnations)][-1]
        return np.asarray(jax.random.key_data(run.key(step))).tobytes(), run.rng(step).random()

    assert draw(1, 5, 1) == draw(1, 5, 3)
    assert len({draw(*which, 1) for which in [(1, 5), (1, 6), (2, 5)]}) == 3


def test_keys_of_many_steps_are_all_different() -> None:
    run = MemoryKeeper().start()
    keys = {np.asarray(jax.random.key_data(run.key(s))).tobytes() for s in range(500)}
    assert len(keys) == 500


class AgreedMeanwhile(MemoryKeeper):
    """Its first copy takes so long that a later step is agreed on and confirmed before it ends."""

    later = 0

    def capture(self, step: Step, state: Any, *, is_required: bool) -> bool:
        if self.later > 0:
            self.control.write(Word.HOLD_AFTER, -1)
            self.control.write(Word.HOLD_KIND, HoldKind.LEAVE)
            self.control.write(Word.HOLD_AFTER, self.later)
            self.later = 0
        return super().capture(step, state, is_required=is_required)


def test_a_later_hold_that_is_confirmed_during_a_copy_does_not_end_the_step_that_is_copied() -> (
    None
):
    keeper = AgreedMeanwhile()
    keeper.later = 4
    run = keeper.start()
    state: State = run.restore(init)
    keeper.control.write(Word.HOLD_KIND, HoldKind.CONTINUE)
    keeper.control.write(Word.HOLD_AFTER, 2)
    steps = run.steps(9)
    run.step_done(next(steps), state)
    run.step_done(next(steps), state)
    run.step_done(next(steps), state)
    with pytest.raises(Leave) as left:
        run.step_done(next(steps), state)
    assert (left.value.step, keeper.steps) == (4, [2, 4])


class NoSlotYet(MemoryKeeper):
    """Grants no slot to the first captures that are not required."""

    refusals = 0

    def capture(self, step: Step, state: Any, *, is_required: bool) -> bool:
        if self.refusals > 0 and not is_required:
            self.refusals -= 1
            return False
        return super().capture(step, state, is_required=is_required)


def test_a_first_snapshot_that_found_no_slot_is_made_up_for_at_the_next_step() -> None:
    keeper = NoSlotYet()
    keeper.refusals = 2
    train(keeper.start(snapshot_every_steps=5), 16, until=13)
    assert keeper.steps == [7, 10]


def test_a_later_snapshot_that_found_no_slot_waits_for_the_next_one_that_is_due() -> None:
    keeper = NoSlotYet()
    run = keeper.start(snapshot_every_steps=5)
    state: State = run.restore(init)
    for step in run.steps(100):
        keeper.refusals = 1 if step == 8 else keeper.refusals
        state = advance(state)
        run.step_done(step, state, {"loss": state["w"][0]})
        if step == 16:
            break
    assert keeper.steps == [5, 15]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("much", "str 'much'"),
        (None, "NoneType None"),
        (np.zeros((2, 3), np.float32), "an array float32[2, 3]"),
        ({"nested": 1.0}, "dict {'nested': 1.0}"),
        ("x" * 500, "str '" + "x" * 59 + "…"),
    ],
)
def test_a_metric_that_is_no_number_is_named_with_its_step(value: object, found: str) -> None:
    run = MemoryKeeper().start()
    state: State = run.restore(init)
    steps = run.steps(5)
    with pytest.raises(ConfigurationError) as refused:
        run.step_done(next(steps), state, {"loss": 1.0, "score": value})
    assert refused.value.field == "metrics['score'] of step 0"
    assert refused.value.found == found
    assert "a number" in refused.value.expected


def test_metrics_that_are_no_mapping_are_refused() -> None:
    run = MemoryKeeper().start()
    state: State = run.restore(init)
    loss: Any = 0.5
    with pytest.raises(ConfigurationError, match=r"metrics: found 'float 0\.5', expected a"):
        run.step_done(next(run.steps(5)), state, loss)
