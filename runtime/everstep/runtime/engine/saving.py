"""Captured steps on their way to storage, in a thread of each process.

The lead (process 0) begins the draft and commits; every process writes its own regions and says
so over the channel. No process waits for another on the training's thread, and none waits in the
background without a deadline that names who was missing.
"""

from __future__ import annotations

import base64
import json
import queue
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step
from everstep.runtime.checkpoint.clean import collect, drop
from everstep.runtime.checkpoint.commit import FilesItem, TreeItem, begin, commit_items
from everstep.runtime.checkpoint.draft import write_regions
from everstep.runtime.checkpoint.retention import METADATA, RetentionRule, choose_dropped
from everstep.runtime.clock import Clock
from everstep.runtime.engine.channel import Channel
from everstep.runtime.engine.parts import FilePart, Recorded
from everstep.runtime.errors import EverstepError, PeerUnavailable, StateRefused, check
from everstep.runtime.layout.manifest import Holding, Plot, Region, Shard
from everstep.runtime.layout.scalars import inline_extra
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.snapshot.regions import region_array
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.manifest import STATE
from everstep.runtime.storage.store import Store
from everstep.runtime.topology.ownership import WritePlan, plan_writes

_LEAD = 0
_ALONE = "engine"


class CheckpointFailed(EverstepError):
    """A captured step could not be written, so it does not exist. `step` says which."""

    def __init__(self, step: Step, why: BaseException) -> None:
        self.step = step
        first = str(why).strip().splitlines()
        words = f"{type(why).__name__}: {first[0] if first else 'no words'}"
        super().__init__(f"step {step} could not be saved: {words}")


class Saved:
    """A step on its way. It exists once `wait` has returned."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._done = threading.Event()
        self._failure: CheckpointFailed | None = None
        self.was_told = False
        """Whether somebody was told of the failure."""

    def done(self) -> bool:
        """Whether the step is committed, or has failed."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the commit.

        Raises:
            CheckpointFailed: the step does not exist; why.
            TimeoutError: it is not decided yet.

        Durability: on return the step exists.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"step {self.step} is not committed after {timeout_s:g} s")
        if self._failure is not None:
            self.was_told = True
            raise self._failure

    @property
    def failure(self) -> CheckpointFailed | None:
        return self._failure

    def settle(self, failure: CheckpointFailed | None) -> None:
        self._failure = failure
        self._done.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTree:
    """One item's arrays in this process's memory."""

    tree: TreeSpec
    plot: Plot
    memory: NDArray[np.uint8]
    layout: int
    """Counts the layouts that this item has had; equal on all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    number: int
    """Counts the saves; equal on all processes."""
    saved: Saved
    trees: Mapping[str, CapturedTree]
    files: Mapping[str, FilePart]
    metadata: Any
    release: Callable[[], None]
    """Gives the memory back."""


class Writer:
    """Writes captured steps one after the other. One thread; made by `Checkpoints`."""

    def __init__(
        self,
        store: Store,
        ledger: RunLedger,
        channel: Channel,
        clock: Clock,
        *,
        retention: RetentionRule,
        deadline_s: float,
    ) -> None:
        self._store, self._ledger, self._channel, self._clock = store, ledger, channel, clock
        self._retention, self._deadline_s = retention, deadline_s
        self._queue: queue.SimpleQueue[CapturedStep | None] = queue.SimpleQueue()
        self._plans: dict[str, tuple[int, WritePlan]] = {}
        self._told: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="everstep-save", daemon=True)
        self._thread.start()

    def put(self, captured: CapturedStep) -> None:
        self._queue.put(captured)

    def close(self, timeout_s: float | None) -> bool:
        """Finish what was put. False when that took longer than `timeout_s`."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def _leads(self) -> bool:
        return self._channel.process == _LEAD

    def _run(self) -> None:
        while (captured := self._queue.get()) is not None:
            failure: CheckpointFailed | None = None
            try:
                self._write(captured)
            except Exception as error:  # noqa: BLE001 - told at the next call, and by `wait`.
                failure = CheckpointFailed(captured.saved.step, error)
                failure.__cause__ = error
            captured.release()
            captured.saved.settle(failure)

    def _write(self, captured: CapturedStep) -> None:
        key = f"save/{captured.number}"
        by_s = self._clock.monotonic_s() + self._deadline_s
        draft = self._begin(captured, key)
        files: dict[str, dict[str, str]] = {}
        regions: dict[str, tuple[Region, ...]] = {}
        try:
            for name, item in captured.trees.items():
                regions[name] = self._write_tree(draft, name, item, by_s)
            for name, part in captured.files.items():
                if part.is_everywhere or self._leads:
                    files[name] = self._write_files(draft, name, part)
        except Exception as error:
            self._tell(f"{key}/part/{self._channel.process}", error=str(error))
            raise
        if not self._leads:
            self._tell(
                f"{key}/part/{self._channel.process}",
                files=files,
                regions={name: _packed(found) for name, found in regions.items()},
            )
            self._hear(f"{key}/done", by_s, "process 0 has not committed the step")
        else:
            self._finish(captured, key, draft, regions, files, by_s)
        self._forget(captured.number - 2)

    def _begin(self, captured: CapturedStep, key: str) -> str:
        step = captured.saved.step
        if not self._leads:
            told = self._hear(
                f"{key}/draft",
                self._clock.monotonic_s() + self._deadline_s,
                "process 0 has not begun the step",
            )
            if told["step"] != step:
                raise StateRefused(
                    "step", f"{step} here, {told['step']} on process 0", "the same on all processes"
                )
            return str(told["draft"])
        try:
            claim = self._ledger.own_claim
            check(claim is not None, "a step is written before the run was claimed")
            incarnation = claim.incarnation if claim is not None else Incarnation(0)
            draft = begin(self._store, step, incarnation, ledger=self._ledger)
        except Exception as error:
            self._tell(f"{key}/draft", error=str(error))
            raise
        self._tell(f"{key}/draft", step=step, draft=draft)
        return draft

    def _write_tree(
        self, draft: str, name: str, item: CapturedTree, by_s: float
    ) -> tuple[Region, ...]:
        plan = self._plan(name, item, by_s)
        own = host_of(self._channel.process)
        by_leaf: dict[int, list[Shard]] = {}
        for shard in item.plot.shards:
            by_leaf.setdefault(shard.leaf, []).append(shard)

        def read(region: Region) -> NDArray[Any]:
            return region_array(item.memory, item.tree, by_leaf[region.leaf], region)

        regions = plan.regions.get(own, ())
        write_regions(
            self._store,
            draft=draft,
            writer=self._channel.process,
            tree=item.tree,
            chunks=plan.chunks,
            regions=regions,
            read=read,
            item=name,
        )
        return regions

    def _plan(self, name: str, item: CapturedTree, by_s: float) -> WritePlan:
        """Who writes what: every process computes it, from what all hold."""
        known = self._plans.get(name)
        if known is not None and known[0] == item.layout:
            return known[1]
        holdings = [_holding(self._channel.process, item.tree, item.plot.shards)]
        key = f"layout/{name}/{item.layout}"
        fingerprint = item.tree.fingerprint
        if self._channel.process_count > 1:
            self._tell(
                f"{key}/{self._channel.process}",
                tree=fingerprint,
                shards=_packed(item.plot.shards),
            )
        for process in range(self._channel.process_count):
            if process == self._channel.process:
                continue
            told = self._hear(f"{key}/{process}", by_s, f"process {process} has not saved {name}")
            if told["tree"] != fingerprint:
                raise StateRefused(
                    name, f"another tree on process {process}", "the same tree on all processes"
                )
            shards = _unpacked(str(told["shards"]), tuple[Shard, ...])
            holdings.append(_holding(process, item.tree, shards))
        plan = plan_writes(item.tree, sorted(holdings, key=lambda one: one.host))
        self._plans[name] = item.layout, plan
        return plan

    def _write_files(self, draft: str, name: str, part: FilePart) -> dict[str, str]:
        recorded = Recorded(
            lambda path, data: self._store.write_durable(f"{draft}/{name}/{path}", data)
        )
        part.write(recorded)
        return recorded.digests

    def _finish(
        self,
        captured: CapturedStep,
        key: str,
        draft: str,
        regions: Mapping[str, tuple[Region, ...]],
        files: dict[str, dict[str, str]],
        by_s: float,
    ) -> None:
        parts: dict[str, list[tuple[int, tuple[Region, ...]]]] = {
            name: [(_LEAD, found)] for name, found in regions.items()
        }
        try:
            for process in range(1, self._channel.process_count):
                told = self._hear(
                    f"{key}/part/{process}", by_s, f"process {process} has not written its part"
                )
                for name, packed in told["regions"].items():
                    found = _unpacked(packed, tuple[Region, ...])
                    parts[name].append((process, found))
                for name, digests in told["files"].items():
                    files.setdefault(name, {}).update(digests)
            self._commit(captured, draft, parts, files)
        except Exception as error:
            self._tell(f"{key}/done", error=str(error))
            raise
        self._tell(f"{key}/done")
        self._retain()

    def _commit(
        self,
        captured: CapturedStep,
        draft: str,
        parts: Mapping[str, list[tuple[int, tuple[Region, ...]]]],
        files: Mapping[str, dict[str, str]],
    ) -> None:
        items: dict[str, TreeItem | FilesItem] = {
            name: TreeItem(
                tree=item.tree,
                parts=[(w, r) for w, r in parts[name] if r or w == _LEAD],
                extra=inline_extra(item.tree),
            )
            for name, item in captured.trees.items()
        }
        for name, part in captured.files.items():
            items[name] = FilesItem(
                handler=part.handler, files=files[name], orbax_handler=part.orbax_handler
            )
        state = captured.trees.get(STATE)
        extra = dict(inline_extra(state.tree)) if state is not None else {}
        if captured.metadata is not None:
            extra[METADATA] = json.dumps(captured.metadata)
        claim = self._ledger.verify_claim()
        commit_items(
            self._store,
            self._ledger,
            draft=draft,
            step=captured.saved.step,
            incarnation=claim.incarnation,
            items=items,
            extra=extra,
            now_s=self._clock.unix_s(),
            custom=captured.metadata,
        )

    def _retain(self) -> None:
        """Old steps go after the new one exists; what fails here is no failure of the step."""
        dropped = choose_dropped(self._ledger.commits(), self._retention, self._clock.unix_s())
        drop(self._store, self._ledger, dropped)
        collect(self._store, self._ledger)

    # The channel.

    def _tell(self, key: str, **fields: Any) -> None:
        self._channel.put(key, json.dumps(fields))

    def _hear(self, key: str, by_s: float, otherwise: str) -> dict[str, Any]:
        left_s = max(0.1, by_s - self._clock.monotonic_s())
        try:
            told: dict[str, Any] = json.loads(self._channel.get(key, left_s))
        except PeerUnavailable as error:
            raise PeerUnavailable(f"{otherwise} ({error})") from error
        if "error" in told:
            raise PeerUnavailable(f"{key.rpartition('/')[2]}: {told['error']}")
        return told

    def _forget(self, number: int) -> None:
        """All have been told of a later save, so nobody asks for this one any more."""
        if number < 0 or not self._leads or self._channel.process_count == 1:
            return
        for name in ("draft", "done"):
            self._channel.forget(f"save/{number}/{name}")
        for process in range(1, self._channel.process_count):
            self._channel.forget(f"save/{number}/part/{process}")


def host_of(process: int) -> HostId:
    return HostId(SliceId(0), process)


def _holding(process: int, tree: TreeSpec, shards: tuple[Shard, ...]) -> Holding:
    return Holding(
        id=_ALONE,
        step=Step(0),
        incarnation=Incarnation(0),
        host=host_of(process),
        address="",
        port=0,
        fingerprint=tree.fingerprint,
        shards=shards,
    )


def _packed(values: tuple[Any, ...]) -> str:
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(values), 1)).decode()


def _unpacked(text: str, kind: Any) -> Any:
    return msgspec.msgpack.decode(zlib.decompress(base64.b64decode(text)), type=kind)
