"""A keeper whose steps lie in a local folder: what a training without an agent has.

The state is copied at a step boundary, and a thread writes the copy while training goes on. The
format and the commit protocol are those of a run under agents.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step
from everstep.runtime.agent.link import Source
from everstep.runtime.checkpoint.clean import collect, drop
from everstep.runtime.checkpoint.commit import begin, commit
from everstep.runtime.checkpoint.draft import write_regions
from everstep.runtime.checkpoint.retention import choose_dropped
from everstep.runtime.clock import Clock
from everstep.runtime.engine.placement import with_shardings
from everstep.runtime.engine.state import flatten, reflatten
from everstep.runtime.errors import CheckpointInvalid, EverstepError, InvariantViolated
from everstep.runtime.layout.flat import FlatState
from everstep.runtime.layout.manifest import Holding, Plot, Region, Shard
from everstep.runtime.layout.scalars import inline_extra
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.loop.ending import line_of
from everstep.runtime.loop.keeper import Facts
from everstep.runtime.loop.linked import RESTORE_BYTES_IN_FLIGHT
from everstep.runtime.restore.assemble import restore_state
from everstep.runtime.snapshot.capture import CapturePlan, PlotOutdated
from everstep.runtime.snapshot.regions import region_array, shard_array
from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.store import Store
from everstep.runtime.topology.ownership import plan_writes

JOB = "alone"
HOST = HostId(SliceId(0), 0)
BUFFERS = 2
KEPT_LATEST = 3
WRITE_TIMEOUT_S = 1800.0


class CheckpointFailed(EverstepError):
    """A captured step could not be written, so it does not exist. `step` says which."""

    def __init__(self, step: Step, why: BaseException) -> None:
        self.step = step
        super().__init__(f"step {step} could not be saved: {line_of(why)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Keeps the newest few; see `checkpoint.retention`."""

    latest: int = KEPT_LATEST
    every_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to restore, for `restore.assemble`."""

    incarnation: Incarnation
    restore_step: Step
    storage: Source
    host: HostId = HOST
    token: str = ""
    holdings: tuple[Holding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A captured state on its way to storage."""

    step: Step
    tree: TreeSpec
    plot: Plot
    memory: NDArray[np.uint8]
    extra: Mapping[str, str]


class FolderKeeper:
    """Implements `Keeper` over a local folder. One training at a time: the newer one wins."""

    def __init__(self, uri: str, clock: Clock) -> None:
        """Claim the folder.

        Raises:
            StorageRefused: it cannot be written, or holds something that is no run.
            Fenced: another job has it.
        """
        self.failure: BaseException | None = None
        self._uri = uri
        self._clock = clock
        self._store: Store = open_store(uri)
        self._ledger = RunLedger(self._store)
        self._ledger.refresh()
        self._incarnation = Incarnation((self._ledger.newest_incarnation or 0) + 1)
        self._ledger.claim(self._incarnation, JOB)
        self._commits: tuple[Commit, ...] = self._ledger.commits()
        self._before: FlatState | None = None
        self._plan: CapturePlan | None = None
        self._free: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        self._copied: queue.SimpleQueue[Copied | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_all, name="everstep-save", daemon=True)
        self._writer.start()

    @property
    def facts(self) -> Facts:
        return Facts(
            incarnation=self._incarnation,
            host=HOST,
            rank=Rank(0),
            process_count=1,
            slices=(HOST.slice,),
            restored_step=self._commits[-1].step if self._commits else None,
        )

    def restore(
        self, abstract: Any, shardings: list[Any], build_fresh: Callable[[], Any]
    ) -> tuple[Any, Step | None]:
        """See `Keeper.restore`. A damaged checkpoint is passed over for the next older one."""
        if not self._commits:
            state, step = build_fresh(), None
            sys.stderr.write(f"everstep: a fresh start; checkpoints go to {self._uri}\n")
        else:
            state, step = self._restore_newest(flatten(with_shardings(abstract, shardings)))
            sys.stderr.write(f"everstep: resumed at step {step} from {self._uri}\n")
        self._divide(flatten(state))
        return state, step

    def _restore_newest(self, like: FlatState) -> tuple[Any, Step]:
        for found in reversed(self._commits):
            order = Order(
                incarnation=self._incarnation,
                restore_step=found.step,
                storage=Source(uri=self._uri, step=found.step),
            )
            try:
                restored = restore_state(
                    like,
                    None,
                    assignment=order,
                    own_slots={},
                    memory_bytes=RESTORE_BYTES_IN_FLIGHT,
                )
            except CheckpointInvalid as error:
                # Never a fresh start: a checkpoint that cannot be read is not one that is absent.
                if found is self._commits[0]:
                    raise
                sys.stderr.write(f"everstep: step {found.step} is passed over: {line_of(error)}\n")
                continue
            return restored.state, found.step
        raise InvariantViolated("a restore from a folder without commits")

    def _divide(self, flat: FlatState) -> CapturePlan:
        plan = CapturePlan(flat)
        self._before, self._plan = flat.without_values(), plan
        self._free = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put(np.zeros(plan.plot.size_bytes, np.uint8))
        return plan

    def capture(self, step: Step, state: Any, *, is_required: bool) -> bool:
        """See `Keeper.capture`. Waits while two earlier steps are still being written.

        Nothing is skipped: a checkpoint that is due is the only copy that there will be.
        """
        del is_required
        if self._before is None or self._plan is None:
            raise InvariantViolated("a state was captured before run.restore")
        flat = reflatten(state, self._before)
        plan = self._plan
        try:
            plan.check_layout(flat)
        except PlotOutdated:
            plan = self._divide(flat)
        try:
            memory = self._free.get(timeout=WRITE_TIMEOUT_S)
        except queue.Empty:
            raise CheckpointFailed(
                step, TimeoutError(f"storage took more than {WRITE_TIMEOUT_S:g} s for two steps")
            ) from None
        plan.capture(flat, [shard_array(memory, plan.plot.tree, s) for s in plan.plot.shards])
        self._copied.put(
            Copied(
                step=step,
                tree=flat.tree,
                plot=plan.plot,
                memory=memory,
                extra=inline_extra(flat.tree),
            )
        )
        return True

    def note_first_step(self, step: Step) -> None:
        """See `Keeper.note_first_step`."""

    def name_metrics(self, names: tuple[str, ...]) -> None:
        """See `Keeper.name_metrics`."""

    def close(self) -> None:
        """Wait until what was captured is durable.

        Raises:
            CheckpointFailed: a step could not be written, and `train` had not been told yet.
        """
        self._copied.put(None)
        self._writer.join()
        if self.failure is not None and sys.exc_info()[1] is None:
            raise self.failure

    def _write_all(self) -> None:
        while (copied := self._copied.get()) is not None:
            try:
                self._write(copied)
            except Exception as error:  # noqa: BLE001 - raised in the training's thread.
                failed = CheckpointFailed(copied.step, error)
                failed.__cause__ = error
                self.failure = failed
            self._free.put(copied.memory)

    def _write(self, copied: Copied) -> None:
        tree, shards = copied.tree, copied.plot.shards
        by_leaf: dict[int, list[Shard]] = {}
        for shard in shards:
            by_leaf.setdefault(shard.leaf, []).append(shard)

        def read(region: Region) -> NDArray[Any]:
            return region_array(copied.memory, tree, by_leaf[region.leaf], region)

        holding = Holding(
            id=JOB,
            step=copied.step,
            incarnation=self._incarnation,
            host=HOST,
            address="",
            port=0,
            fingerprint=tree.fingerprint,
            shards=shards,
        )
        plan = plan_writes(tree, [holding])
        regions = plan.regions.get(HOST, ())
        draft = begin(self._store, copied.step, self._incarnation, ledger=self._ledger)
        write_regions(
            self._store,
            draft=draft,
            writer=0,
            tree=tree,
            chunks=plan.chunks,
            regions=regions,
            read=read,
        )
        commit(
            self._store,
            self._ledger,
            draft=draft,
            step=copied.step,
            incarnation=self._incarnation,
            tree=tree,
            parts=[(0, regions)],
            extra=copied.extra,
            now_s=self._clock.unix_s(),
        )
        dropped = choose_dropped(self._ledger.commits(), Retention(), self._clock.unix_s())
        drop(self._store, self._ledger, dropped)
        collect(self._store, self._ledger)
