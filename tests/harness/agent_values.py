"""Directives, holdings and joins as tests of the agent's decisions want them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step
from everstep.controller.api.wire import (
    Command,
    Directive,
    Member,
    MemberHost,
    Request,
    RequestKind,
    Settings,
)
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.manifest import Holding, Inventory, Shard
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec

ROWS = 12
TREE = TreeSpec(
    leaves=(
        Leaf(path=(Key(KeyKind.DICT, "w"),), kind=LeafKind.ARRAY, dtype="float32", shape=(ROWS, 2)),
        Leaf(path=(Key(KeyKind.DICT, "b"),), kind=LeafKind.ARRAY, dtype="float32", shape=()),
        Leaf(path=(Key(KeyKind.DICT, "none"),), kind=LeafKind.NONE),
    )
)
SETTINGS = Settings(
    checkpoint_uri="/run",
    checkpoint_every_steps=10,
    checkpoint_every_s=None,
    retention_latest=3,
    retention_every_steps=None,
    snapshot_every_steps=2,
    snapshot_slots=3,
    snapshot_bytes_max=None,
    snapshot_replicas=0,
    report_interval_s=1.0,
    report_timeout_s=5.0,
    progress_timeout_s=60.0,
    join_timeout_s=90.0,
    start_grace_s=120.0,
)


def host(slice_id: int, number: int = 0) -> HostId:
    return HostId(SliceId(slice_id), number)


def directive(
    incarnation: int,
    slices: Sequence[int],
    *,
    sequence: int | None = None,
    hosts: int = 1,
    command: Command = Command.RUN,
    request: Request | None = None,
    set_aside: Sequence[int] = (),
) -> Directive:
    members = tuple(
        Member(
            slice=SliceId(slice_id),
            rank=Rank(rank),
            hosts=tuple(
                MemberHost(host=number, address=f"10.0.{slice_id}.{number}", port=7070)
                for number in range(hosts)
            ),
        )
        for rank, slice_id in enumerate(slices)
    )
    return Directive(
        job="job",
        job_uid="uid-1",
        sequence=incarnation * 100 if sequence is None else sequence,
        incarnation=Incarnation(incarnation),
        command=command,
        members=members,
        lead=HostId(SliceId(slices[0]), 0) if slices else None,
        request=request,
        token=f"token-{incarnation}",
        settings=SETTINGS,
        restore_set_aside=tuple(map(Step, set_aside)),
    )


def leave(incarnation: int = 1, *, number: int = 1, doomed: Iterable[int] = ()) -> Request:
    return Request(
        id=f"{incarnation}-{number}",
        kind=RequestKind.LEAVE,
        doomed=tuple(map(SliceId, doomed)),
        deadline_s=1000.0,
    )


def holding(
    who: HostId, step: int, rows: tuple[int, int] = (0, ROWS), *, incarnation: int = 1, n: int = 0
) -> Holding:
    """Rows of `w`, and `b` whole."""
    start, stop = rows
    size = (stop - start) * 8
    return Holding(
        id=f"{who}-{incarnation}-{step}-{n}",
        step=Step(step),
        incarnation=Incarnation(incarnation),
        host=who,
        address=f"10.0.{who.slice}.{who.host}",
        port=7070,
        fingerprint=TREE.fingerprint,
        shards=(
            Shard(0, Box((start, 0), (stop, 2)), 0, size),
            Shard(1, Box((), ()), 64 * (1 + size // 64), 4),
        ),
    )


def inventory(*holdings: Holding) -> Inventory:
    return Inventory(holdings=holdings, trees={TREE.fingerprint: TREE} if holdings else {})
