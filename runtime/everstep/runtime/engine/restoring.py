"""A step back onto the devices; several processes agree on which."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.controller.api.ids import HostId, Incarnation, Step
from everstep.runtime.agent.link import Source
from everstep.runtime.checkpoint.foreign import foreign_steps, open_foreign
from everstep.runtime.engine.exchanging import SILENCE_S, exchanging
from everstep.runtime.engine.parts import Parts, as_parts, read_part
from everstep.runtime.engine.shares import host_of
from everstep.runtime.engine.state import flatten
from everstep.runtime.engine.talk import Talk
from everstep.runtime.engine.tiers import Content, LocalCopies, local_of
from everstep.runtime.errors import (
    CheckpointInvalid,
    ConfigurationError,
    EverstepError,
    StateRefused,
)
from everstep.runtime.layout.flat import FlatState
from everstep.runtime.layout.manifest import Holding
from everstep.runtime.restore.assemble import restore_state
from everstep.runtime.restore.opened import StoredReader
from everstep.runtime.restore.options import EVERYTHING, RestoreOptions
from everstep.runtime.storage.foreign_steps import ItemKind
from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.manifest import PYTREE, CheckpointManifest, FormatNewer
from everstep.runtime.storage.reader import CheckpointReader, read_item_file, read_manifest
from everstep.runtime.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to restore, for `restore.assemble`."""

    incarnation: Incarnation
    restore_step: Step
    storage: Source
    host: HostId
    token: str = ""
    holdings: tuple[Holding, ...] = ()


class PartMissing(ConfigurationError):
    """A step has no part of this name."""


class StepDropped(CheckpointInvalid):
    """The writer of the run has dropped the step while it was read."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"step {step}",
            "the step",
            "one that its run keeps while it is read",
            "a step that was dropped meanwhile; a newer one is there, or more are to be kept",
        )


class Restoring:
    """One restore. Every process of the program makes one with the same key."""

    def __init__(
        self,
        store: Store,
        talk: Talk,
        *,
        key: str,
        deadline_s: float,
        memory_bytes: int,
        log: logging.Logger,
        ledger: RunLedger,
        options: RestoreOptions = EVERYTHING,
        local: LocalCopies | None = None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            store: of the run.
            talk: with the other processes.
            key: of this restore, never used before.
            deadline_s: of every wait for another process.
            memory_bytes: bound of what is in flight.
            log: for what a person should know.
            ledger: of the run, kept between restores: what was read of it is not read again.
            options: what may differ between what was saved and what is wanted.
            local: copies of this process; None where it has no local tier.
        """
        self._local, self._ledger = local, ledger
        self._is_local_used = local is not None
        """On all processes, as process 0 has it: they may have been set up otherwise."""
        self._store, self._talk, self._key, self._log = store, talk, key, log
        self._deadline_s, self._memory_bytes = deadline_s, memory_bytes
        self._options = options
        self._commits: dict[Step, Commit] = {}
        self._foreign: tuple[Step, ...] = ()

    def restore(self, like: Any, wanted: int | None) -> tuple[Any, int]:
        """Restore a step that every process can read: the wanted one, or the newest such.

        Raises:
            as `Checkpoints.restore`.
        """
        passed: dict[Step, str] = {}
        failure: CheckpointInvalid | None = None
        lacking: PartMissing | None = None
        while (step := self._next(wanted, passed)) is not None:
            key = f"{self._key}/{len(passed)}"
            failure = None
            restored: Any = None
            try:
                restored = self._attempt(like, step, key)
            except PartMissing as error:
                # A part may have a cadence of its own: an older step has it.
                lacking = lacking or error
                failure = CheckpointInvalid(f"step {step}", error.field, "a part", "not saved then")
            except FormatNewer as error:
                # Nothing is wrong with it: an older step would take the newer ones away.
                self._talk.refuse(f"{key}/{self._talk.process}", error)
                raise
            except CheckpointInvalid as error:
                failure = error
            except EverstepError as error:
                # Not a word against the step, but nobody may wait for this process.
                self._talk.refuse(f"{key}/{self._talk.process}", error)
                raise
            why = self._all_of(key, failure)
            if why is None:
                return restored, step
            if lacking is None:
                self._log.warning("step %d is passed over: %s", step, why)
            passed[step] = why
        if lacking is not None:
            raise lacking
        if not passed:
            have = ", ".join(map(str, sorted(self._steps()))) or "none"
            found = "none" if wanted is None else wanted
            raise ConfigurationError(
                "step", found, f"a committed step of {self._store.uri}: {have}"
            )
        if failure is not None and wanted is not None:
            raise failure
        tried = "; ".join(f"step {step}: {why}" for step, why in passed.items())
        raise CheckpointInvalid(self._store.uri, "every step", "one that can be read", tried)

    def _next(self, wanted: int | None, passed: Mapping[Step, str]) -> Step | None:
        """The step to try now; what process 0 sees counts.

        It looks anew each time: while an old step was tried, newer ones may have come.
        """
        key = f"{self._key}/{len(passed)}/step"
        if not self._talk.leads:
            return self._told_step(key)
        self._look()
        left = [s for s in self._steps() if s not in passed and wanted in (None, s)]
        step = max(left, default=None)
        commit = None if step is None else self._commits.get(step)
        self._talk.tell(
            key,
            step=step,
            entry=None if commit is None else [commit.number, commit.digest],
            local=self._is_local_used,
        )
        return step

    def _told_step(self, key: str) -> Step | None:
        """What process 0 says; storage is looked at only where that is not known yet."""
        by_s = self._talk.deadline(self._deadline_s)
        told = self._talk.hear(key, by_s, "process 0 has not begun to restore")
        self._is_local_used = bool(told["local"])
        if told["step"] is None:
            self._look()
            return None
        step = Step(told["step"])
        self._note_commits()
        commit = self._commits.get(step)
        if commit is None or [commit.number, commit.digest] != told["entry"]:
            self._look()
        return step

    def _look(self) -> None:
        self._ledger.look()
        self._note_commits()
        self._foreign = foreign_steps(self._store)

    def _note_commits(self) -> None:
        self._commits = {commit.step: commit for commit in self._ledger.commits()}

    def _steps(self) -> set[Step]:
        return {*self._commits, *self._foreign}

    def _attempt(self, like: Any, step: Step, key: str) -> Any:
        commit = self._commits.get(step)
        if commit is None and step in self._foreign:
            return self._restore(like, _OrbaxStep(self._store, step), key)
        if commit is None:
            raise CheckpointInvalid(f"step {step}", "the ledger", "a commit", "none here")
        try:
            return self._restore(like, _OwnStep(self._store, commit), key)
        except CheckpointInvalid as error:
            self._look()
            now = self._commits.get(step)
            if now is None or now.folder != commit.folder:
                raise StepDropped(step) from error
            raise

    def _restore(self, like: Any, found: _FoundStep, key: str) -> Any:
        parts = as_parts(like)
        for name in parts:
            if not found.has(name):
                raise PartMissing(
                    f"part {name}", "nothing", f"one of step {found.step}: {found.names()}"
                )
        # In a state of several parts, the names of leaves begin with those of their parts.
        prefixes = {name: name if isinstance(like, Parts) else "" for name in parts}
        flats = {name: _flat(name, part) for name, part in parts.items() if found.is_tree(name)}
        self._options.check({prefixes[name]: flat.tree for name, flat in flats.items()})
        restored: dict[str, Any] = {}
        for name, part in parts.items():
            if name in flats:
                options = self._options.of_part(prefixes[name])
                restored[name] = self._tree(name, flats[name], found, key, options)
            else:
                restored[name] = found.read(name, part, self._talk)
        return Parts(**restored) if isinstance(like, Parts) else next(iter(restored.values()))

    def _tree(
        self, name: str, flat: FlatState, found: _FoundStep, key: str, options: RestoreOptions
    ) -> Any:
        order = Order(
            incarnation=found.incarnation,
            restore_step=found.step,
            storage=Source(uri=self._store.uri, step=found.step, item=name),
            host=host_of(self._talk.process),
        )
        own = f"{key}/{name}"
        by_s = self._talk.deadline(min(self._deadline_s, SILENCE_S))
        content = found.content(name)
        with (
            local_of(
                self._local, self._talk, own, by_s, content, self._is_local_used, self._log
            ) as local,
            exchanging(self._talk, own, self._deadline_s) as exchange,
        ):
            restored = restore_state(
                flat,
                None,
                assignment=order,
                own_slots={},
                memory_bytes=self._memory_bytes,
                options=options,
                exchange=exchange,
                local=local,
                stored=found.opener(name),
            )
        figures = restored.figures
        if figures.local_bytes:
            self._log.info(
                "step %d: %s: %d bytes from local copies, %d from %s",
                found.step,
                name,
                figures.local_bytes,
                figures.storage_bytes,
                self._store.uri,
            )
        for words in figures.rejected if local.disks else ():
            self._log.warning("step %d: %s: %s", found.step, name, words)
        return restored.state

    def _all_of(self, key: str, failure: CheckpointInvalid | None) -> str | None:
        """Why the step cannot be taken, if any process says so; None when all have it."""
        own = "" if failure is None else str(failure)
        talk = self._talk
        talk.tell(f"{key}/{talk.process}", why=own)
        found: list[str] = [own] if own else []
        by_s = talk.deadline(self._deadline_s)
        for process in talk.others:
            words = f"process {process} has not restored"
            told = talk.hear(f"{key}/{process}", by_s, words)
            if told["why"]:
                found.append(f"process {process}: {told['why']}")
        return "; ".join(found) or None


def _flat(name: str, wanted: Any) -> FlatState:
    try:
        return flatten(wanted)
    except StateRefused as error:
        raise StateRefused(f"{name}: {error.field}", error.found, error.expected) from error


class _OwnStep:
    """A step of the ledger, and what it is made of."""

    def __init__(self, store: Store, commit: Commit) -> None:
        self._store, self._commit = store, commit
        self._manifest = read_manifest(store, commit)
        self.step, self.incarnation = commit.step, commit.incarnation

    def names(self) -> str:
        return ", ".join(self._manifest.items)

    def has(self, name: str) -> bool:
        return name in self._manifest.items

    def is_tree(self, name: str) -> bool:
        return self._manifest.items[name].handler == PYTREE

    def opener(self, name: str) -> Callable[[], StoredReader]:
        """Opens a tree of the step."""
        return lambda: CheckpointReader(self._store, self._commit, name, manifest=self._manifest)

    def content(self, name: str) -> Content:
        """By what a local copy of this part is known."""
        fingerprint = self._manifest.items[name].tree.fingerprint
        return Content(digest=self._commit.digest, item=name, fingerprint=fingerprint)

    def read(self, name: str, like: Any, talk: Talk) -> Any:
        files = _StoredFiles(self._store, self._commit, self._manifest, name)
        handler = self._manifest.items[name].handler
        return read_part(name, like, handler, files, talk.process, talk.count)


class _OrbaxStep:
    """A step that Orbax wrote into the same folder."""

    incarnation = Incarnation(0)

    def __init__(self, store: Store, step: Step) -> None:
        self._opened = open_foreign(store, step)
        self.step = step

    def names(self) -> str:
        return ", ".join(self._opened.items)

    def has(self, name: str) -> bool:
        return self._opened.kind(name) is not None

    def is_tree(self, name: str) -> bool:
        return self._opened.kind(name) is not ItemKind.JSON

    def opener(self, name: str) -> None:
        """It is opened in the words of who asks: by `restore.opened`."""
        del name

    def content(self, name: str) -> None:
        """Nobody has local copies of what Orbax wrote."""
        del name

    def read(self, name: str, like: Any, talk: Talk) -> Any:
        del like, talk  # Of what is no tree, only Orbax's JSON is read, and that is a value.
        return self._opened.json(name)


_FoundStep = _OwnStep | _OrbaxStep


class _StoredFiles:
    """`PartFiles` of a committed item: read, verified."""

    def __init__(
        self, store: Store, commit: Commit, manifest: CheckpointManifest, item: str
    ) -> None:
        self._store, self._commit, self._manifest, self._item = store, commit, manifest, item

    def write(self, name: str, data: bytes) -> None:
        del data
        raise ConfigurationError("a part's file", name, "a committed step is never changed")

    def read(self, name: str) -> bytes:
        return read_item_file(self._store, self._commit, self._manifest, self._item, name)

    def names(self) -> tuple[str, ...]:
        return self._manifest.items[self._item].files
