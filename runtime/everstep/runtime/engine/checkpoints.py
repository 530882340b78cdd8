"""`es.Checkpoints`: states of any JAX program to storage and back, with no job and no agents."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.checkpoint.retention import METADATA
from everstep.runtime.clock import Clock, SystemClock
from everstep.runtime.engine.capturing import Capturer
from everstep.runtime.engine.channel import Channel, open_channel
from everstep.runtime.engine.parts import FilePart, as_parts, file_part, fingerprint
from everstep.runtime.engine.restoring import restore_parts
from everstep.runtime.engine.saving import (
    CapturedStep,
    CheckpointFailed,
    Saved,
    Writer,
)
from everstep.runtime.errors import ConfigurationError, StateRefused, StorageRefused
from everstep.runtime.layout.boxes import whole
from everstep.runtime.layout.dtypes import itemsize
from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.reader import read_manifest

JOB = "alone"
"""Whose run it is in the ledger: a later program over the same folder takes it over."""
DEADLINE_S = 1800.0
EXIT_S = 600.0
"""How long the end of the interpreter waits for steps that are on their way."""
MEMORY_BYTES = 1 << 30
log = logging.getLogger("everstep")
_opened = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which steps stay: those that any of the rules wants, and always the newest two.

    `best` keeps so many of the steps with the best `metric`, a number in the step's metadata.
    """

    latest: int = 3
    every_steps: int | None = None
    every_seconds: float | None = None
    best: int = 0
    metric: str = "loss"
    mode: str = "min"

    def __post_init__(self) -> None:
        for name, least in (("latest", 1), ("best", 0)):
            if getattr(self, name) < least:
                raise ConfigurationError(
                    f"retention.{name}", getattr(self, name), f"{least} or more"
                )
        for name in ("every_steps", "every_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"retention.{name}", value, "more than 0, or None")
        if self.mode not in ("min", "max"):
            raise ConfigurationError("retention.mode", self.mode, '"min" or "max"')


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """What is known of a step without reading its arrays."""

    step: int
    committed_at_s: float
    """Unix seconds."""
    metadata: Any
    """What was given to `save`."""
    parts: tuple[str, ...]
    size_bytes: int
    """Of its arrays."""


class Checkpoints:
    """The checkpoints of one run, in a folder or a bucket.

    Under several processes every method but `steps`, `latest` and `metadata` is called by all of
    them with the same arguments, as every computation is. One thread at a time.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        retention: Retention | None = None,
        memory_bytes: int = MEMORY_BYTES,
        deadline_s: float = DEADLINE_S,
        clock: Clock | None = None,
    ) -> None:
        """Open a run. Nothing is written before the first save, so readers disturb nobody.

        Args:
            uri: an absolute or relative path, `file:///folder`, `gs://bucket/folder`.
            retention: which steps stay; the newest three when not given.
            memory_bytes: bound of what a restore has in flight.
            deadline_s: of every wait for another process or for storage.

        Raises:
            ConfigurationError: an address that cannot be used; several processes that have no
                coordination service.
            StorageRefused: a file is where the folder should be.
        """
        global _opened
        _opened += 1
        text = os.fspath(uri)
        self.uri = text if "://" in text else os.path.abspath(os.path.expanduser(text))
        if deadline_s <= 0:
            raise ConfigurationError("deadline_s", deadline_s, "more than 0 seconds")
        self._store = open_store(self.uri)
        self._ledger = RunLedger(self._store)
        self._channel: Channel = open_channel(f"{_opened}-{fingerprint(self.uri)}")
        self._clock = clock or SystemClock()
        self._retention = retention or Retention()
        self._memory_bytes, self._deadline_s = memory_bytes, deadline_s
        self._capturer = Capturer(deadline_s)
        self._writer: Writer | None = None
        self._unsettled: list[Saved] = []
        self._saves = self._restores = 0
        self._step_last: int | None = None
        self._pid = os.getpid()
        self._is_closed = False
        _call_at_exit(weakref.WeakMethod(self._finish_at_exit))

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
            step: greater than that of the last save.
            state: a tree of arrays and plain values, or `es.Parts`.
            metadata: JSON that travels with the step and can be read without it.

        Returns:
            The step on its way; `wait()` on it for the commit.

        Raises:
            CheckpointFailed: an earlier step could not be written; said once.
            StateRefused: a leaf cannot be stored; names it.
            StorageRefused: the folder cannot be written, is too small, or is no run.
            Fenced: another program has the run.

        Durability: none on return; the step exists once `Saved.wait` has returned.
        Blocking: for the copy to host memory, and for memory while earlier steps are written.
        """
        self._check_usable()
        self._raise_failures()
        self._check_step(step)
        note = _json_of(metadata)
        files: dict[str, FilePart] = {}
        trees: dict[str, Any] = {}
        for name, value in as_parts(state).items():
            part = file_part(name, value, self._channel.process, self._channel.process_count)
            if part is None:
                trees[name] = value
            else:
                files[name] = part
        flats = self._capturer.flatten(trees)
        writer = self._writer or self._claim()
        self._check_space(sum(plan.plot.size_bytes for _, plan in flats.values()))
        captured, release = self._capturer.capture(flats)
        saved = Saved(Step(step))
        one = CapturedStep(
            number=self._saves,
            saved=saved,
            trees=captured,
            files=files,
            metadata=note,
            release=release,
        )
        self._saves += 1
        self._step_last = step
        self._unsettled.append(saved)
        writer.put(one)
        return saved

    def restore(self, like: Any, step: int | None = None) -> Any:
        """Restore a step.

        Args:
            like: a tree of arrays, `jax.ShapeDtypeStruct` with shardings, and plain values, or
                `es.Parts` of those: what is wanted, and where. Parts that are not named are not
                read.
            step: the newest that can be read when None.

        Returns:
            The state in the structure of `like`.

        Raises:
            StateRefused: the saved tree differs; all such leaves are named.
            CheckpointInvalid: the step (or, without `step`, every one) is damaged.
            ConfigurationError: there is no such step.
            StorageUnavailable: storage did not answer.
        """
        return self._restore(like, step)[0]

    def restore_newest(self, like: Any) -> tuple[Any, int]:
        """As `restore` without a step; the state, and the step that it is of."""
        return self._restore(like, None)

    def _restore(self, like: Any, step: int | None) -> tuple[Any, int]:
        self._check_usable()
        self.wait()
        self._restores += 1
        commits = self._commits()
        if step is not None:
            commits = tuple(c for c in commits if c.step == step)
        return restore_parts(
            like,
            commits,
            uri=self.uri,
            store=self._store,
            channel=self._channel,
            key=f"restore/{self._restores}",
            deadline_s=self._deadline_s,
            memory_bytes=self._memory_bytes,
            wanted=step,
            log=log,
        )

    def steps(self) -> tuple[int, ...]:
        """The steps that exist, oldest first."""
        return tuple(commit.step for commit in self._commits())

    def latest(self) -> int | None:
        """The newest step that exists."""
        return max(self.steps(), default=None)

    def metadata(self, step: int) -> StepMetadata:
        """What is known of a step. Raises `ConfigurationError` when there is no such step."""
        for commit in self._commits():
            if commit.step == step:
                manifest = read_manifest(self._store, commit)
                size = sum(
                    whole(leaf.shape).size * itemsize(leaf.dtype)
                    for item in manifest.items.values()
                    for leaf in item.tree.leaves
                    if leaf.is_stored_as_bytes
                )
                return StepMetadata(
                    step=step,
                    committed_at_s=commit.committed_at_s,
                    metadata=json.loads(commit.extra.get(METADATA, "null")),
                    parts=tuple(manifest.items),
                    size_bytes=size,
                )
        have = ", ".join(map(str, self.steps())) or "none"
        raise ConfigurationError("step", step, f"one of {have}")

    def wait(self) -> None:
        """Wait until every step that was saved is committed.

        Raises:
            CheckpointFailed: one could not be written.
        """
        for saved in list(self._unsettled):
            if not saved.done():
                try:
                    saved.wait(self._deadline_s)
                except CheckpointFailed:
                    saved.was_told = False
        self._raise_failures()

    def close(self) -> None:
        """Wait for what is on its way, and end. Again is no error.

        Raises:
            CheckpointFailed: a step could not be written, and nobody was told yet.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._writer is not None and os.getpid() == self._pid:
            self._writer.close(self._deadline_s)
        self._raise_failures()

    # Checks before anything is written.

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ConfigurationError("es.Checkpoints", "closed", "a new one")
        if os.getpid() != self._pid:
            raise ConfigurationError(
                "es.Checkpoints", "used after a fork", "one that is made in this process"
            )

    def _raise_failures(self) -> None:
        failed = [s for s in self._unsettled if s.failure is not None and not s.was_told]
        self._unsettled = [s for s in self._unsettled if not s.done()]
        for saved in failed:
            saved.was_told = True
        if failed and failed[0].failure is not None:
            for other in failed[1:]:
                failed[0].failure.add_note(str(other.failure))
            raise failed[0].failure

    def _check_step(self, step: Any) -> None:
        is_whole = isinstance(step, int) and not isinstance(step, bool)
        if not is_whole or step < 0:
            raise ConfigurationError("step", step, "a whole number, 0 or more")
        if self._step_last is not None and step <= self._step_last:
            raise ConfigurationError("step", step, f"more than {self._step_last}, the last one")

    def claim(self) -> Incarnation:
        """Make the run this program's now, and not at the first save.

        Returns:
            The incarnation in whose name it commits; 0 in processes that do not lead.

        Raises:
            StorageRefused: the folder cannot be written, or holds something that is no run.
            Fenced: another job has the run.
        """
        self._check_usable()
        if self._writer is None:
            self._claim()
        claim = self._ledger.own_claim
        return claim.incarnation if claim is not None else Incarnation(0)

    @property
    def failure(self) -> CheckpointFailed | None:
        """The first failure of a step that nobody was told of yet."""
        return next(
            (s.failure for s in self._unsettled if s.failure is not None and not s.was_told), None
        )

    def _claim(self) -> Writer:
        """Claim the run. Another process of it is told by the first draft."""
        if self._channel.process == 0:
            self._ledger.refresh()
            incarnation = Incarnation((self._ledger.newest_incarnation or 0) + 1)
            self._ledger.claim(incarnation, JOB)
        self._writer = Writer(
            self._store,
            self._ledger,
            self._channel,
            self._clock,
            retention=self._retention,
            deadline_s=self._deadline_s,
        )
        return self._writer

    def _check_space(self, size_bytes: int) -> None:
        location = self._store.location("space")
        if location.driver != "file":
            return
        folder = os.path.dirname(location.path.rstrip("/"))
        while not os.path.isdir(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        found = os.statvfs(folder)
        free_bytes = found.f_bavail * found.f_frsize
        if free_bytes < size_bytes:
            raise StorageRefused(
                self.uri, f"{free_bytes} bytes free", f"{size_bytes} bytes for this process's part"
            )

    def _commits(self) -> tuple[Commit, ...]:
        ledger = RunLedger(self._store)
        ledger.refresh()
        return ledger.commits()

    def _finish_at_exit(self) -> None:
        """The interpreter ends without `close`: what is on its way gets a bounded time."""
        if self._is_closed or self._writer is None or os.getpid() != self._pid:
            return
        if not self._writer.close(min(EXIT_S, self._deadline_s)):
            log.error("steps that were on their way at the end are lost: %s", self.uri)
        for saved in self._unsettled:
            if saved.failure is not None and not saved.was_told:
                log.error("%s", saved.failure)


def _call_at_exit(method: weakref.WeakMethod[Any]) -> None:
    """Call a method when the program ends, while threads can still be started.

    `atexit` comes after Python has shut its thread pools, with which storage is written; what its
    own pools use to be told before that has no public name.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_call, method)


def _call(method: weakref.WeakMethod[Any]) -> None:
    found = method()
    if found is not None:
        found()


def _json_of(metadata: Mapping[str, Any] | None) -> Any:
    if metadata is None:
        return None
    try:
        return json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise StateRefused("metadata", str(error), "a value that JSON holds") from error
