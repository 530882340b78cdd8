"""What moves out of doomed memory, and to whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent_values import ROWS, TREE, holding, host
from everstep.controller.api.ids import SliceId
from everstep.runtime.agent.coverage import find_gaps
from everstep.runtime.agent.evacuation import Evacuation, plan_evacuation
from everstep.runtime.layout.boxes import Box, uncovered, whole
from everstep.runtime.layout.manifest import Holding, Shard
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec


def moved_boxes(plan: Evacuation, leaf: int) -> list[Box]:
    return [
        region.box
        for parts in plan.takes.values()
        for part in parts
        for region in part.regions
        if region.leaf == leaf
    ]


def test_a_replicated_state_moves_nothing() -> None:
    holdings = [holding(host(s), 4) for s in range(3)]
    plan = plan_evacuation(TREE, holdings, doomed={SliceId(1)}, takers=[host(0), host(2)])
    assert (plan.takes, plan.size_bytes, plan.lost) == ({}, 0, ())


def test_only_what_the_doomed_alone_hold_moves() -> None:
    holdings = [
        holding(host(0), 4, (0, 5)),
        holding(host(1), 4, (3, 9)),
        holding(host(2), 4, (8, ROWS)),
    ]
    plan = plan_evacuation(TREE, holdings, doomed={SliceId(1)}, takers=[host(0), host(2)])
    assert moved_boxes(plan, 0) == [Box((5, 0), (8, 2))]
    assert moved_boxes(plan, 1) == []
    assert plan.size_bytes == 3 * 8


def test_what_nobody_holds_is_named() -> None:
    holdings = [holding(host(0), 4, (0, 5)), holding(host(1), 4, (6, ROWS))]
    plan = plan_evacuation(TREE, holdings, doomed={SliceId(1)}, takers=[host(0)])
    assert [region.box for region in plan.lost] == [Box((5, 0), (6, 2))]


def test_large_moves_are_shared_evenly() -> None:
    rows = 1 << 20
    tree = TreeSpec(
        leaves=(
            Leaf(
                path=(Key(KeyKind.DICT, "w"),),
                kind=LeafKind.ARRAY,
                dtype="float32",
                shape=(rows, 8),
            ),
        )
    )
    big = Holding(
        id="big",
        step=holding(host(0), 4).step,
        incarnation=holding(host(0), 4).incarnation,
        host=host(1),
        address="10.0.1.0",
        port=7070,
        fingerprint=tree.fingerprint,
        shards=(Shard(0, whole((rows, 8)), 0, rows * 32),),
    )
    takers = [host(0), host(2), host(3)]
    plan = plan_evacuation(tree, [big], doomed={SliceId(1)}, takers=takers)
    sizes = [
        sum(region.box.size for part in plan.takes[taker] for region in part.regions)
        for taker in takers
    ]
    assert sum(sizes) == rows * 8
    assert max(sizes) - min(sizes) <= 8


pieces = st.tuples(st.integers(0, 3), st.integers(0, 11), st.integers(1, 12))


@given(st.lists(pieces, min_size=1, max_size=10), st.sets(st.integers(0, 3), min_size=1))
def test_afterwards_the_survivors_hold_all_that_anybody_held(
    held: list[tuple[int, int, int]], doomed_ids: set[int]
) -> None:
    doomed = {SliceId(s) for s in doomed_ids}
    holdings = [
        holding(host(who), 4, (start, min(ROWS, start + length)), n=n)
        for n, (who, start, length) in enumerate(held)
    ]
    takers = [host(s) for s in range(4) if s not in doomed]
    plan = plan_evacuation(TREE, holdings, doomed=doomed, takers=takers)
    assert plan.lost == find_gaps(TREE, holdings)
    if not takers:
        assert plan.takes == {}
        return
    safe = [s.box for h in holdings for s in h.shards if h.host.slice not in doomed and s.leaf == 0]
    moved = moved_boxes(plan, 0)
    lost = [region.box for region in plan.lost if region.leaf == 0]
    assert not uncovered(whole((ROWS, 2)), [*safe, *moved, *lost])
    for index, box in enumerate(moved):
        others = [*safe, *moved[:index]]
        assert all(box.intersect(other) is None for other in others)
    for taker, parts in plan.takes.items():
        assert taker in takers
        for part in parts:
            assert part.source.host.slice in doomed
            for region in part.regions:
                boxes = [s.box for s in part.source.shards if s.leaf == region.leaf]
                assert any(box.contains(region.box) for box in boxes)
