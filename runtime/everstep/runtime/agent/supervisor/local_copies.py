"""This host's local tier: its snapshots on its own disk, and what it offers of them at a join.

After all agents of a job are gone, and all memory with them, each host still has its newest steps
here. They are offered like memory; which step is whole, and whether a commit has overtaken it, the
lead decides (`rendezvous`, R2 to R5). Every block is verified by whoever reads it.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from everstep.controller.api.ids import Incarnation, Step
from everstep.controller.api.wire import Settings
from everstep.runtime.agent.supervisor.scope import Scope
from everstep.runtime.disk.copies import LocalBytes, LocalCopy, find_copies
from everstep.runtime.disk.tier import Content, DiskTier
from everstep.runtime.errors import EverstepError
from everstep.runtime.layout.manifest import Holding, Inventory, SnapshotManifest
from everstep.runtime.storage.manifest import STATE

if TYPE_CHECKING:
    from everstep.runtime.agent.supervisor.host import Host
    from everstep.runtime.agent.supervisor.snapshots import Snapshots

LOOK_S = 10.0
VERIFY_S = 300.0
"""So long a join waits for the disk: to say what it has, and to read it all."""


class LocalCopies:
    """All of it is the event loop's, but for `_find` and `_write`, which run in threads."""

    def __init__(self, host: Host, path: str, settings: Settings, snapshots: Snapshots) -> None:
        self._host, self._path, self._snapshots = host, path, snapshots
        own = host.options.host
        # Another folder of checkpoints is another past.
        self._run = f"{host.options.job_uid} {settings.checkpoint_uri}"
        self._tier = DiskTier(
            path,
            run=self._run,
            owner=f"host-{own.slice}-{own.host}",
            latest=settings.local_latest,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-copies")
        self._offered: dict[str, tuple[LocalBytes, SnapshotManifest]] = {}
        self._offers = 0
        self._give_up = threading.Event()
        self._is_writing = False
        self._said: str | None = None

    # What the disk has.

    async def offer_beside(self, inventory: Inventory) -> Inventory:
        """An inventory, and what this disk has besides; what cannot be read is left out.

        Blocking: a disk that does not answer is waited for `LOOK_S` at most.
        """
        # What an incarnation that came to nothing was offered is read through before it is
        # offered again; otherwise whoever restores finds out, and no join waits for that.
        is_suspect = bool(self._offered)
        limit_s = VERIFY_S if is_suspect else LOOK_S
        self._forget()
        try:
            async with asyncio.timeout(limit_s):
                found = await asyncio.to_thread(self._find, is_suspect)
        except TimeoutError:
            why = f"{self._path}: no answer within {limit_s:g} s"
            self._host.log.warning("a local copy is passed over", why=why)
            return inventory
        holdings, trees = list(inventory.holdings), dict(inventory.trees)
        options = self._host.options
        for copy, opened in found:
            manifest = opened.manifest()
            tree = manifest.plot.tree
            self._offers += 1
            id_ = f"local-{self._offers}"
            self._offered[id_] = opened, manifest
            trees.setdefault(tree.fingerprint, tree)
            holdings.append(
                Holding(
                    id=id_,
                    step=copy.record.step,
                    incarnation=copy.record.incarnation,
                    host=options.host,
                    address=options.address,
                    port=options.port,
                    fingerprint=tree.fingerprint,
                    shards=manifest.plot.shards,
                    is_local=True,
                )
            )
        return Inventory(holdings=tuple(holdings), trees=trees)

    def _find(self, is_suspect: bool) -> list[tuple[LocalCopy, LocalBytes]]:
        """Also copies of other hosts: a host may have been another one on this machine."""
        # One that is being written just now is none yet, and nothing is wrong with it.
        log = self._host.log.info if self._is_writing else self._host.log.warning
        try:
            copies, passed = find_copies(self._path, self._run)
        except EverstepError as error:
            copies, passed = (), (str(error),)
        found: list[tuple[LocalCopy, LocalBytes]] = []
        for copy in copies:
            try:
                opened = copy.open(STATE)
            except (EverstepError, KeyError) as error:
                passed = (*passed, str(error))
                continue
            try:
                if is_suspect:
                    opened.verify()
            except EverstepError as error:
                opened.close()
                passed = (*passed, str(error))
            else:
                found.append((copy, opened))
        for words in passed:
            log("a local copy is passed over", why=words)
        return found

    def _forget(self) -> None:
        """Give up what was offered: deleted files that are open still take room."""
        for opened, _ in self._offered.values():
            opened.close()
        self._offered = {}

    def has(self, holding_id: str) -> bool:
        """Whether a holding is one of this disk, still open."""
        return holding_id in self._offered

    def manifest(self, holding_id: str) -> SnapshotManifest:
        return self._offered[holding_id][1]

    def fd(self, holding_id: str) -> int:
        return self._offered[holding_id][0].fd

    # Writing.

    async def keep_writing(self, scope: Scope) -> None:
        """Copy what is due of the snapshots, for as long as the incarnation lives.

        All members snapshot the same steps, so the same are due on all. A disk that is slower
        than that leaves some out.
        """
        every = scope.directive.settings.local_every_steps
        restored = scope.assignment.restore_step if scope.assignment is not None else None
        last = seen = restored or Step(0)
        while True:
            seen = await self._snapshots.wait_newer(seen)
            # Every member has restored, or its collectives would not have come this far.
            self._forget()
            if every is not None and seen // every <= last // every:
                continue
            last = seen
            self._give_up.clear()
            step, durable = seen, self._host.session.step_committed
            failure = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._write, step, scope.incarnation, durable
            )
            self._snapshots.grant()
            self._say(failure)

    def _write(self, step: Step, incarnation: Incarnation, durable: Step | None) -> str | None:
        """In the thread: the pin ends with it, also when the incarnation has. Why it failed."""
        self._is_writing = True
        try:
            return self._write_newest(step, incarnation, durable)
        finally:
            self._is_writing = False

    def _write_newest(
        self, step: Step, incarnation: Incarnation, durable: Step | None
    ) -> str | None:
        shelf = self._snapshots.shelf
        with ExitStack() as pins:
            for id_, manifest in shelf.manifests():
                if (manifest.step, manifest.incarnation) == (step, incarnation):
                    try:
                        pins.enter_context(shelf.pin(id_))
                        memory = np.frombuffer(shelf.view(id_), np.uint8)
                    except KeyError:
                        continue
                    break
            else:
                # Later snapshots have taken its memory: the next one is copied.
                return None
            content = Content(
                plot=manifest.plot, memory=memory, extra=manifest.extra, crcs=manifest.crcs
            )
            try:
                self._tier.write(
                    {STATE: content},
                    step=step,
                    incarnation=incarnation,
                    host=self._host.options.host,
                    digest="",
                    step_durable=durable,
                    is_wanted=lambda: not self._give_up.is_set(),
                )
            except EverstepError as error:
                return None if self._give_up.is_set() else str(error)
        return None

    def _say(self, failure: str | None) -> None:
        """Once, until it works again or something else is wrong."""
        if failure is not None and failure != self._said:
            self._host.log.warning("local copies are not written", path=self._path, why=failure)
        self._said = failure

    def yield_slots(self) -> None:
        """Give up a copy that is under way: a request needs its slot."""
        self._give_up.set()

    def close(self) -> None:
        self._give_up.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._forget()
