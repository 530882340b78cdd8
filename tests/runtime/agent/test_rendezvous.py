"""The join: ranks, who is missing, which step, and what everyone is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent_values import ROWS, TREE, directive, holding, host, inventory
from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.agent.coverage import find_gaps
from everstep.runtime.agent.rendezvous import (
    Choice,
    Committed,
    Gathering,
    NoChoice,
    Place,
    answer,
    choose,
    rank_of,
    receive,
    roster,
)
from everstep.runtime.agent.wire import Join
from everstep.runtime.layout.manifest import Holding, Inventory


def committed(step: int, held_in: int | None = 1) -> Committed:
    return Committed(step=Step(step), held_in=None if held_in is None else Incarnation(held_in))


def join(slice_id: int, number: int = 0, *, incarnation: int = 1, step_before: int = 0) -> Join:
    return Join(
        incarnation=Incarnation(incarnation),
        host=host(slice_id, number),
        address=f"10.0.{slice_id}.{number}",
        port=7070,
        inventory=inventory(holding(host(slice_id, number), 4)),
        step_before=Step(step_before),
    )


def test_ranks_are_dense_and_slice_major_whatever_slices_are_left() -> None:
    order = roster(directive(3, [0, 2, 5], hosts=2))
    assert order == tuple(host(s, h) for s in (0, 2, 5) for h in (0, 1))
    assert rank_of(directive(3, [0, 2, 5], hosts=2), host(2, 1)) == 3
    assert rank_of(directive(3, [0, 2, 5], hosts=2), host(1)) is None


def test_a_gathering_names_who_is_missing_until_all_are_in() -> None:
    gathering = Gathering(directive=directive(1, [0, 1]))
    first = receive(gathering, join(0))
    assert isinstance(first, Gathering)
    assert first.missing == (host(1),)
    second = receive(first, join(1))
    assert isinstance(second, Gathering)
    assert second.is_complete


def test_a_surplus_host_and_another_incarnation_are_refused() -> None:
    gathering = Gathering(directive=directive(1, [0, 1]))
    assert receive(gathering, join(2)) == "host 2/0 is not a member of incarnation 1"
    assert receive(gathering, join(0, incarnation=2)) == "this join is of incarnation 1"


@pytest.mark.parametrize(
    ("held", "commits", "aside", "expected"),
    [
        pytest.param([], [], [], (None, False), id="nothing anywhere is a fresh start"),
        pytest.param([(0, 4, None)], [], [], (4, False), id="one whole copy is enough"),
        pytest.param(
            [(0, 6, (0, 6)), (1, 6, (6, ROWS)), (0, 4, (0, 6)), (1, 4, (6, ROWS))],
            [],
            [],
            (6, False),
            id="two halves make a whole",
        ),
        pytest.param(
            [(0, 6, (0, 6)), (0, 4, (0, 6)), (1, 4, (6, ROWS))],
            [],
            [],
            (4, False),
            id="a half is no step, never a mixture",
        ),
        pytest.param(
            [(0, 4, None)], [committed(6)], [], (6, True), id="a newer checkpoint beats memory"
        ),
        pytest.param(
            [(0, 6, None)], [committed(6)], [], (6, True), id="memory first, storage behind it"
        ),
        pytest.param(
            [(0, 6, None)],
            [committed(6, 9)],
            [],
            (6, False),
            id="another incarnation's checkpoint of the step is no fallback (R3)",
        ),
        pytest.param(
            [(0, 6, (0, 6))],
            [committed(6)],
            [],
            (6, True),
            id="storage fills what memory lacks",
        ),
        pytest.param(
            [(0, 6, None), (0, 4, None)], [], [6], (4, False), id="a step set aside is not chosen"
        ),
        pytest.param(
            [(0, 9, (0, 6))], [], [], (None, False), id="early losses start over when nothing else"
        ),
    ],
)
def test_the_newest_step_that_is_whole_is_chosen(
    held: list[tuple[int, int, tuple[int, int] | None]],
    commits: list[Committed],
    aside: list[int],
    expected: tuple[int | None, bool],
) -> None:
    inventories = [
        inventory(holding(host(who), step, rows or (0, ROWS))) for who, step, rows in held
    ]
    choice = choose(inventories, commits, [Step(step) for step in aside])
    assert isinstance(choice, Choice)
    assert (choice.step, choice.is_in_storage) == expected


def test_halves_of_two_incarnations_are_never_mixed() -> None:  # R3
    inventories = [
        inventory(holding(host(0), 6, (0, 6), incarnation=1)),
        inventory(holding(host(1), 6, (6, ROWS), incarnation=2)),
        inventory(holding(host(2), 4, incarnation=2)),
    ]
    choice = choose(inventories, [])
    assert isinstance(choice, Choice)
    assert choice.step == 4


def test_unreadable_storage_is_not_absence() -> None:  # R4
    choice = choose([], "ledger entry 7 is damaged")
    assert isinstance(choice, NoChoice)
    assert "ledger entry 7" in choice.why
    with_memory = choose([inventory(holding(host(0), 4))], "no answer")
    assert isinstance(with_memory, Choice)
    assert with_memory.step == 4


def test_memory_older_than_a_known_checkpoint_is_not_gone_back_to() -> None:  # R4
    inventories = [inventory(holding(host(0), 4))]
    assert isinstance(choose(inventories, "no answer", step_committed=Step(6)), NoChoice)
    assert isinstance(choose(inventories, "no answer", step_committed=Step(4)), Choice)


def test_when_all_checkpoints_are_set_aside_the_newest_is_tried_again() -> None:  # R6
    choice = choose([], [committed(4), committed(6)], [Step(4), Step(6)])
    assert choice == Choice(step=Step(6), is_in_storage=True, is_set_aside=True)


def test_when_what_memory_alone_holds_is_set_aside_it_is_tried_again() -> None:  # R6
    choice = choose([inventory(holding(host(0), 4))], [], [Step(4)])
    assert isinstance(choice, Choice)
    assert (choice.step, choice.is_set_aside) == (4, True)
    assert choice.holdings


def test_a_step_in_memory_that_is_set_aside_is_not_chosen_while_storage_may_have_another() -> None:
    held = [inventory(holding(host(0), 4))]
    assert isinstance(choose(held, "no answer", [Step(4)]), NoChoice)
    older = choose(held, [committed(2)], [Step(4)])
    assert older == Choice(step=Step(2), is_in_storage=True)


def test_everyone_gets_the_same_step_roster_and_coordinator() -> None:  # R1
    one = directive(2, [0, 2], hosts=2)
    gathering = Gathering(directive=one)
    for who in roster(one):
        grown = receive(
            gathering, join(who.slice, who.host, incarnation=2, step_before=who.slice + 7)
        )
        assert isinstance(grown, Gathering)
        gathering = grown
    inventories = [j.inventory for j in gathering.joins.values()]
    choice = choose(inventories, [])
    place = Place(coordinator_address="10.0.0.0:8482", uri="/run")
    answers = {h: a.assignment for h, a in answer(gathering, choice, place).items()}
    assignments = [a for a in answers.values() if a is not None]
    assert [a.rank for a in assignments] == [0, 1, 2, 3]
    assert {(a.restore_step, a.coordinator_address, a.members) for a in assignments} == {
        (4, "10.0.0.0:8482", one.members)
    }
    assert {a.step_before for a in assignments} == {9}
    for who, assignment in answers.items():
        assert assignment is not None
        assert assignment.holdings[0].host == who
        assert assignment.own_slots == (assignment.holdings[0].id,)
        assert len(assignment.holdings) == 4


halves = st.tuples(
    st.integers(0, 3), st.integers(1, 4), st.integers(1, 2), st.integers(0, 11), st.integers(1, 12)
)


@given(st.lists(halves, max_size=12), st.sets(st.integers(1, 4)), st.sets(st.integers(1, 4)))
def test_whatever_is_held_the_choice_is_whole_and_the_newest_such(
    held: list[tuple[int, int, int, int, int]], commits: set[int], aside: set[int]
) -> None:  # R2
    by_host: dict[int, list[Holding]] = {}
    for n, (who, step, incarnation, start, length) in enumerate(held):
        rows = (start, min(ROWS, start + length))
        one = holding(host(who), step, rows, incarnation=incarnation, n=n)
        by_host.setdefault(who, []).append(one)
    inventories: list[Inventory] = [inventory(*holdings) for holdings in by_host.values()]
    choice = choose(inventories, [committed(s) for s in commits], [Step(s) for s in aside])
    every = [h for one in inventories for h in one.holdings]

    def is_whole(step: int, incarnation: int) -> bool:
        group = [h for h in every if (h.step, h.incarnation) == (step, incarnation)]
        return bool(group) and not find_gaps(TREE, group)

    whole = {step for step in range(1, 5) for i in (1, 2) if is_whole(step, i)}
    # R6: what is set aside comes last, and before nothing.
    usable = (whole | commits) - aside or whole | commits
    assert isinstance(choice, Choice)
    assert choice.step == max(usable, default=None)
    assert choice.is_set_aside == (choice.step in aside)
    assert {h.step for h in choice.holdings} <= {choice.step}
    assert len({h.incarnation for h in choice.holdings}) <= 1
    if choice.holdings and not choice.is_in_storage:
        assert not find_gaps(TREE, choice.holdings)


def on_disk(slice_id: int, step: int, incarnation: int = 1) -> Inventory:
    """What a host offers that was started anew: half of the state, on its disk."""
    rows = (slice_id * ROWS // 2, (slice_id + 1) * ROWS // 2)
    found = holding(host(slice_id), step, rows, incarnation=incarnation)
    return inventory(replace(found, is_local=True))


def test_disks_that_are_whole_together_give_a_step_that_is_newer_than_any_commit() -> None:
    found = choose([on_disk(0, 9), on_disk(1, 9)], [committed(5)])
    assert isinstance(found, Choice)
    assert (found.step, found.is_in_storage, len(found.holdings)) == (9, False, 2)


def test_half_of_a_step_on_disks_is_no_step() -> None:
    found = choose([on_disk(0, 9)], [committed(5)])
    assert found == Choice(step=Step(5), is_in_storage=True)


def test_a_disk_fills_up_what_memory_holds_of_the_same_step() -> None:
    in_memory = inventory(holding(host(0), 9, (0, ROWS // 2)))
    found = choose([in_memory, on_disk(1, 9)], [])
    assert isinstance(found, Choice)
    assert found.step == 9


@pytest.mark.parametrize(
    ("commits", "step"),
    [
        pytest.param([committed(10)], 10, id="a newer step is committed"),
        pytest.param([committed(9, 2)], 9, id="another content of the step is committed"),
        pytest.param([committed(9, None)], 9, id="the content of the committed step is unknown"),
        pytest.param([committed(8, 2)], 8, id="a later incarnation has committed an older step"),
    ],
)
def test_a_disk_is_never_trusted_over_a_commit(  # R5
    commits: list[Committed], step: int
) -> None:
    found = choose([on_disk(0, 9), on_disk(1, 9)], commits)
    assert found == Choice(step=Step(step), is_in_storage=True)


def test_a_disk_serves_the_very_content_that_is_committed() -> None:
    found = choose([on_disk(0, 9)], [committed(9, 1)])
    assert isinstance(found, Choice)
    assert (found.step, found.is_in_storage, len(found.holdings)) == (9, True, 1)


def test_disks_alone_are_not_gone_on_from_while_storage_cannot_be_read() -> None:  # R4, R5
    found = choose([on_disk(0, 9), on_disk(1, 9)], "no answer")
    assert isinstance(found, NoChoice)
    assert "no answer" in found.why


def test_a_worker_is_handed_its_memory_and_not_its_disk() -> None:
    joins = {
        host(number): replace(join(number, incarnation=2), inventory=on_disk(number, 9))
        for number in (0, 1)
    }
    gathering = Gathering(directive=directive(2, [0, 1]), joins=joins)
    choice = choose([one.inventory for one in joins.values()], [])
    assert isinstance(choice, Choice)
    answers = answer(gathering, choice, Place(coordinator_address="", uri="/run"))
    assignment = answers[host(0)].assignment
    assert assignment is not None
    assert assignment.own_slots == ()
    assert [h.is_local for h in assignment.holdings] == [True, True]
