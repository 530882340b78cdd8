"""Who writes what: every process computes it, from what all of them hold."""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step
from everstep.runtime.engine.talk import Talk
from everstep.runtime.errors import StateRefused
from everstep.runtime.layout.manifest import Holding, Plot, Shard
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.topology.ownership import WritePlan, plan_writes


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTree:
    """One item's arrays in this process's memory."""

    tree: TreeSpec
    plot: Plot
    memory: NDArray[np.uint8]
    layout: int
    """Counts the layouts that this item has had; equal on all processes."""


class Shares:
    """The plans of one run's items. What a process holds is told once a layout."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._plans: dict[str, tuple[int, WritePlan]] = {}

    def plan(self, name: str, item: CapturedTree, by_s: float) -> WritePlan:
        """Divide the writing of an item.

        Raises:
            StateRefused: another process has another tree.
            PeerUnavailable: another process has not told by `by_s`; names it.
        """
        known = self._plans.get(name)
        if known is not None and known[0] == item.layout:
            return known[1]
        talk = self._talk
        holdings = [_holding(talk.process, item.tree, item.plot.shards)]
        key = f"layout/{name}/{item.layout}"
        fingerprint = item.tree.fingerprint
        talk.tell(f"{key}/{talk.process}", tree=fingerprint, shards=packed(item.plot.shards))
        for process in talk.others:
            told = talk.hear(f"{key}/{process}", by_s, f"process {process} has not saved {name}")
            if told["tree"] != fingerprint:
                raise StateRefused(
                    name, f"another tree on process {process}", "the same tree on all processes"
                )
            shards = unpacked(str(told["shards"]), tuple[Shard, ...])
            holdings.append(_holding(process, item.tree, shards))
        plan = plan_writes(item.tree, sorted(holdings, key=lambda one: one.host))
        self._plans[name] = item.layout, plan
        return plan


def host_of(process: int) -> HostId:
    """A process, as the planner of writes and reads calls it."""
    return HostId(SliceId(0), process)


def _holding(process: int, tree: TreeSpec, shards: tuple[Shard, ...]) -> Holding:
    return Holding(
        id="engine",
        step=Step(0),
        incarnation=Incarnation(0),
        host=host_of(process),
        address="",
        port=0,
        fingerprint=tree.fingerprint,
        shards=shards,
    )


def packed(values: tuple[Any, ...]) -> str:
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(values), 1)).decode()


def unpacked(text: str, kind: Any) -> Any:
    return msgspec.msgpack.decode(zlib.decompress(base64.b64decode(text)), type=kind)
