from __future__ import annotations

import itertools

import pytest

from everstep.controller.api.ids import Incarnation, Step
from everstep.controller.api.spec import Retention
from everstep.runtime.checkpoint.retention import choose_dropped
from everstep.runtime.storage.history import Commit


def commits(*steps: int, job_uid: str = "a") -> list[Commit]:
    return [
        Commit(
            step=Step(step),
            incarnation=Incarnation(1),
            folder=f"f{step}",
            digest="",
            committed_at_s=0.0,
            number=number,
            claim=1,
            job_uid=job_uid,
        )
        for number, step in enumerate(steps, 2)
    ]


@pytest.mark.parametrize(
    ("steps", "latest", "every", "dropped"),
    [
        ((), 3, None, ()),
        ((10,), 1, None, ()),
        ((10, 20), 1, None, ()),
        ((10, 20, 30), 1, None, (10,)),
        ((10, 20, 30, 40), 3, None, (10,)),
        ((9000, 10000, 99999, 100000), 2, None, (9000, 10000)),
        ((50, 100, 137, 150, 200, 250), 2, 100, (50, 137, 150)),
        ((0, 1, 2, 3), 2, 2, (1,)),
    ],
)
def test_newest_and_every_nth_stay(
    steps: tuple[int, ...], latest: int, every: int | None, dropped: tuple[int, ...]
) -> None:
    rule = Retention(latest=latest, every_steps=every)
    assert choose_dropped(commits(*steps), rule, 0.0) == dropped


def test_the_newest_two_stay_whatever_is_asked() -> None:
    # Over all small rules.
    for count, latest, every in itertools.product(range(6), range(1, 4), (None, 1, 20, 30)):
        all_steps = [10 * i for i in range(1, count + 1)]
        dropped = choose_dropped(
            commits(*all_steps), Retention(latest=latest, every_steps=every), 0.0
        )
        assert set(dropped).isdisjoint(all_steps[-2:])
        kept = [step for step in all_steps if step not in dropped]
        assert kept[-min(latest, count) :] == all_steps[-min(latest, count) :] if count else True
        # Dropping is done once: what is left would all be kept again.
        assert (
            choose_dropped(commits(*kept), Retention(latest=latest, every_steps=every), 0.0) == ()
        )


def test_what_another_job_committed_is_not_dropped() -> None:
    both = commits(1, 2, job_uid="x") + commits(3, 4, 5, job_uid="y")
    rule = Retention(latest=2)
    assert choose_dropped(both, rule, 0.0, job_uid="y") == (3,)
    assert choose_dropped(both, rule, 0.0) == (1, 2, 3)
