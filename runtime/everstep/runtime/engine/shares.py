"""Who writes what: every process computes it, from what all of them hold."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
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
    """Counts the layouts that this item has had."""


class Shares:
    """The plans of one run's items. What a process holds is told once a layout."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._plans: dict[str, tuple[int, WritePlan]] = {}

    def plan(self, trees: Mapping[str, CapturedTree], key: str, by_s: float) -> None:
        """Divide the writing of a step's items.

        Args:
            trees: the items.
            key: of the save. A process that refuses the save says so there, instead of what it
                holds.
            by_s: until when the others are waited for.

        Raises:
            StateRefused: another process has another tree.
            PeerUnavailable: another process refuses, or has not told by `by_s`; names it.
        """
        new = {
            name: item
            for name, item in trees.items()
            if name not in self._plans or self._plans[name][0] != item.layout
        }
        if not new:
            return
        talk = self._talk
        talk.tell(
            layouts_key(key, talk.process),
            items={
                name: [item.tree.fingerprint, packed(item.plot.shards)]
                for name, item in new.items()
            },
        )
        holdings = {
            name: [_holding(talk.process, item.tree, item.plot.shards)]
            for name, item in new.items()
        }
        for process in talk.others:
            words = f"process {process} has not saved the step"
            told = talk.hear(layouts_key(key, process), by_s, words)["items"]
            for name, item in new.items():
                fingerprint, shards = told.get(name, (None, ""))
                if fingerprint != item.tree.fingerprint:
                    raise StateRefused(
                        name, f"another tree on process {process}", "the same on all processes"
                    )
                held: tuple[Shard, ...] = unpacked(str(shards), tuple[Shard, ...])
                holdings[name].append(_holding(process, item.tree, held))
        for name, item in new.items():
            found = sorted(holdings[name], key=lambda one: one.host)
            self._plans[name] = item.layout, plan_writes(item.tree, found)

    def of(self, name: str) -> WritePlan:
        """Who writes what of an item that was planned."""
        return self._plans[name][1]

    def forget(self) -> None:
        """After a step that failed, on all processes: the next one is planned anew by all."""
        self._plans.clear()


def layouts_key(save: str, process: int) -> str:
    """Under which a process says what it holds, where that is new."""
    return f"{save}/layouts/{process}"


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
