"""Numbers of jobs: two that choose at the same moment never get the same one."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.local.addresses import (
    NUMBER_COUNT,
    choose_number,
    host_address,
    order_candidates,
)

PORT = 47070


GONE = Path("/nonexistent/job.json")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "numbers" / "numbers.json"


def test_all_numbers_are_chosen_once_before_one_comes_again(page: Path) -> None:
    chosen = [
        choose_number(f"job {i}", (), port=PORT, owner=GONE, page=page) for i in range(NUMBER_COUNT)
    ]
    assert sorted(chosen) == list(range(NUMBER_COUNT))
    assert choose_number("one more", (), port=PORT, owner=GONE, page=page) == chosen[0]


def test_a_job_keeps_its_number_however_many_come_and_go(page: Path, tmp_path: Path) -> None:
    record = tmp_path / "job.json"
    kept = choose_number("kept", (), port=PORT, owner=record, page=page)
    record.touch()
    others = {
        choose_number(f"job {i}", (), port=PORT, owner=GONE, page=page)
        for i in range(3 * NUMBER_COUNT)
    }
    assert others == set(range(NUMBER_COUNT)) - {kept}
    record.unlink()
    assert choose_number("next", (), port=PORT, owner=GONE, page=page) == kept


def test_more_jobs_than_numbers_share_those_chosen_longest_ago(page: Path, tmp_path: Path) -> None:
    chosen = [
        choose_number(f"job {i}", (), port=PORT, owner=tmp_path, page=page)
        for i in range(NUMBER_COUNT)
    ]
    assert choose_number("one more", (), port=PORT, owner=tmp_path, page=page) == chosen[0]


def test_those_that_choose_at_the_same_moment_get_different_numbers(page: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        chosen = list(
            pool.map(
                lambda _: choose_number("same", (), port=PORT, owner=GONE, page=page), range(40)
            )
        )
    assert len(set(chosen)) == 40


def test_a_number_of_the_folder_or_with_a_listener_is_passed_over(page: Path) -> None:
    wanted, other, third = order_candidates("uid", (), (), ())[:3]
    with socket.socket() as listener:
        listener.bind((host_address(other, HostId(SliceId(3), 0)), PORT))
        listener.listen()
        assert choose_number("uid", (wanted,), port=PORT, owner=GONE, page=page) == third


def test_when_all_are_taken_one_is_given_nevertheless(page: Path) -> None:
    assert choose_number("uid", range(NUMBER_COUNT), port=PORT, owner=GONE, page=page) in range(
        NUMBER_COUNT
    )


@pytest.mark.parametrize("text", [b"", b"[1, 2", b'{"a": 1}', b'["x"]'])
def test_a_torn_page_is_begun_anew(page: Path, text: bytes) -> None:
    page.parent.mkdir()
    page.write_bytes(text)
    first = choose_number("uid", (), port=PORT, owner=GONE, page=page)
    assert choose_number("uid", (), port=PORT, owner=GONE, page=page) != first


def test_without_a_page_numbers_are_spread_and_probed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    page = tmp_path / "file" / "numbers.json"
    first = choose_number("uid", (), port=PORT, owner=GONE, page=page)
    assert first == choose_number("uid", (), port=PORT, owner=GONE, page=page)
    assert first != choose_number("uid", (first,), port=PORT, owner=GONE, page=page)


def test_a_page_that_is_a_link_of_somebody_is_not_followed(page: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    page.parent.mkdir()
    os.symlink(target, page)
    choose_number("uid", (), port=PORT, owner=GONE, page=page)
    assert target.read_text() == "kept"
