"""The local tier of `es.Checkpoints`: copies of committed steps on the host's own disk.

A copy is written after the commit, and names the digest of what was committed. It is read only for
a step whose commit in the ledger has that digest. So a copy never makes a step exist, never stands
in for another step, and is never trusted over the run: it saves reading, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.disk.copies import LocalBytes, find_copies
from everstep.runtime.disk.tier import Content as Copied
from everstep.runtime.disk.tier import DiskTier
from everstep.runtime.engine.options import LocalTier
from everstep.runtime.engine.shares import CapturedTree, host_of, packed, unpacked
from everstep.runtime.engine.talk import Talk
from everstep.runtime.errors import CheckpointInvalid, EverstepError, PeerUnavailable
from everstep.runtime.layout.boxes import Box
from everstep.runtime.restore.assemble import Local
from everstep.runtime.restore.division import Held
from everstep.runtime.restore.opened import held_of
from everstep.runtime.restore.sources import LocalDisk

CLOSE_S = 60.0
"""How long the end of the program waits for a copy that is being written, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a process knows of a step once it is committed."""

    step: Step
    incarnation: Incarnation
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """One part of a committed step, as a restore knows it."""

    digest: str
    item: str
    fingerprint: str


class LocalCopies:
    """What one process keeps on its disk, and what it finds there."""

    def __init__(self, settings: LocalTier, *, uri: str, process: int, log: logging.Logger) -> None:
        self.path = os.path.abspath(os.path.expanduser(os.fspath(settings.path)))
        self._uri, self._process, self._log = uri, process, log
        self._every = settings.every_saves
        self._tier = DiskTier(
            self.path, run=uri, owner=f"process-{process}", latest=settings.latest
        )
        self._since = 0
        """Saves since the last copy was begun."""
        self._writing: threading.Thread | None = None
        self._said: dict[str, str] = {}
        self._passed: set[str] = set()

    def claim(self) -> None:
        """Become the owner of this process's folder before the others could think it left."""
        try:
            self._tier.open()
        except EverstepError as error:
            self._say("written", error)

    def is_due(self) -> bool:
        """Whether the step that was just committed is to be copied.

        A disk that is slower than the saves gets fewer of them: none waits for it, and no more
        than one step's memory is kept for it.
        """
        self._since += 1
        is_busy = self._writing is not None and self._writing.is_alive()
        return self._since >= self._every and not is_busy

    def write(
        self, trees: Mapping[str, CapturedTree], committed: Committed, release: Callable[[], None]
    ) -> None:
        """Write a copy in a thread of its own; `release` gives the memory back."""
        self._since = 0
        self._writing = threading.Thread(
            target=self._write, args=(trees, committed, release), name="everstep-local", daemon=True
        )
        self._writing.start()

    def _write(
        self, trees: Mapping[str, CapturedTree], committed: Committed, release: Callable[[], None]
    ) -> None:
        try:
            self._tier.write(
                {name: Copied(plot=item.plot, memory=item.memory) for name, item in trees.items()},
                step=committed.step,
                incarnation=committed.incarnation,
                host=host_of(self._process),
                digest=committed.digest,
                step_durable=committed.step,
            )
        except Exception as error:  # noqa: BLE001 - the step is durable whatever becomes of this.
            self._say("written", error)
        else:
            self._said.pop("written", None)
        finally:
            release()

    def close(self) -> None:
        """Let a copy that is being written be finished, within bounds, and give the folder up."""
        writing = self._writing
        if writing is not None:
            writing.join(CLOSE_S)
            if writing.is_alive():
                self._log.warning("local copies in %s: the last one is not finished", self.path)
                return
        self._tier.close()

    # Reading.

    def open(self, content: Content) -> list[tuple[LocalDisk, LocalBytes]]:
        """Open what this disk has of a committed part, whoever wrote it. Never fails."""
        try:
            copies, passed = find_copies(self.path, self._uri)
        except EverstepError as error:
            self._say("read", error)
            return []
        for words in passed:
            self._warn_once(words)
        opened: list[tuple[LocalDisk, LocalBytes]] = []
        for copy in copies:
            manifest = copy.record.items.get(content.item)
            if manifest is None or copy.record.digest != content.digest:
                continue
            try:
                found = manifest.plot.tree.fingerprint
                if found != content.fingerprint:
                    raise CheckpointInvalid(copy.folder, "the tree", content.fingerprint, found)
                copied = copy.open(content.item)
            except EverstepError as error:
                self._warn_once(str(error))
            else:
                opened.append((LocalDisk(copied, f"local copy {copied.path}"), copied))
        return opened

    def _warn_once(self, words: str) -> None:
        if words not in self._passed:
            self._passed.add(words)
            self._log.warning("a local copy is passed over: %s", words)

    def _say(self, what: str, error: BaseException) -> None:
        """Once, until it works again or something else is wrong."""
        words = str(error)
        if self._said.get(what) != words:
            self._said[what] = words
            self._log.warning("local copies in %s are not %s: %s", self.path, what, words)


@contextlib.contextmanager
def local_of(
    copies: LocalCopies | None,
    talk: Talk,
    key: str,
    by_s: float,
    content: Content | None,
    is_used: bool,
    log: logging.Logger,
) -> Generator[Local]:
    """What the processes' disks have of one part of a committed step, for one restore.

    Every process tells the others what it will read from its own disk, so that none reads that
    for it.

    Args:
        copies: of this process; None where it has no local tier.
        talk: with the other processes.
        key: of the part in this restore, never used before.
        by_s: until when the others are waited for, on the monotonic clock. Without what one of
            them has, everything is read from the run.
        content: what is restored; None when nobody has copies of it.
        is_used: whether that is done; process 0 has said so.
    """
    opened: list[tuple[LocalDisk, LocalBytes]] = []
    try:
        local = Local()
        if content is not None and is_used:
            try:
                opened = copies.open(content) if copies is not None else []
                disks = tuple(disk for disk, _ in opened)
                held = _told(talk, key, by_s, held_of(disks))
                local = Local(disks=disks, held=held)
            except PeerUnavailable as error:
                log.warning("local copies are not read: %s", error)
        yield local
    finally:
        for _, copied in opened:
            copied.close()


def _told(talk: Talk, key: str, by_s: float, own: Held) -> dict[int, Held]:
    """What the disk of each process has; all tell, and hear from all."""
    held: dict[int, Held] = {talk.process: own}
    if talk.count > 1:
        listed = tuple((leaf, tuple(boxes)) for leaf, boxes in own.items())
        talk.tell(f"{key}/held/{talk.process}", held=packed(listed))
    for process in talk.others:
        words = f"process {process} has not said what its disk holds"
        text = str(talk.hear(f"{key}/held/{process}", by_s, words)["held"])
        found: tuple[tuple[int, tuple[Box, ...]], ...] = unpacked(
            text, tuple[tuple[int, tuple[Box, ...]], ...]
        )
        held[process] = dict(found)
    return held
