"""The agent's command line, and the order of timeouts."""

from __future__ import annotations

import msgspec
import pytest

from agent_values import SETTINGS, host
from everstep.runtime.errors import ConfigurationError
from everstep.runtime.settings import check_order, parse_options

GOOD = {
    "--channel": "local:/x",
    "--job-uid": "u",
    "--slice": "1",
    "--host": "0",
    "--address": "127.0.0.1",
    "--port": "7070",
    "--coordinator-port": "8482",
    "--grace-s": "30",
}


def arguments(*command: str, **changes: str) -> list[str]:
    options = GOOD | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return [word for pair in options.items() for word in pair] + list(command)


def test_a_good_command_line_is_read_whole() -> None:
    options = parse_options(arguments("--", "python", "train.py", "--port", "1"))
    assert options.host == host(1)
    assert options.command == ("python", "train.py", "--port", "1")
    assert (options.port, options.grace_s) == (7070, 30.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("--port", "0"),
        ("--coordinator-port", "65536"),
        ("--slice", "-1"),
        ("--grace-s", "-1"),
        ("--address", "localhost"),
    ],
)
def test_a_value_out_of_range_names_its_option(field: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        parse_options(arguments("--", "python", **{field.removeprefix("--"): value}))


def test_a_missing_command_is_said() -> None:
    with pytest.raises(ConfigurationError, match="command"):
        parse_options(arguments())


def test_timeouts_in_order_pass() -> None:
    check_order(SETTINGS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"report_timeout_s": 1.0}, "reportSeconds.*1 s.*reportIntervalSeconds"),
        ({"progress_timeout_s": 4.0}, "progressSeconds.*4 s.*reportSeconds"),
        ({"join_timeout_s": 60.0}, "joinSeconds.*60 s.*progressSeconds"),
    ],
)
def test_a_wrong_order_names_both_timeouts_and_values(change: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        check_order(msgspec.structs.replace(SETTINGS, **change))
