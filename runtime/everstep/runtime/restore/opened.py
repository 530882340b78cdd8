"""The sources of one restore, from what an assignment names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from everstep.controller.api.ids import HostId, Incarnation, Step
from everstep.runtime.errors import CheckpointInvalid, Retryable
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.manifest import Holding, Region
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.restore.peers import PeerMemory
from everstep.runtime.restore.refill import Sources, Tally
from everstep.runtime.restore.reshard import SourceHolding, SourceKind
from everstep.runtime.restore.sources import LocalDisk, MemorySource, OwnMemory, RegionSource


class StoredStep(Protocol):
    """A committed checkpoint: `agent.link.Source`."""

    @property
    def uri(self) -> str: ...

    @property
    def step(self) -> Step: ...

    @property
    def item(self) -> str: ...


class StoredReader(Protocol):
    """An opened checkpoint: `storage.reader.CheckpointReader`."""

    @property
    def tree(self) -> TreeSpec: ...

    @property
    def extra(self) -> Mapping[str, str]: ...

    @property
    def chunks(self) -> Mapping[int, tuple[int, ...]]: ...

    def read_many(self, reads: Sequence[tuple[Region, NDArray[Any]]]) -> None: ...


class RestoreOrder(Protocol):
    """The part of `agent.link.Assignment` that says what to restore and from where."""

    @property
    def host(self) -> HostId: ...

    @property
    def incarnation(self) -> Incarnation: ...

    @property
    def token(self) -> str: ...

    @property
    def restore_step(self) -> Step | None: ...

    @property
    def holdings(self) -> tuple[Holding, ...]: ...

    @property
    def storage(self) -> StoredStep | None: ...


class OpenedSources:
    """The sources of one restore. Storage is opened only when something is needed from it."""

    def __init__(
        self,
        order: RestoreOrder,
        own_slots: Mapping[str, memoryview],
        tally: Tally,
        local: Sequence[LocalDisk] = (),
        stored: Callable[[], StoredReader] | None = None,
    ) -> None:
        self._order, self._tally, self._local = order, tally, local
        self._peers = [self._peer(holding) for holding in order.holdings]
        self._memories: dict[int, MemorySource] = {}
        for index, peer in enumerate(self._peers):
            is_own = peer.kind is SourceKind.OWN and peer.holding.id in own_slots
            memory = own_slots[peer.holding.id] if is_own else None
            self._memories[index] = peer if memory is None else OwnMemory(peer, memory)
        self._storage: _Storage | None = None
        if order.storage is not None:
            self._storage = _Storage(order.storage, stored)

    def describe(self, wanted: TreeSpec | None = None) -> tuple[TreeSpec, Mapping[str, str]]:
        """Tree and extra of the step, from the first source that tells.

        Args:
            wanted: the tree that is asked for. A checkpoint that another library wrote is told
                in its words, where the two say the same.
        """
        if self._storage is not None:
            self._storage.wanted = wanted
        for index in sorted(self._memories, key=lambda i: self._memories[i].kind):
            try:
                manifest = self._memories[index].manifest()
            except (Retryable, CheckpointInvalid) as error:
                self._tally.rejected.append(str(error))
            else:
                if self._storage is not None:
                    self._storage.expected = manifest.plot.tree
                return manifest.plot.tree, manifest.extra
        if self._storage is None:
            raise CheckpointInvalid(
                f"step {self._order.restore_step}",
                "the tree",
                "a source that describes it",
                "; ".join(self._tally.rejected) or "no source",
            )
        return self._storage.tree, self._storage.extra

    def sources(self) -> Sources:
        holdings = [
            SourceHolding(index=index, kind=source.kind, shards=peer.holding.shards)
            for (index, source), peer in zip(self._memories.items(), self._peers, strict=True)
        ]
        memories = dict(self._memories)
        for index, disk in enumerate(self._local, len(holdings)):
            memories[index] = disk
            shards = disk.manifest().plot.shards
            holdings.append(SourceHolding(index=index, kind=disk.kind, shards=shards))
        storages: dict[int, RegionSource] = {}
        if self._storage is not None:
            index = len(holdings)
            storages[index] = self._storage
            holdings.append(SourceHolding(index=index, kind=SourceKind.STORAGE, shards=None))
        return Sources(memories=memories, storages=storages, holdings=holdings)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()

    def _peer(self, holding: Holding) -> PeerMemory:
        if holding.is_local:
            is_own = holding.host == self._order.host
            kind = SourceKind.LOCAL if is_own else SourceKind.PEER_LOCAL
        elif holding.host == self._order.host:
            kind = SourceKind.OWN
        elif holding.host.slice == self._order.host.slice:
            kind = SourceKind.PEER_SLICE
        else:
            kind = SourceKind.PEER
        return PeerMemory(
            holding, kind=kind, token=self._order.token, incarnation=self._order.incarnation
        )


def held_of(local: Sequence[LocalDisk]) -> dict[int, list[Box]]:
    """What these sources hold, by leaf: what the other processes of an exchange are told."""
    held: dict[int, list[Box]] = {}
    for disk in local:
        for shard in disk.manifest().plot.shards:
            boxes = held.setdefault(shard.leaf, [])
            if shard.box not in boxes:
                boxes.append(shard.box)
    return held


class _Storage:
    """The checkpoint of the step, opened at its first use."""

    def __init__(self, stored: StoredStep, opener: Callable[[], StoredReader] | None) -> None:
        self._stored, self._opener = stored, opener
        self._reader: Any = None
        self.expected: TreeSpec | None = None
        """The tree that other sources of this step have; leaves are called by their index."""
        self.wanted: TreeSpec | None = None
        self.name = f"checkpoint of step {stored.step} in {stored.uri}"

    @property
    def tree(self) -> TreeSpec:
        tree: TreeSpec = self._open().tree
        return tree

    @property
    def extra(self) -> Mapping[str, str]:
        extra: Mapping[str, str] = self._open().extra
        return extra

    def chunk_of(self, leaf: int) -> tuple[int, ...]:
        chunk: tuple[int, ...] = self._open().chunks[leaf]
        return chunk

    def read_many(self, reads: Sequence[tuple[Region, NDArray[Any]]]) -> None:
        self._open().read_many(reads)

    def _open(self) -> Any:
        if self._reader is None and self._opener is not None:
            self._reader = self._opener()
        elif self._reader is None:
            # Only here: tensorstore takes a tenth of a second to import, and a restore from
            # memory does without it.
            from everstep.runtime.storage.foreign_reader import open_foreign_item
            from everstep.runtime.storage.ledger import RunLedger
            from everstep.runtime.storage.open import open_store
            from everstep.runtime.storage.reader import CheckpointReader

            store = open_store(self._stored.uri)
            ledger = RunLedger(store)
            ledger.refresh()
            commits = [c for c in ledger.commits() if c.step == self._stored.step]
            reader: Any
            if commits:
                reader = CheckpointReader(store, commits[-1], self._stored.item)
            else:
                reader = open_foreign_item(store, self._stored.step, self._stored.item)
                if reader is None:
                    raise CheckpointInvalid(
                        self.name, "the ledger", "a commit of this step", "none"
                    )
                words = self.expected or self.wanted
                reader = reader.fitted(words) if words is not None else reader
            if self.expected is not None:
                found, expected = reader.tree.fingerprint, self.expected.fingerprint
                if found != expected:
                    raise CheckpointInvalid(self.name, "the tree", expected, found)
            self._reader = reader
        return self._reader
