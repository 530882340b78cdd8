"""A step back onto the devices; several processes agree on which."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everstep.controller.api.ids import HostId, Incarnation, Step
from everstep.runtime.agent.link import Source
from everstep.runtime.engine.channel import Channel
from everstep.runtime.engine.parts import Parts, as_parts, read_part
from everstep.runtime.engine.saving import host_of
from everstep.runtime.engine.state import flatten
from everstep.runtime.errors import (
    CheckpointInvalid,
    ConfigurationError,
    EverstepError,
    PeerUnavailable,
    StateRefused,
)
from everstep.runtime.layout.manifest import Holding
from everstep.runtime.restore.assemble import restore_state
from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.manifest import PYTREE, CheckpointManifest
from everstep.runtime.storage.reader import read_item_file, read_manifest
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


def restore_parts(
    like: Any,
    commits: Sequence[Commit],
    *,
    uri: str,
    store: Store,
    channel: Channel,
    key: str,
    deadline_s: float,
    memory_bytes: int,
    wanted: int | None,
    log: logging.Logger,
) -> tuple[Any, int]:
    """The newest of `commits` that every process can read, and its step.

    Args:
        like: what is wanted; see `Checkpoints.restore`.
        commits: steps that may be taken, oldest first; those of process 0 count.
        uri: of the run.
        store: of the run.
        channel: to the other processes.
        key: of this restore on the channel, never used before.
        deadline_s: of a wait for another process.
        memory_bytes: bound of what is in flight.
        wanted: the step that was asked for, for messages.
        log: where a step that is passed over is said.

    Raises:
        as `Checkpoints.restore`.
    """
    by_step = {commit.step: commit for commit in commits}
    tried: list[str] = []
    steps = _agree(channel, f"{key}/steps", sorted(by_step), deadline_s)
    if not steps:
        raise ConfigurationError("step", wanted or "none", f"a committed step of {uri}")
    lacking: PartMissing | None = None
    for attempt, step in enumerate(steps):
        failure: CheckpointInvalid | None = None
        restored: Any = None
        try:
            if step not in by_step:
                raise CheckpointInvalid(f"step {step}", "the ledger", "a commit", "none here")
            restored = _restore_one(like, by_step[step], uri, store, channel, memory_bytes)
        except PartMissing as error:
            if wanted is not None or step == steps[-1]:
                _tell(channel, f"{key}/{attempt}", f"{_STOP}{error}")
                raise lacking or error from None
            # A part may have a cadence of its own: an older step has it.
            lacking = lacking or error
            failure = CheckpointInvalid(f"step {step}", "the parts", error.field, "not saved")
        except CheckpointInvalid as error:
            failure = error
        except EverstepError as error:
            # Not a word against the step, but nobody may wait for this process.
            _tell(channel, f"{key}/{attempt}", f"{_STOP}{error}")
            raise
        why = _hear_all(channel, f"{key}/{attempt}", failure, deadline_s)
        if why is None:
            return restored, step
        if lacking is None:
            log.warning("step %d is passed over: %s", step, why)
        tried.append(f"step {step}: {why}")
    raise CheckpointInvalid(uri, "every step", "one that can be read", "; ".join(tried) or "none")


def _restore_one(
    like: Any, commit: Commit, uri: str, store: Store, channel: Channel, memory_bytes: int
) -> Any:
    manifest = read_manifest(store, commit)
    restored: dict[str, Any] = {}
    for name, part in as_parts(like).items():
        item = manifest.items.get(name)
        if item is None:
            have = ", ".join(manifest.items)
            raise PartMissing(f"part {name}", "nothing", f"one of step {commit.step}: {have}")
        if item.handler == PYTREE:
            order = Order(
                incarnation=commit.incarnation,
                restore_step=commit.step,
                storage=Source(uri=uri, step=commit.step, item=name),
                host=host_of(channel.process),
            )
            restored[name] = restore_state(
                _flat(name, part), None, assignment=order, own_slots={}, memory_bytes=memory_bytes
            ).state
        else:
            files = _StoredFiles(store, commit, manifest, name)
            restored[name] = read_part(
                name, part, item.handler, files, channel.process, channel.process_count
            )
    return Parts(**restored) if isinstance(like, Parts) else next(iter(restored.values()))


def _flat(name: str, wanted: Any) -> Any:
    try:
        return flatten(wanted)
    except StateRefused as error:
        raise StateRefused(f"{name}: {error.field}", error.found, error.expected) from error


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


def _agree(channel: Channel, key: str, steps: list[Step], deadline_s: float) -> list[Step]:
    """The steps to try, newest first: those that process 0 sees."""
    newest_first = sorted(steps, reverse=True)
    if channel.process_count == 1:
        return newest_first
    if channel.process == 0:
        channel.put(key, json.dumps(newest_first))
        return newest_first
    return [Step(step) for step in json.loads(channel.get(key, deadline_s))]


_STOP = "stop: "


def _tell(channel: Channel, key: str, words: str) -> None:
    if channel.process_count > 1:
        channel.put(f"{key}/{channel.process}", words)


def _hear_all(
    channel: Channel, key: str, failure: CheckpointInvalid | None, deadline_s: float
) -> str | None:
    """Why the step cannot be taken, if any process says so; None when all have it."""
    if channel.process_count == 1:
        return None if failure is None else str(failure)
    own = "" if failure is None else str(failure)
    _tell(channel, key, own)
    found: list[str] = [own] if own else []
    for process in range(channel.process_count):
        if process == channel.process:
            continue
        try:
            told = channel.get(f"{key}/{process}", deadline_s)
        except PeerUnavailable as error:
            raise PeerUnavailable(f"process {process} has not restored: {error}") from error
        if told.startswith(_STOP):
            raise PeerUnavailable(f"process {process} has not restored: {told[len(_STOP) :]}")
        if told:
            found.append(f"process {process}: {told}")
    return "; ".join(found) or None
