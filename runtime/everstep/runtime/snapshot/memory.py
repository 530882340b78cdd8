"""How much memory a host may still take: what the machine has, what its control group allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.runtime.errors import ConfigurationError

GIB = 1 << 30
SETTING = "spec.checkpoint.snapshot.memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bound of the memory that can be taken now."""

    name: str
    """For people, for example `memory of the machine`."""
    available_bytes: int


def limits(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> tuple[Limit, ...]:
    """All bounds that this process runs under, the tightest first. Unreadable ones are left out."""
    found = [*_machine(proc), *_groups(proc, sys)]
    return tuple(sorted(found, key=lambda limit: limit.available_bytes))


def words(size_bytes: int) -> str:
    """A number of bytes for people: exact below a MiB, else three digits and a unit."""
    for unit, size in (("GiB", GIB), ("MiB", 1 << 20)):
        if size_bytes >= size:
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes} bytes"


def require(new: int, *, wanted: int, taken: int, bytes_max: int | None) -> None:
    """Refuse memory that there is not, before a page is touched.

    The kernel would not refuse it: it would kill somebody for it.

    Args:
        new: bytes of memory to be made now.
        wanted: bytes that all of the request needs, re-used memory included.
        taken: bytes of snapshot memory that there are already.
        bytes_max: the setting; None is not set.

    Raises:
        ConfigurationError: with these figures, and with the limit that does not suffice.
    """
    bounds = list(limits())
    if bytes_max is not None:
        bounds.append(Limit(name=f"the setting {SETTING}", available_bytes=bytes_max - taken))
    tight = min(bounds, key=lambda limit: limit.available_bytes, default=None)
    if tight is not None and new > tight.available_bytes:
        left = words(max(tight.available_bytes, 0))
        why = f"{words(new)} of it would be new, and {tight.name} leaves {left}"
        raise refusal(why, wanted=wanted, taken=taken, bytes_max=bytes_max)


def refusal(why: str, *, wanted: int, taken: int, bytes_max: int | None) -> ConfigurationError:
    """The error of a request for snapshot memory that cannot be met."""
    found = "not set" if bytes_max is None else words(bytes_max)
    return ConfigurationError(
        SETTING, found, f"room for {words(wanted)} of snapshots: {why} ({words(taken)} are taken)"
    )


def _machine(proc: Path) -> Iterator[Limit]:
    fields = _table(proc / "meminfo", separator=":")
    if "MemAvailable" in fields:
        yield Limit(
            name="memory of the machine (MemAvailable)",
            available_bytes=fields["MemAvailable"] * 1024,
        )


def _groups(proc: Path, sys: Path) -> Iterator[Limit]:
    """The memory limits of this process's control group and of all that contain it."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = sys / "fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = sys / "fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        # Inside a container the path may name a folder that is only visible outside it; the
        # root of what is visible is then the group itself.
        for group in (folder, *folder.parents):
            if group == root.parent:
                break
            limit = _group(group, *names)
            if limit is not None:
                yield limit


def _group(group: Path, maximum: str, current: str, reclaimable: str) -> Limit | None:
    allowed, used = _text(group / maximum).strip(), _text(group / current).strip()
    if not allowed.isdigit() or not used.isdigit():
        return None
    # Page cache that was not used lately counts as used, but is given back before anyone is
    # killed for memory.
    cache = _table(group / "memory.stat", separator=" ").get(reclaimable, 0)
    return Limit(
        name=f"control group's {group / maximum}",
        available_bytes=max(int(allowed) - int(used) + cache, 0),
    )


def _table(path: Path, *, separator: str) -> dict[str, int]:
    rows = (line.partition(separator) for line in _text(path).splitlines())
    return {
        name: int(value.split()[0])
        for name, _, value in rows
        if value.split()[:1] and value.split()[0].isdigit()
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
