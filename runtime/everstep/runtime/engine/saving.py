"""Captured steps on their way to storage, in a thread of each process.

The lead (process 0) begins the draft and commits; every process writes its own regions and says
so over the channel. No process waits for another on the training's thread, and none waits in the
background without a deadline that names who was missing.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from everstep.controller.api.ids import Incarnation
from everstep.runtime.checkpoint.clean import collect, drop
from everstep.runtime.checkpoint.commit import FilesItem, TreeItem, begin, commit_items, discard
from everstep.runtime.checkpoint.draft import write_regions
from everstep.runtime.checkpoint.retention import METADATA, RetentionRule, choose_dropped
from everstep.runtime.clock import Clock
from everstep.runtime.engine.parts import FilePart, Recorded
from everstep.runtime.engine.saved import CheckpointFailed, Saved
from everstep.runtime.engine.shares import (
    CapturedTree,
    Shares,
    host_of,
    layouts_key,
    packed,
    unpacked,
)
from everstep.runtime.engine.talk import PeerFailed, Talk
from everstep.runtime.engine.tiers import Committed, LocalCopies
from everstep.runtime.errors import (
    EverstepError,
    Fenced,
    InvariantViolated,
    PeerUnavailable,
    StateRefused,
)
from everstep.runtime.layout.manifest import Region, Shard
from everstep.runtime.layout.scalars import inline_extra
from everstep.runtime.snapshot.regions import region_array
from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.manifest import STATE
from everstep.runtime.storage.store import Store

_LEAD = 0

Regions = tuple[Region, ...]
Digests = dict[str, str]


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

    @property
    def key(self) -> str:
        return save_key(self.number)


class _Refused:
    """Stands in the queue for a step that this process refused."""


@dataclass(slots=True)
class _Written:
    """What processes have written of a step, by item."""

    regions: dict[str, list[tuple[int, Regions]]]
    files: dict[str, Digests]


def save_key(number: int) -> str:
    """Under which the processes speak of a save."""
    return f"save/{number}"


def refuse_save(talk: Talk, number: int, why: BaseException) -> None:
    """Tell the others of a save that this process refuses, wherever they wait for it."""
    key = save_key(number)
    talk.refuse(f"{key}/draft" if talk.leads else f"{key}/part/{talk.process}", why)
    talk.refuse(layouts_key(key, talk.process), why)


class Writer:
    """Writes captured steps one after the other. One thread; made by `Checkpoints`."""

    def __init__(
        self,
        store: Store,
        ledger: RunLedger,
        talk: Talk,
        clock: Clock,
        *,
        retention: RetentionRule,
        deadline_s: float,
        log: logging.Logger,
        local: LocalCopies | None = None,
    ) -> None:
        self._local = local
        self._store, self._ledger, self._talk, self._clock = store, ledger, talk, clock
        self._retention, self._deadline_s, self._log = retention, deadline_s, log
        self._queue: queue.SimpleQueue[CapturedStep | _Refused | None] = queue.SimpleQueue()
        self._shares = Shares(talk)
        self._at: str | None = None
        self._left_drafts: list[str] = []
        self._unfinished = 0
        self._changed = threading.Condition()
        self.unsaid: list[Saved] = []
        """Steps whose end nobody was told of yet."""
        self._thread = threading.Thread(target=self._run, name="everstep-save", daemon=True)
        self._thread.start()

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def put(self, captured: CapturedStep) -> None:
        with self._changed:
            self._unfinished += 1
            self.unsaid = [s for s in self.unsaid if not (s.done() and s.failure is None)]
            self.unsaid.append(captured.saved)
        self._queue.put(captured)

    def put_refused(self) -> None:
        """This process has refused a step, in its place among those that were put."""
        self._queue.put(_Refused())

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all that was put is decided and cleaned up after; False if it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished == 0, timeout_s)

    def end(self) -> None:
        """Let the thread end after what was put. Waits for nothing."""
        self._queue.put(None)

    def close(self, timeout_s: float) -> bool:
        """Finish what was put. False when that takes longer than `timeout_s`."""
        self.end()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # In the thread.

    def _run(self) -> None:
        while (captured := self._queue.get()) is not None:
            if isinstance(captured, _Refused):
                # The others fail this step, and plan the next one anew with all who hold it.
                self._shares.forget()
                continue
            failure: CheckpointFailed | None = None
            committed: Committed | None = None
            self._at = None
            try:
                committed = self._write(captured)
            except Exception as error:  # noqa: BLE001 - told at the next call, and by `wait`.
                why = self._why(error)
                failure = CheckpointFailed(captured.saved.step, why, self._at)
                failure.__cause__ = why
                self._shares.forget()
            if committed is not None and self._local is not None and self._local.is_due():
                self._local.write(captured.trees, committed, captured.release)
            else:
                captured.release()
            captured.saved.settle(failure)
            if failure is None:
                self._forget(captured.number - 2)
                if self._talk.leads:
                    self._clean()
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _why(self, error: Exception) -> Exception:
        """The error, or that another program has the run: it deletes a draft under its writer, who
        then misses files.
        """
        if isinstance(error, Fenced) or self._ledger.own_claim is None:
            return error
        try:
            self._ledger.verify_claim()
        except Fenced as fenced:
            fenced.__cause__ = error
            return fenced
        except EverstepError:
            return error  # Storage does not answer, which is what the error says.
        return error

    def _write(self, captured: CapturedStep) -> Committed:
        by_s = self._talk.deadline(self._deadline_s)
        if self._talk.leads:
            return self._lead(captured, by_s)
        return self._follow(captured, by_s)

    def _follow(self, captured: CapturedStep, by_s: float) -> Committed:
        key = captured.key
        own = f"{key}/part/{self._talk.process}"
        told = self._talk.hear(f"{key}/draft", by_s, "process 0 has not begun the step")
        try:
            if told["step"] != captured.saved.step:
                raise StateRefused(
                    "step",
                    f"{captured.saved.step} here, {told['step']} on process 0",
                    "the same on all processes",
                )
            written = self._write_parts(captured, str(told["draft"]), by_s)
        except Exception as error:
            self._talk.refuse(own, error)
            raise
        self._talk.tell(
            own,
            files=written.files,
            regions={name: packed(found[0][1]) for name, found in written.regions.items()},
        )
        told = self._talk.hear(f"{key}/done", by_s, "process 0 has not committed the step")
        return Committed(
            step=captured.saved.step,
            incarnation=Incarnation(told["incarnation"]),
            digest=str(told["digest"]),
        )

    def _lead(self, captured: CapturedStep, by_s: float) -> Committed:
        key = captured.key
        try:
            draft = self._begin(captured)
        except Exception as error:
            self._talk.refuse(f"{key}/draft", error)
            raise
        self._talk.tell(f"{key}/draft", step=captured.saved.step, draft=draft)
        failure: Exception | None = None
        written = _Written({}, {})
        try:
            written = self._write_parts(captured, draft, by_s)
        except Exception as error:  # noqa: BLE001 - raised below, when all others have stopped.
            failure = error
        missing = self._gather(captured, written, by_s)
        failure = failure or missing
        try:
            if failure is not None:
                raise failure
            commit = self._commit(captured, draft, written)
        except Exception as error:
            self._talk.refuse(f"{key}/done", error)
            self._left_drafts.append(draft)
            if missing is None or isinstance(missing, PeerFailed):
                self._discard_left()
            raise
        self._talk.tell(f"{key}/done", incarnation=commit.incarnation, digest=commit.digest)
        return Committed(
            step=captured.saved.step, incarnation=commit.incarnation, digest=commit.digest
        )

    def _begin(self, captured: CapturedStep) -> str:
        return begin(self._store, captured.saved.step, self._incarnation(), ledger=self._ledger)

    def _incarnation(self) -> Incarnation:
        """In whose name it is committed; `begin` and `commit_items` ask whether it still may."""
        claim = self._ledger.own_claim
        if claim is None:
            raise InvariantViolated("a step is written before its run was claimed")
        return claim.incarnation

    def _write_parts(self, captured: CapturedStep, draft: str, by_s: float) -> _Written:
        written = _Written({}, {})
        process = self._talk.process
        self._shares.plan(captured.trees, captured.key, by_s)
        for name, item in captured.trees.items():
            self._at = name
            written.regions[name] = [(process, self._write_tree(draft, name, item))]
        for name, part in captured.files.items():
            self._at = name
            if part.is_everywhere or self._talk.leads:
                written.files[name] = self._write_files(draft, name, part)
        self._at = None
        return written

    def _write_tree(self, draft: str, name: str, item: CapturedTree) -> Regions:
        plan = self._shares.of(name)
        by_leaf: dict[int, list[Shard]] = {}
        for shard in item.plot.shards:
            by_leaf.setdefault(shard.leaf, []).append(shard)

        def read(region: Region) -> NDArray[Any]:
            # Storage says which file it could not write; only here it is known what went into it.
            self._at = item.tree.leaves[region.leaf].name
            return region_array(item.memory, item.tree, by_leaf[region.leaf], region)

        regions = plan.regions.get(host_of(self._talk.process), ())
        write_regions(
            self._store,
            draft=draft,
            writer=self._talk.process,
            tree=item.tree,
            chunks=plan.chunks,
            regions=regions,
            read=read,
            item=name,
        )
        return regions

    def _write_files(self, draft: str, name: str, part: FilePart) -> Digests:
        recorded = Recorded(
            lambda path, data: self._store.write_durable(f"{draft}/{name}/{path}", data)
        )
        part.write(recorded)
        return recorded.digests

    def _gather(
        self, captured: CapturedStep, written: _Written, by_s: float
    ) -> PeerUnavailable | None:
        """Add what the others have written. Why not, when one of them failed or was missing.

        All are heard before anything is concluded: then nobody writes into the draft any more.
        """
        refused: list[str] = []
        missing: list[str] = []
        for process in self._talk.others:
            try:
                told = self._talk.hear(
                    f"{captured.key}/part/{process}",
                    by_s,
                    f"process {process} has not written its part",
                )
            except PeerFailed as error:
                refused.append(str(error))
                continue
            except PeerUnavailable as error:
                missing.append(str(error))
                continue
            for name, text in told["regions"].items():
                found: Regions = unpacked(text, Regions)
                written.regions.setdefault(name, []).append((process, found))
            for name, digests in told["files"].items():
                written.files.setdefault(name, {}).update(digests)
        if missing:
            return PeerUnavailable("; ".join((*missing, *refused)))
        return PeerFailed("; ".join(refused)) if refused else None

    def _commit(self, captured: CapturedStep, draft: str, written: _Written) -> Commit:
        items: dict[str, TreeItem | FilesItem] = {
            name: TreeItem(
                tree=item.tree,
                parts=[(w, r) for w, r in written.regions[name] if r or w == _LEAD],
                extra=inline_extra(item.tree),
            )
            for name, item in captured.trees.items()
        }
        for name, part in captured.files.items():
            items[name] = FilesItem(
                handler=part.handler, files=written.files[name], orbax_handler=part.orbax_handler
            )
        state = captured.trees.get(STATE)
        extra = dict(inline_extra(state.tree)) if state is not None else {}
        if captured.metadata is not None:
            extra[METADATA] = json.dumps(captured.metadata)
        return commit_items(
            self._store,
            self._ledger,
            draft=draft,
            step=captured.saved.step,
            incarnation=self._incarnation(),
            items=items,
            extra=extra,
            now_s=self._clock.unix_s(),
            custom=captured.metadata,
        )

    def _clean(self) -> None:
        """Old steps go after the new one exists; what fails here is no failure of the step."""
        try:
            self._discard_left()
            commits = self._ledger.commits()
            drop(
                self._store,
                self._ledger,
                choose_dropped(commits, self._retention, self._clock.unix_s()),
            )
            collect(self._store, self._ledger)
        except Exception as error:  # noqa: BLE001 - the thread goes on: later steps wait for it.
            self._log.warning("old steps of %s are left: %s", self._store.uri, error)

    def _discard_left(self) -> None:
        """Delete drafts that failed. Called when no process writes into one any more: each has
        said that it is done with it, or with a later step.
        """
        while self._left_drafts:
            try:
                discard(self._store, self._left_drafts[-1], ledger=self._ledger)
            except EverstepError as error:
                self._log.warning("a failed draft of %s is left: %s", self._store.uri, error)
                return
            self._left_drafts.pop()

    def _forget(self, number: int) -> None:
        """All have been told of a later save, so nobody asks for this one any more."""
        if number < 0 or not self._talk.leads:
            return
        key = save_key(number)
        for name in ("draft", "done", *(f"part/{process}" for process in self._talk.others)):
            self._talk.forget(f"{key}/{name}")
