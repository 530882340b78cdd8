from __future__ import annotations

import logging
from pathlib import Path

import pytest

from everstep.runtime.loop.compiled import keep_compiled, read_entry, write_entry


def test_an_entry_reads_back_and_another_name_is_none(tmp_path: Path) -> None:
    write_entry(tmp_path, "jit_f-12", b"program")
    assert read_entry(tmp_path, "jit_f-12") == b"program"
    assert read_entry(tmp_path, "jit_f-13") is None


@pytest.mark.parametrize("damage", ["cut short", "bit flipped", "empty"])
def test_a_damaged_entry_is_a_miss_and_can_be_written_again(tmp_path: Path, damage: str) -> None:
    write_entry(tmp_path, "key", b"x" * 1000)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    left: dict[str, bytes] = {
        "cut short": bytes(data[:700]),
        "bit flipped": bytes(data),
        "empty": b"",
    }
    path.write_bytes(left[damage])
    assert read_entry(tmp_path, "key") is None
    write_entry(tmp_path, "key", b"y")
    assert read_entry(tmp_path, "key") == b"y"


def test_a_writer_that_was_killed_leaves_nothing_that_reads_as_an_entry(tmp_path: Path) -> None:
    (tmp_path / ".new-abc").write_bytes(b"half")
    assert read_entry(tmp_path, "key") is None
    write_entry(tmp_path, "key", b"whole")
    assert read_entry(tmp_path, "key") == b"whole"


def test_a_folder_that_cannot_be_made_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        keep_compiled(tmp_path / "file" / "folder")
    assert "compiled programs are not kept" in caplog.text
