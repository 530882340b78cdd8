from __future__ import annotations

import pytest

from everstep.controller.cli.awaiting import parse_condition
from everstep.controller.cli.failure import UsageWrong
from everstep.controller.cli.words import age, parse_duration_s, parse_place, seconds, size


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [("30s", 30), ("1m30s", 90), ("500ms", 0.5), ("2h", 7200), ("7", 7), ("0.5", 0.5)],
)
def test_durations_read_as_people_write_them(text: str, expected_s: float) -> None:
    assert parse_duration_s(text, "--notice") == expected_s


@pytest.mark.parametrize("text", ["", "s", "-3s", "3 s", "soon", "1m30", "3s!", "nan"])
def test_what_is_no_duration_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(UsageWrong, match="--notice: found"):
        parse_duration_s(text, "--notice")


def test_places_are_slices_or_hosts() -> None:
    assert parse_place("3") == (3, None)
    assert parse_place("3/1") == (3, 1)


@pytest.mark.parametrize("text", ["", "a", "1/", "/1", "1/a", "-1", "1/2/3"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(UsageWrong, match="expected SLICE or SLICE/HOST"):
        parse_place(text)


@pytest.mark.parametrize(
    ("given_s", "expected"),
    [(-5, "0s"), (59, "59s"), (119, "119s"), (300, "5m"), (303, "5m3s"), (3600, "60m")],
)
def test_short_ages_read_as_kubectl_writes_them(given_s: float, expected: str) -> None:
    assert age(given_s) == expected


@pytest.mark.parametrize(
    ("given_s", "expected"), [(4 * 3600 + 300, "4h5m"), (20 * 3600, "20h"), (86400 * 9, "9d")]
)
def test_long_ages_read_as_kubectl_writes_them(given_s: float, expected: str) -> None:
    assert age(given_s) == expected


def test_what_is_not_known_is_a_dash() -> None:
    assert seconds(None) == "-"
    assert seconds(1.234) == "1.23s"


@pytest.mark.parametrize(
    ("count", "expected"), [(0, "0 B"), (2048, "2.0 KiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes_have_a_unit(count: int, expected: str) -> None:
    assert size(count) == expected


@pytest.mark.parametrize("text", ["Running", "phase=", "phase=Walking", "condition=", "x=y"])
def test_what_cannot_be_waited_for_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageWrong, match="--for"):
        parse_condition(text)
