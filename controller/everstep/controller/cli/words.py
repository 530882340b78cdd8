"""Words that people type and read: durations, places, ages."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from everstep.controller.api.ids import SliceId
from everstep.controller.cli.failure import UsageWrong

SINGULAR = "multislicejob.everstep.dev"
"""What one job is called in messages, as `kubectl` calls it."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration_s(text: str, option: str) -> float:
    """Read `30s`, `1m30s`, `500ms`, or a plain number of seconds.

    Raises:
        UsageWrong: it is none of these.
    """
    parts = list(_DURATION.finditer(text))
    if not parts or "".join(part.group(0) for part in parts) != text:
        raise UsageWrong(f"{option}: found {text!r}, expected a duration such as 30s or 1m30s")
    if any(part.group(2) is None for part in parts) and len(parts) > 1:
        raise UsageWrong(f"{option}: found {text!r}, expected a unit after each number")
    return sum(float(part.group(1)) * _UNITS[part.group(2) or "s"] for part in parts)


def parse_place(text: str) -> tuple[SliceId, int | None]:
    """Read `SLICE` or `SLICE/HOST`.

    Raises:
        UsageWrong: it is neither.
    """
    number, slash, host = text.partition("/")
    if not number.isdecimal() or (slash and not host.isdecimal()):
        raise UsageWrong(f"found {text!r}, expected SLICE or SLICE/HOST, for example 1 or 1/0")
    return SliceId(int(number)), int(host) if slash else None


def age(seconds: float) -> str:
    """Write an age as `kubectl` does: the two largest units that matter."""
    left = max(0, int(seconds))
    if left < 120:
        return f"{left}s"
    if left < 600:
        return f"{left // 60}m{left % 60}s" if left % 60 else f"{left // 60}m"
    if left < 3 * 3600:
        return f"{left // 60}m"
    if left < 8 * 3600:
        minutes = left % 3600 // 60
        return f"{left // 3600}h{minutes}m" if minutes else f"{left // 3600}h"
    if left < 48 * 3600:
        return f"{left // 3600}h"
    return f"{left // 86400}d"


def timestamp(unix_s: float) -> str:
    """Write a moment as Kubernetes objects do."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def clock_time(unix_s: float) -> str:
    """Write a moment of today for people, in their own time zone."""
    return datetime.fromtimestamp(unix_s, UTC).astimezone().strftime("%H:%M:%S")


def seconds(value: float | None) -> str:
    """Write a short duration; a dash where none is known."""
    return "-" if value is None else f"{value:.2f}s"


def size(count: int) -> str:
    """Write a number of bytes."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
