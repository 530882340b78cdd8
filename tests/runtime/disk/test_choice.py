"""Which local copies stay, and which go to make room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.controller.api.ids import Step
from everstep.runtime.disk.choice import (
    Found,
    choose_removed,
    choose_room,
    is_left_behind,
    next_number,
)


def copy(number: int, step: int | None, size_bytes: int = 100) -> Found:
    return Found(
        name=f"copy-{number}",
        number=number,
        step=None if step is None else Step(step),
        size_bytes=size_bytes,
    )


STRAY = Found(name="notes.txt", number=None, step=None)


def test_the_newest_copies_stay_by_the_order_in_which_they_were_written() -> None:
    # A run that went back: the copy of step 40 is newer than that of step 90.
    found = [copy(1, 80), copy(2, 90), copy(3, 40)]
    assert choose_removed(found, latest=1) == ("copy-1", "copy-2")
    assert choose_removed(found, latest=2) == ("copy-1",)


def test_what_is_no_whole_copy_goes_and_takes_no_whole_ones_place() -> None:
    found = [copy(1, 80), copy(2, None), STRAY]
    assert choose_removed(found, latest=1) == ("copy-2", "notes.txt")


def test_a_number_is_never_used_twice_whatever_became_of_its_copy() -> None:
    assert next_number([]) == 1
    assert next_number([copy(7, None), copy(3, 10), STRAY]) == 8


def test_room_is_made_of_what_durable_storage_has_and_oldest_first() -> None:
    found = [copy(1, 10), copy(2, 20), copy(3, 30)]
    room = choose_room(found, wanted_bytes=250, free_bytes=100, step_durable=Step(20))
    assert (room.removed, room.missing_bytes) == (("copy-1", "copy-2"), 0)
    room = choose_room(found, wanted_bytes=150, free_bytes=100, step_durable=Step(20))
    assert room.removed == ("copy-1",)


def test_the_only_copy_of_a_step_does_not_go_for_room() -> None:
    room = choose_room([copy(1, 30)], wanted_bytes=250, free_bytes=100, step_durable=Step(20))
    assert (room.removed, room.missing_bytes) == ((), 150)
    room = choose_room([copy(1, 30)], wanted_bytes=250, free_bytes=100, step_durable=None)
    assert (room.removed, room.missing_bytes) == ((), 150)


def test_an_owner_that_is_gone_is_cleaned_up_after_once_storage_has_its_steps() -> None:
    assert is_left_behind([copy(1, 10), copy(2, None)], step_durable=Step(10))
    assert not is_left_behind([copy(1, 11)], step_durable=Step(10))
    assert not is_left_behind([copy(1, 11)], step_durable=None)
    assert is_left_behind([], step_durable=None)


copies = st.lists(st.tuples(st.integers(0, 50) | st.none(), st.integers(0, 100)), max_size=6).map(
    lambda drawn: [copy(at + 1, step, size) for at, (step, size) in enumerate(drawn)]
)


@given(copies, st.integers(1, 3), st.integers(0, 400), st.integers(0, 400), st.integers(0, 50))
def test_the_newest_whole_copy_only_ever_goes_when_storage_has_it(
    found: list[Found], latest: int, wanted: int, free: int, durable: int
) -> None:
    whole = [one for one in found if one.step is not None]
    room = choose_room(found, wanted_bytes=wanted, free_bytes=free, step_durable=Step(durable))
    if whole:
        newest = whole[-1]
        assert newest.name not in choose_removed(found, latest=latest)
        assert newest.name not in room.removed or (newest.step or 0) <= durable
    gained = sum(one.size_bytes for one in whole if one.name in room.removed)
    assert room.missing_bytes == max(wanted - free - gained, 0)
    assert len(whole) - len(
        [o for o in whole if o.name in choose_removed(found, latest=latest)]
    ) == min(latest, len(whole))
