"""The figures of available memory, from files like those of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.runtime.errors import ConfigurationError
from everstep.runtime.snapshot.memory import SETTING, limits, require, words

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_machine_is_one_limit(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   2048 kB\nHugePages: 0\n"})
    (limit,) = limits(tmp_path / "proc", tmp_path / "sys")
    assert limit.available_bytes == 2 * MIB
    assert "MemAvailable" in limit.name


def test_every_group_above_counts_and_the_tightest_comes_first(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 999999 kB\n",
            "proc/self/cgroup": "0::/pods/mine\n",
            "sys/fs/cgroup/pods/mine/memory.max": "max\n",
            "sys/fs/cgroup/pods/mine/memory.current": "1\n",
            "sys/fs/cgroup/pods/memory.max": str(100 * MIB),
            "sys/fs/cgroup/pods/memory.current": str(90 * MIB),
            "sys/fs/cgroup/pods/memory.stat": f"anon 5\ninactive_file {20 * MIB}\n",
        },
    )
    found = limits(tmp_path / "proc", tmp_path / "sys")
    assert [limit.available_bytes for limit in found] == [30 * MIB, 999999 * 1024]
    assert "pods/memory.max" in found[0].name


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(10 * MIB),
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(12 * MIB),
        },
    )
    (limit,) = limits(tmp_path / "proc", tmp_path / "sys")
    assert limit.available_bytes == 0


def test_a_container_that_sees_its_group_as_the_root_is_bounded_by_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../far/away\n",
            "sys/fs/cgroup/memory.max": str(10 * MIB),
            "sys/fs/cgroup/memory.current": str(4 * MIB),
        },
    )
    assert [limit.available_bytes for limit in limits(tmp_path / "proc", tmp_path / "sys")] == [
        6 * MIB
    ]


def test_a_machine_that_tells_nothing_bounds_nothing(tmp_path: Path) -> None:
    assert limits(tmp_path / "proc", tmp_path / "sys") == ()


def test_this_machine_tells_what_it_has() -> None:
    assert limits()


def test_a_refusal_names_needed_available_limit_and_setting() -> None:
    with pytest.raises(ConfigurationError) as caught:
        require(5 * MIB, wanted=7 * MIB, taken=2 * MIB, bytes_max=6 * MIB)
    text = str(caught.value)
    for part in (SETTING, "7.00 MiB", "5.00 MiB", "4.00 MiB", "2.00 MiB", "6.00 MiB"):
        assert part in text
    require(4 * MIB, wanted=6 * MIB, taken=2 * MIB, bytes_max=6 * MIB)


def test_sizes_are_written_for_people() -> None:
    assert words(0) == "0 bytes"
    assert words(3 * MIB // 2) == "1.50 MiB"
    assert words(5 << 30) == "5.00 GiB"
