"""`es.Checkpoints`: states of any JAX program to storage and back, with no job and no agents."""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.checkpoint.foreign import foreign_steps, open_foreign
from everstep.runtime.checkpoint.retention import METADATA
from everstep.runtime.clock import Clock, SystemClock
from everstep.runtime.engine import checks
from everstep.runtime.engine.capturing import Capturer, Planned, stored_bytes
from everstep.runtime.engine.channel import open_channel
from everstep.runtime.engine.ending import finish_at_exit
from everstep.runtime.engine.options import LocalTier, Retention, StepMetadata, as_tier
from everstep.runtime.engine.parts import FilePart, as_parts, file_part, fingerprint
from everstep.runtime.engine.restoring import Restoring
from everstep.runtime.engine.saved import CheckpointFailed, Saved
from everstep.runtime.engine.saving import CapturedStep, Writer, refuse_save
from everstep.runtime.engine.talk import Talk
from everstep.runtime.engine.tiers import LocalCopies
from everstep.runtime.errors import ConfigurationError
from everstep.runtime.restore.options import EVERYTHING, Initialiser, RestoreOptions
from everstep.runtime.storage.foreign_steps import ItemKind
from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.reader import read_manifest

JOB = "alone"
"""Whose run it is in the ledger: a later program over the same folder takes it over."""
DEADLINE_S = 1800.0
MEMORY_BYTES = 1 << 30
log = logging.getLogger("everstep")
_spoken: Counter[str] = Counter()
"""How often a run was opened for more than a look at its steps, by address."""


class Checkpoints:
    """The checkpoints of one run, in a folder or a bucket.

    Under several processes `save`, `restore` and `wait` are called by all of them alike, as every
    computation is; `steps`, `latest` and `metadata` by any. Any thread, one at a time.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        retention: Retention | None = None,
        memory_bytes: int = MEMORY_BYTES,
        deadline_s: float = DEADLINE_S,
        local: str | os.PathLike[str] | LocalTier | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Open a run. Nothing is written before the first save, so readers disturb nobody.

        Args:
            uri: an absolute or relative path, `file:///folder`, `gs://bucket/folder`.
            retention: which steps stay; the newest three when not given.
            memory_bytes: bound of what a restore has in flight.
            deadline_s: of every wait for another process or for storage.
            local: a folder on this host's own disk. Each process keeps there what it holds of the
                newest step, and reads it instead of the run where the two are the same.
            clock: another one for tests.

        Raises:
            ConfigurationError: an address that cannot be used.
            StorageRefused: a file is where the folder should be.
        """
        text = os.fspath(uri)
        self.uri = text if "://" in text else os.path.abspath(os.path.expanduser(text))
        if deadline_s <= 0:
            raise ConfigurationError("deadline_s", deadline_s, "more than 0 seconds")
        if memory_bytes <= 0:
            raise ConfigurationError("memory_bytes", memory_bytes, "more than 0 bytes")
        self._store = open_store(self.uri)
        self._ledger = RunLedger(self._store)
        # To look at, by any thread: what was read of it is not read again.
        self._seen = RunLedger(self._store)
        self._clock = clock or SystemClock()
        self._retention = retention or Retention()
        self._memory_bytes, self._deadline_s = memory_bytes, deadline_s
        self._local_tier = None if local is None else as_tier(local)
        self._copies: LocalCopies | None = None
        self._capturer = Capturer(deadline_s)
        self._opened: Talk | None = None
        self._writer: Writer | None = None
        self._saves = self._restores = 0
        self._step_least: int | None = None
        self._step_highest = -1
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointFailed as failed:
            if error is None:
                raise
            # The program's own error goes first; this one is not lost either.
            error.add_note(f"everstep: {failed}")

    def save(self, step: int, state: Any, *, metadata: Mapping[str, Any] | None = None) -> Saved:
        """Copy a state and write it in the background.

        Args:
            step: greater than that of the last save; not less than that of the last restore.
            state: a tree of arrays and plain values, or `es.Parts`.
            metadata: JSON that travels with the step and can be read without it.

        Returns:
            The step on its way; `wait()` on it for the commit.

        Raises:
            CheckpointFailed: an earlier step could not be written; said once.
            StateRefused: a leaf cannot be stored; names it.
            ConfigurationError: the step is not a later one; several processes that have no
                coordination service.
            StorageRefused: the folder cannot be written, is too small, or is no run.
            Fenced: another program has the run.

        Durability: none on return; the step exists once `Saved.wait` has returned.
        Blocking: for the copy to host memory, and for memory while earlier steps are written.
        """
        with self._lock:
            self._check_usable()
            number = self._saves
            self._saves += 1
            try:
                return self._save(number, step, state, metadata)
            except BaseException as error:
                # Every call has its number on every process, so nobody waits for this one.
                if self._opened is not None:
                    refuse_save(self._opened, number, error)
                if self._writer is not None:
                    self._writer.put_refused()
                raise

    def _save(
        self, number: int, step: int, state: Any, metadata: Mapping[str, Any] | None
    ) -> Saved:
        talk = self._talk()
        self._raise_failures()
        checks.check_step(step, self._step_least)
        note = checks.json_of(metadata)
        files: dict[str, FilePart] = {}
        trees: dict[str, Any] = {}
        for name, value in as_parts(state).items():
            part = file_part(name, value, talk.process, talk.count)
            if part is None:
                trees[name] = value
            else:
                files[name] = part
        flats = self._capturer.flatten(trees)
        writer = self._prepare(step, flats)
        captured, release = self._capturer.capture(flats)
        saved = Saved(Step(step))
        self._step_least = step + 1
        self._step_highest = step
        writer.put(
            CapturedStep(
                number=number,
                saved=saved,
                trees=captured,
                files=files,
                metadata=note,
                release=release,
            )
        )
        return saved

    def restore(
        self,
        like: Any,
        step: int | None = None,
        *,
        only: str | Sequence[str] | None = None,
        cast: bool | str | Sequence[str] = False,
        renamed: Mapping[str, str] | None = None,
        missing: Initialiser | None = None,
    ) -> Any:
        """Restore a step. The next save goes on from it.

        Leaves are called by the names that messages have (`['params'][0].kernel`), or by their
        keys with slashes between (`params/0/kernel`); in a state of several parts these begin with
        the part's name. In a pattern `*` is any text, `?` any letter, and the name of a container
        means all that is in it.

        Args:
            like: a tree of arrays, `jax.ShapeDtypeStruct` with shardings, and plain values, or
                `es.Parts` of those: what is wanted, and where. Parts that are not named are not
                read.
            step: the newest that can be read, and has all these parts, when None.
            only: patterns of the leaves that are restored. The others stay as they are in `like`,
                and what was saved of them is not read.
            cast: whether an array may have another dtype than was saved: all, or those of these
                patterns. Values are rounded; a dtype that cannot hold them is refused.
            renamed: names under which leaves were saved, by the names that they have in `like`.
            missing: makes the leaves that were not saved, each from its `name`, `shape`, `dtype`.

        Returns:
            The state in the structure of `like`.

        Raises:
            StateRefused: the saved tree differs; all such leaves are named.
            CheckpointInvalid: the step (or, without `step`, every one) is damaged, or was dropped
                while it was read.
            ConfigurationError: there is no such step.
            StorageUnavailable: storage did not answer.

        Blocking: until the state is on the devices.
        """
        options = RestoreOptions.given(only=only, cast=cast, renamed=renamed, missing=missing)
        return self._restore(like, step, options)[0]

    def restore_newest(self, like: Any) -> tuple[Any, int]:
        """As `restore` without a step; the state, and the step that it is of."""
        return self._restore(like, None, EVERYTHING)

    def _restore(self, like: Any, step: int | None, options: RestoreOptions) -> tuple[Any, int]:
        with self._lock:
            self._check_usable()
            self.wait()
            talk = self._talk()
            self._restores += 1
            restoring = Restoring(
                self._store,
                talk,
                key=f"restore/{self._restores}",
                deadline_s=self._deadline_s,
                memory_bytes=self._memory_bytes,
                log=log,
                ledger=self._seen,
                options=options,
                local=self._local(talk),
            )
            state, found = restoring.restore(like, step)
            self._step_least = found
            return state, found

    def steps(self) -> tuple[int, ...]:
        """The steps that exist, oldest first; those too that Orbax wrote into the folder."""
        own = {commit.step for commit in self._commits()}
        return tuple(sorted(own.union(foreign_steps(self._store))))

    def latest(self) -> int | None:
        """The newest step that exists."""
        return max(self.steps(), default=None)

    def metadata(self, step: int) -> StepMetadata:
        """What is known of a step. Raises `ConfigurationError` when there is no such step."""
        for commit in self._commits():
            if commit.step == step:
                manifest = read_manifest(self._store, commit)
                trees = [item.tree for item in manifest.items.values()]
                return StepMetadata(
                    step=step,
                    committed_at_s=commit.committed_at_s,
                    metadata=json.loads(commit.extra.get(METADATA, "null")),
                    parts=tuple(manifest.items),
                    size_bytes=sum(stored_bytes(leaf) for tree in trees for leaf in tree.leaves),
                )
        if step in foreign_steps(self._store):
            found = open_foreign(self._store, step)
            kinds = found.items
            trees = [found.reader(name).tree for name in kinds if kinds[name] is ItemKind.TREE]
            return StepMetadata(
                step=step,
                committed_at_s=found.committed_at_s,
                metadata=found.metadata.get("custom_metadata"),
                parts=tuple(kinds),
                size_bytes=sum(stored_bytes(leaf) for tree in trees for leaf in tree.leaves),
            )
        have = ", ".join(map(str, self.steps())) or "none"
        raise ConfigurationError("step", step, f"one of {have}")

    def wait(self) -> None:
        """Wait until every step that was saved is committed, and old ones are dropped.

        Raises:
            CheckpointFailed: one could not be written.
            TimeoutError: that took longer than `deadline_s`.
        """
        self._check_usable()
        # Twice: the other processes get the deadline of a wait for them, and so do we.
        if self._writer is not None and not self._writer.wait_idle(2 * self._deadline_s):
            raise TimeoutError(f"{self.uri}: not written after {2 * self._deadline_s:g} s")
        self._raise_failures()

    def close(self) -> None:
        """Wait for what is on its way, and end. Again is no error.

        Raises:
            CheckpointFailed: a step could not be written, or not in time, and nobody was told yet.
        """
        with self._lock:
            if self._is_closed or os.getpid() != self._pid:
                return
            self._is_closed = True
            writer = self._writer
            if writer is not None and not writer.close(2 * self._deadline_s):
                late = TimeoutError(f"not written after {2 * self._deadline_s:g} s")
                for saved in writer.unsaid:
                    if not saved.done():
                        raise CheckpointFailed(saved.step, late)
            if self._copies is not None:
                self._copies.close()
            self._raise_failures()

    @property
    def failure(self) -> CheckpointFailed | None:
        """The first failure of a step that nobody was told of yet."""
        unsaid = self._writer.unsaid if self._writer is not None else ()
        return next((s.failure for s in unsaid if s.failure is not None and not s.was_told), None)

    def claim(self) -> Incarnation:
        """Make the run this program's now, and not at the first save.

        Returns:
            The incarnation in whose name it commits; 0 in processes that do not lead.

        Raises:
            StorageRefused: the folder cannot be written, or holds something that is no run.
            Fenced: another job has the run.
        """
        with self._lock:
            self._check_usable()
            claim = self._ledger.own_claim
            if claim is None and self._talk().leads:
                return self._claim()
            return claim.incarnation if claim is not None else Incarnation(0)

    # Before anything is written.

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigurationError(
                "es.Checkpoints", "used after a fork", "one that is made in this process"
            )
        if self._is_closed:
            raise ConfigurationError("es.Checkpoints", "closed", "a new one")

    def _talk(self) -> Talk:
        """To the other processes; opened when it is first needed, as jax must have started."""
        if self._opened is None:
            name = fingerprint(self.uri)
            _spoken[name] += 1
            self._opened = Talk(open_channel(f"{name}-{_spoken[name]}"), self._clock)
        return self._opened

    def _local(self, talk: Talk) -> LocalCopies | None:
        if self._copies is None and self._local_tier is not None:
            self._copies = LocalCopies(
                self._local_tier, uri=self.uri, process=talk.process, log=log
            )
        return self._copies

    def _raise_failures(self) -> None:
        unsaid = self._writer.unsaid if self._writer is not None else []
        failed = [s.failure for s in unsaid if s.failure is not None and not s.was_told]
        for saved in unsaid:
            saved.was_told |= saved.failure is not None
        if failed:
            for other in failed[1:]:
                failed[0].add_note(str(other))
            raise failed[0]

    def _prepare(self, step: int, flats: Mapping[str, Planned]) -> Writer:
        """Everything that can refuse a step, and needs storage to know."""
        talk = self._talk()
        if talk.leads:
            checks.check_folder(self._store, self._capturer.bytes_of(flats))
            if self._ledger.own_claim is None:
                self._ledger.refresh()
                checks.check_not_behind_orbax(step, foreign_steps(self._store))
                if self._step_least is None:
                    checks.check_not_behind(step, self._ledger)
                self._claim()
            elif step <= self._step_highest:
                # A step that was restored is gone on from: what came after it is replaced, which
                # only a later claim may do.
                checks.check_fence(self._ledger)
                self._claim()
            else:
                checks.check_fence(self._ledger)
        copies = self._local(talk)
        if copies is not None:
            # Before this process's part is written, so that none thinks its folder left behind.
            copies.claim()
        if self._writer is None:
            self._writer = Writer(
                self._store,
                self._ledger,
                talk,
                self._clock,
                retention=self._retention,
                deadline_s=self._deadline_s,
                log=log,
                local=copies,
            )
            finish_at_exit(self._writer, self._deadline_s, log)
            weakref.finalize(self, self._writer.end)
        return self._writer

    def _claim(self) -> Incarnation:
        """Another process of this program is told by the first draft."""
        self._ledger.refresh()
        incarnation = Incarnation((self._ledger.newest_incarnation or 0) + 1)
        return self._ledger.claim(incarnation, JOB).incarnation

    def _commits(self) -> tuple[Commit, ...]:
        self._seen.look()
        return self._seen.commits()
