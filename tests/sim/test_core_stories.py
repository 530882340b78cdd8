"""Seeded stories: the real core against everything that can befall a simulated job.

Every pass of every story is judged by `invariants`. `EVERSTEP_CORE_STORIES=2000` plays more; a
failure prints its seed and its whole story.
"""

from __future__ import annotations

import os

import pytest

from core_story import Story

COUNT = int(os.environ.get("EVERSTEP_CORE_STORIES", "40"))
FIRST = int(os.environ.get("EVERSTEP_CORE_STORIES_FROM", "1"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_job_trains_again_once_its_faults_stop(seed: int) -> None:
    story = Story(seed=seed, may_fail=seed % 2 == 0)
    story.play()
    assert story.heal(), story.describe()
    # (1): never back, and at most one at a time.
    assert story.incarnations == sorted(set(story.incarnations)), story.describe()
    _judge_budgets(story)
    _judge_rows(story)
    # (7): and once the first commit of the incarnation was told, it is quiet.
    story.job.run(7)
    writes, ledger = story.job.writes, story.job.ledger
    story.job.run(5)
    assert (story.job.writes, story.job.ledger) == (writes, ledger), story.describe()


def _judge_budgets(story: Story) -> None:
    """G10: a job to which only disruptions happened has no failure on its account.

    Agents that stay deaf or absent for a whole join are the exception; none do here.
    """
    if not story.may_fail:
        assert story.job.ledger.budgets.failures == 0, story.describe()


def _judge_rows(story: Story) -> None:
    """No progress is lost from the books: what a row says is what happened.

    Where a recovery was itself cut off, its row stays open and the next one accounts for both.
    """
    before = 0
    for incarnation, (reached, restored) in sorted(story.job.restores.items()):
        before = max(before, reached)
        row = next((r for r in story.job.status.recoveries if r.incarnation == incarnation), None)
        if row is None or row.step_restored is None:
            continue
        assert row.step_restored == restored, story.describe()
        assert row.lost_steps == max(0, row.step_before - restored), story.describe()
        assert row.step_before <= before, story.describe()
        before = restored
