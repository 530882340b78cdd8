"""What an agent is told on its command line, and the order that timeouts must have."""

from __future__ import annotations

import argparse
import ipaddress
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.wire import Settings
from everstep.runtime.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """(1) Numbers are in range; (2) `command` is not empty."""

    channel: str
    job_uid: str
    host: HostId
    address: str
    port: int
    coordinator_port: int
    grace_s: float
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        for field, port in (("--port", self.port), ("--coordinator-port", self.coordinator_port)):
            if not 1 <= port <= 65535:
                raise ConfigurationError(field, port, "a port from 1 to 65535")
        for field, number in (("--slice", self.host.slice), ("--host", self.host.host)):
            if number < 0:
                raise ConfigurationError(field, number, "0 or more")
        if self.grace_s < 0:
            raise ConfigurationError("--grace-s", self.grace_s, "0 or more seconds")
        if not self.command:
            raise ConfigurationError("command", "nothing", "a command after `--`")
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            raise ConfigurationError(
                "--address", self.address, "an IP address, not a name"
            ) from None


def parse_options(arguments: Sequence[str]) -> AgentOptions:
    """Read the command line of `everstep-agent`.

    Raises:
        ConfigurationError: a value is out of range; names the option.
        SystemExit: an option is unknown or missing, as argparse says.
    """
    parser = argparse.ArgumentParser(
        prog="everstep-agent",
        description="Run a training program under Everstep on one host.",
        epilog="Everything after `--` is the program and its arguments.",
        allow_abbrev=False,
    )
    parser.add_argument("--channel", required=True, help="where directives come from: local:FOLDER")
    parser.add_argument("--job-uid", required=True)
    parser.add_argument("--slice", required=True, type=int)
    parser.add_argument("--host", required=True, type=int)
    parser.add_argument("--address", required=True, help="IP that this host serves its peers on")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--coordinator-port", required=True, type=int)
    parser.add_argument("--grace-s", required=True, type=float, help="SIGTERM to SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command …")
    found = parser.parse_args(arguments)
    command: list[str] = found.command
    if command and command[0] == "--":
        command = command[1:]
    return AgentOptions(
        channel=found.channel,
        job_uid=found.job_uid,
        host=HostId(SliceId(found.slice), found.host),
        address=found.address,
        port=found.port,
        coordinator_port=found.coordinator_port,
        grace_s=found.grace_s,
        command=tuple(command),
    )


def check_order(settings: Settings) -> None:
    """Check that each timeout is longer than what it must not cut short.

    Raises:
        ConfigurationError: names the two timeouts and their values.
    """
    ordered = (
        ("reportIntervalSeconds", settings.report_interval_s),
        ("reportSeconds", settings.report_timeout_s),
        ("progressSeconds", settings.progress_timeout_s),
        ("joinSeconds", settings.join_timeout_s),
    )
    for (shorter, shorter_s), (longer, longer_s) in itertools.pairwise(ordered):
        if not 0 < shorter_s < longer_s:
            raise ConfigurationError(
                f"spec.runtime.timeouts.{longer}",
                f"{longer_s:g} s",
                f"more than {shorter} ({shorter_s:g} s)",
            )
