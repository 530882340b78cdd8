"""The demo's stories: drawn from a seed, legal, and always ending with something left to train."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.controller.cli.demo.command import demo
from everstep.controller.cli.demo.story import (
    ALL,
    STEP_COUNT_MIN,
    Act,
    Deed,
    LossBound,
    Story,
    draw_story,
    standard_story,
)


def test_the_standard_story_tells_the_five_acts_in_order() -> None:
    story = standard_story(160)
    assert [act.deed for act in story.acts] == [
        Deed.NOTICE,
        Deed.KILL_AND_CONTROLLER,
        Deed.RETURN,
        Deed.KILL_ALL,
        Deed.RETURN,
    ]
    assert [len(act.left) for act in story.acts] == [2, 1, 3, 2, 3]


@given(seed=st.integers(min_value=0), step_count=st.integers(min_value=60, max_value=400))
def test_a_seed_always_draws_the_same_story(seed: int, step_count: int) -> None:
    assert draw_story(seed, step_count) == draw_story(seed, step_count)


@given(seed=st.integers(min_value=0), step_count=st.integers(min_value=60, max_value=400))
def test_every_drawn_story_is_legal(seed: int, step_count: int) -> None:
    story = draw_story(seed, step_count)
    _check_legal(story)


@pytest.mark.parametrize("step_count", [STEP_COUNT_MIN, 61, 100, 150, 160, 1000])
def test_the_standard_story_is_legal_at_any_length(step_count: int) -> None:
    _check_legal(standard_story(step_count))


@given(seed=st.none() | st.integers(min_value=0), step_count=st.integers(STEP_COUNT_MIN, 1000))
def test_the_training_may_reach_every_act_and_never_the_end_before_the_last_is_over(
    seed: int | None, step_count: int
) -> None:
    story = standard_story(step_count) if seed is None else draw_story(seed, step_count)
    bounds = [story.bound(number) for number in range(len(story.acts))]
    assert bounds == sorted(bounds)
    assert all(act.after_step <= bound for act, bound in zip(story.acts, bounds, strict=True))
    assert bounds[-1] < step_count


def test_too_few_steps_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "demo"
    assert demo(program="tiny", steps=STEP_COUNT_MIN - 1, folder=folder) == 2
    assert "--steps: found 59, expected 60 or more" in capsys.readouterr().err
    assert not folder.exists()


def test_many_seeds_draw_every_deed() -> None:
    drawn = {act.deed for seed in range(200) for act in draw_story(seed, 120).acts}
    assert drawn == set(Deed)


@pytest.mark.parametrize(
    ("deed", "bound"),
    [
        (Deed.NOTICE, LossBound.NONE),
        (Deed.RETURN, LossBound.NONE),
        (Deed.WITHDRAW, LossBound.NONE),
        (Deed.KILL, LossBound.SNAPSHOT),
        (Deed.FREEZE, LossBound.SNAPSHOT),
        (Deed.KILL_ALL, LossBound.COMMIT),
    ],
    ids=lambda value: value.name.lower(),
)
def test_a_deed_may_cost_what_its_kind_allows(deed: Deed, bound: LossBound) -> None:
    act = Act(after_step=1, deed=deed, slices=(ALL[0],), left=(ALL[1],), notice_s=5.0)
    assert act.loss_bound is bound


def _check_legal(story: Story) -> None:
    present = set(ALL)
    last = 0
    for act in story.acts:
        assert last <= act.after_step < story.step_count
        assert act.left
        assert act.slices
        touched = set(act.slices)
        if act.deed is Deed.RETURN:
            assert not touched & present
            assert set(act.left) == present | touched
        else:
            assert touched <= present
        if act.deed in (Deed.NOTICE, Deed.KILL, Deed.KILL_AND_CONTROLLER, Deed.KILL_TWICE):
            assert set(act.left) == present - touched
        if act.deed in (Deed.NOTICE, Deed.WITHDRAW):
            assert act.notice_s is not None
        present = set(act.left)
        last = act.after_step
