"""Metrics of the last steps, as they travel with a held step."""

from __future__ import annotations

import math

import pytest

from everstep.runtime.loop.recent import RECENT, recent_extra, recent_lines

NAMES = ("loss", "norm")
LINES = ((3, (0.1, -0.0)), (4, (1e-310, math.inf)))


def test_lines_come_back_with_every_bit() -> None:
    found = recent_lines(recent_extra(NAMES, LINES), NAMES)
    assert found == LINES
    assert math.copysign(1.0, found[0][1][1]) == -1.0


def test_a_value_that_is_no_number_comes_back_as_one() -> None:
    ((step, (value,)),) = recent_lines(recent_extra(("loss",), [(7, (math.nan,))]), ("loss",))
    assert step == 7
    assert math.isnan(value)


def test_no_line_is_no_entry() -> None:
    assert recent_extra(NAMES, []) == {}
    assert recent_lines({}, NAMES) == ()


def test_lines_of_other_names_are_not_told_under_these() -> None:
    assert recent_lines(recent_extra(NAMES, LINES), ("norm", "loss")) == ()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{", id="no JSON"),
        pytest.param('{"names": ["loss"]}', id="a part missing"),
        pytest.param('{"names": ["loss"], "lines": [[1, ["x"]]]}', id="no number"),
    ],
)
def test_what_cannot_be_read_counts_as_none(text: str) -> None:
    assert recent_lines({RECENT: text}, ("loss",)) == ()
