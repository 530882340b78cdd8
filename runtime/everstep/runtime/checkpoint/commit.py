"""The lead's part: begin a draft, and make it a checkpoint.

The order of writes is the promise G1. All of a draft is on storage before the ledger's entry is
tried; the entry is one file that is created exclusively; before it the step does not exist, after
it the step is complete. Nothing is renamed, so the same order works where a rename is a copy.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime._version import __version__
from everstep.runtime.checkpoint import orbax
from everstep.runtime.checkpoint.coverage import check_coverage
from everstep.runtime.checkpoint.draft import array_plan
from everstep.runtime.errors import (
    Fenced,
    ManifestCorrupt,
    StorageRefused,
    StorageUnavailable,
    check,
)
from everstep.runtime.layout.dtypes import numpy_dtype
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.scalars import with_values
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.storage import manifest as files
from everstep.runtime.storage.chunks import Array
from everstep.runtime.storage.history import Claim, Commit
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.store import StorageMissing, Store
from everstep.runtime.storage.tensors import ArrayPlan, merge

DRAFT_RECORD = "everstep.draft.json"
MARKER_TEXT = b"Checkpoint commit was successful.\n"


class DraftRecord(msgspec.Struct, frozen=True, kw_only=True):
    """First file of a draft. Makes its folder this one's and nobody else's."""

    step: Step
    incarnation: Incarnation
    claim: int
    nonce: str


def find_commit(ledger: RunLedger, step: Step) -> Commit | None:
    """The commit of a step in the ledger's own claim: it need not be written again."""
    claim = ledger.own_claim
    for commit in ledger.commits():
        if commit.step == step and claim is not None and commit.claim == claim.number:
            return commit
    return None


def begin(
    store: Store, step: Step, incarnation: Incarnation, *, ledger: RunLedger | None = None
) -> str:
    """Make an empty draft and return its folder, which is also that of the checkpoint to be.

    The name holds the step, the number of the claim and an attempt, so neither the leftover of a
    killed attempt nor a committed checkpoint of the same step is ever in the way.

    Raises:
        Fenced: a newer incarnation has the run; nothing is written.
    """
    claim = _claim(store, incarnation, ledger)
    number = claim.number if claim is not None else 0
    record = DraftRecord(
        step=step, incarnation=incarnation, claim=number, nonce=secrets.token_hex(8)
    )
    attempt = 1
    while True:
        draft = f"step-{step:010d}-{number:06d}-{attempt}"
        if not store.exists(draft) and _create_record(store, draft, record):
            return draft
        attempt += 1


def _create_record(store: Store, draft: str, record: DraftRecord) -> bool:
    path = f"{draft}/{DRAFT_RECORD}"
    try:
        return store.create_exclusive(path, msgspec.json.encode(record))
    except (StorageRefused, StorageUnavailable):
        # Nobody knows of this draft: an empty folder would be left for as long as the claim lasts.
        with contextlib.suppress(StorageRefused, StorageUnavailable):
            if not store.exists(path):
                store.delete_tree(draft)
        raise


def discard(store: Store, draft: str, *, ledger: RunLedger) -> None:
    """Delete a draft that will not be committed. Never a folder that the ledger names."""
    ledger.refresh()
    if all(draft != c.folder for c in (*ledger.commits(), *ledger.superseded())):
        store.delete_tree(draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeItem:
    """An item of arrays: what it is of, and what each writer reported."""

    tree: TreeSpec
    parts: Sequence[tuple[int, Sequence[Region]]]
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values of its Python scalars (`layout.scalars.inline_extra`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesItem:
    """An item of files that a handler wrote into the draft, synced."""

    handler: str
    files: Mapping[str, str]
    """Digest by path below the item's folder."""
    orbax_handler: str | None = None
    """Who reads it in Orbax; None: nobody does."""


def commit(
    store: Store,
    ledger: RunLedger,
    *,
    draft: str,
    step: Step,
    incarnation: Incarnation,
    tree: TreeSpec,
    parts: Sequence[tuple[int, Sequence[Region]]],
    extra: Mapping[str, str],
    now_s: float,
) -> Commit:
    """Make a draft of one state the checkpoint of its step. See `commit_items`.

    Args:
        store: of the run.
        ledger: of the run, claimed by `incarnation`.
        draft: from `begin`.
        step: the step that was held.
        incarnation: in whose name; must be the claimed one.
        tree: of the state.
        parts: what each writer reported; must be what it recorded in the draft.
        extra: small things that travel with the step.
        now_s: Unix seconds.
    """
    return commit_items(
        store,
        ledger,
        draft=draft,
        step=step,
        incarnation=incarnation,
        items={files.STATE: TreeItem(tree=tree, parts=parts, extra=extra)},
        extra=extra,
        now_s=now_s,
    )


def commit_items(
    store: Store,
    ledger: RunLedger,
    *,
    draft: str,
    step: Step,
    incarnation: Incarnation,
    items: Mapping[str, TreeItem | FilesItem],
    extra: Mapping[str, str],
    now_s: float,
    custom: object = None,
) -> Commit:
    """Make a draft the checkpoint of its step.

    Idempotent: a step that this claim has committed is returned as it is. A commit of the same
    step by an earlier claim is replaced, in the instant of the ledger's entry.

    Args:
        store: of the run.
        ledger: of the run, claimed by `incarnation`.
        draft: from `begin`.
        step: the step that was held.
        incarnation: in whose name; must be the claimed one.
        items: the named parts of the step; one at least.
        extra: small things that travel with the step.
        now_s: Unix seconds.
        custom: what the user says of the step, as JSON; for Orbax's readers.

    Raises:
        NotCovered: the parts do not tile every leaf; names leaf, region and writers.
        ManifestCorrupt: a part's record is missing or is not what was reported.
        Fenced: a newer incarnation has the run; the step does not exist.

    Durability: on return the step exists, after any crash later too. After a crash within, it
    exists whole or not at all; the draft is then collected by a later incarnation.
    """
    claim = ledger.verify_claim()
    check(claim.incarnation == incarnation, f"committed by {incarnation}, claimed by {claim}")
    existing = find_commit(ledger, step)
    if existing is not None:
        if existing.folder != draft:
            discard(store, draft, ledger=ledger)
        return existing
    contents: dict[str, bytes] = {DRAFT_RECORD: _read(store, draft, DRAFT_RECORD)}
    written: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    manifests: dict[str, files.ItemManifest] = {}
    handlers: dict[str, str] = {}
    unsynced: list[str] = []
    for name, item in items.items():
        if isinstance(item, TreeItem):
            manifests[name] = _join_tree(store, draft, name, item, contents, written, unsynced)
            handlers[name] = orbax.HANDLER
        else:
            manifests[name] = files.ItemManifest(handler=item.handler, files=tuple(item.files))
            digests.update({f"{name}/{path}": digest for path, digest in item.files.items()})
            if item.orbax_handler is not None:
                handlers[name] = item.orbax_handler
    written.update(orbax.step_files(handlers, begun_s=now_s, committed_s=now_s, custom=custom))
    contents.update(written)
    digests.update({path: files.digest(data) for path, data in contents.items()})
    manifest = msgspec.json.encode(
        files.CheckpointManifest(
            format=files.FORMAT,
            step=step,
            incarnation=incarnation,
            job_uid=claim.job_uid,
            items=manifests,
            files=dict(sorted(digests.items())),
            extra=dict(extra),
            versions={"everstep": __version__},
        )
    )
    store.write_together(draft, {**written, files.MANIFEST: manifest}, unsynced=unsynced)
    # For Orbax's readers; ours look at the ledger only.
    if store.location(draft).objects is not None:
        # In a bucket, where nothing is renamed, Orbax asks each item for one of its own.
        for name in items:
            store.write_durable(f"{draft}/{name}/{orbax.MARKER}", MARKER_TEXT)
    store.write_durable(f"{draft}/{orbax.MARKER}", MARKER_TEXT)
    return ledger.append_commit(
        step=step,
        folder=draft,
        digest=files.digest(manifest),
        committed_at_s=now_s,
        extra=extra,
    )


def _join_tree(
    store: Store,
    draft: str,
    name: str,
    item: TreeItem,
    contents: dict[str, bytes],
    written: dict[str, bytes],
    unsynced: list[str],
) -> files.ItemManifest:
    """Make one database of what the writers wrote of an item, and note its small files."""
    tree = item.tree
    records = _records(store, draft, name, item, contents)
    chunks = _chunks(store, draft, tree, records)
    check_coverage(draft, tree, chunks, [(record.writer, record.regions) for record in records])
    layout = orbax.layout(with_values(tree, item.extra), chunks)
    names = orbax.array_names(tree)
    made = merge(
        store.location(f"{draft}/{name}"),
        [files.writer_folder(record.writer) for record in records],
        [*_empty_arrays(tree, names, chunks), *_scalar_arrays(layout.scalars)],
    )
    unsynced += [f"{name}/{path}" for path in made]
    written.update({f"{name}/{path}": data for path, data in layout.files.items()})
    return files.ItemManifest(
        handler=files.PYTREE,
        tree=tree,
        arrays=names,
        chunks=chunks,
        writers=tuple(record.writer for record in records),
        extra=dict(item.extra) if name != files.STATE else {},
    )


def _claim(store: Store, incarnation: Incarnation, ledger: RunLedger | None) -> Claim | None:
    if ledger is not None and ledger.own_claim is not None:
        claim = ledger.verify_claim()
        check(claim.incarnation == incarnation, f"begun by {incarnation}, claimed by {claim}")
        return claim
    other = RunLedger(store)
    other.refresh()
    newest = other.newest_claim
    if newest is not None and newest.incarnation > incarnation:
        raise Fenced(own=incarnation, newest=newest.incarnation, where=store.uri)
    return newest


def _records(
    store: Store, draft: str, item: str, of: TreeItem, contents: dict[str, bytes]
) -> list[files.PartRecord]:
    """The writers' own records, each compared with what was reported of it."""
    records: list[files.PartRecord] = []
    where = f"{store.uri}/{draft}"
    tree = of.tree
    for writer, regions in of.parts:
        name = files.part_name(writer, item)
        check(name not in contents, f"writer {writer} is twice in the parts of {draft}")
        contents[name] = _read(store, draft, name)
        record = files.decode_part(contents[name], where=where, name=name)
        if record.writer != writer or sorted(record.regions, key=_order) != sorted(
            regions, key=_order
        ):
            raise ManifestCorrupt(
                where, name, f"{len(regions)} reported regions", f"{len(record.regions)} others"
            )
        if record.fingerprint != tree.fingerprint:
            raise ManifestCorrupt(where, name, f"tree {tree.fingerprint}", record.fingerprint)
        records.append(record)
    return records


def _order(region: Region) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return region.leaf, region.box.start, region.box.stop


def _chunks(
    store: Store, draft: str, tree: TreeSpec, records: Sequence[files.PartRecord]
) -> dict[int, tuple[int, ...]]:
    """Chunk shape of every array. Leaves without elements get one of their own."""
    chunks: dict[int, tuple[int, ...]] = {}
    for record in records:
        for number, chunk in record.chunks.items():
            if chunks.setdefault(number, chunk) != chunk:
                raise ManifestCorrupt(
                    f"{store.uri}/{draft}",
                    f"{files.part_name(record.writer)}: chunk of {tree.leaves[number].name}",
                    chunks[number],
                    chunk,
                )
    for index, leaf in enumerate(tree.leaves):
        if leaf.is_stored_as_bytes:
            chunks.setdefault(index, tuple(max(n, 1) for n in leaf.shape))
    return chunks


def _empty_arrays(
    tree: TreeSpec, names: Sequence[str | None], chunks: Mapping[int, tuple[int, ...]]
) -> list[tuple[ArrayPlan, Array]]:
    """Arrays without elements have no writer, and must still be there with shape and dtype."""
    return [
        (
            array_plan(tree, names, index, chunks[index]),
            np.empty(leaf.shape, numpy_dtype(leaf.dtype)),
        )
        for index, leaf in enumerate(tree.leaves)
        if leaf.is_stored_as_bytes and 0 in leaf.shape
    ]


def _scalar_arrays(scalars: Sequence[orbax.ScalarArray]) -> list[tuple[ArrayPlan, Array]]:
    return [
        (
            ArrayPlan(name=scalar.name, dtype=scalar.dtype, shape=(), chunk=()),
            np.asarray(scalar.value, scalar.dtype),
        )
        for scalar in scalars
    ]


def _read(store: Store, draft: str, name: str) -> bytes:
    try:
        return store.read(f"{draft}/{name}")
    except StorageMissing as error:
        raise ManifestCorrupt(f"{store.uri}/{draft}", name, "a file", "nothing") from error
