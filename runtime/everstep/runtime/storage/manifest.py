"""The two small files of a checkpoint that are ours alone: `everstep.json` and one per writer.

They name every array, chunk and checksum, so that what is read back can be compared with what was
written, not only with itself.
"""

from __future__ import annotations

import hashlib

import msgspec

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.errors import ManifestCorrupt
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.tree import TreeSpec

FORMAT = 2
_READABLE = (1, FORMAT)
MANIFEST = "everstep.json"
STATE = "state"
"""Name of the only item where the user gave one tree; Orbax's word for a named part of a step."""
PYTREE = "pytree"
"""Handler of an item of arrays."""


def part_name(writer: int, item: str = STATE) -> str:
    """File of what one writer wrote of an item. Those of `state` are as in format 1."""
    return f"everstep.part_{writer}.json" if item == STATE else f"everstep.{item}_{writer}.json"


def writer_folder(writer: int) -> str:
    return f"ocdbt.process_{writer}"


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one writer put into a draft; its last file there."""

    writer: int
    fingerprint: str
    chunks: dict[int, tuple[int, ...]]
    """Chunk shape by leaf index, of the leaves in `regions`."""
    regions: tuple[Region, ...]
    crcs: tuple[tuple[int, ...], ...]
    """CRC-32C of every chunk of every region, in C order of the region's chunks."""
    bytes_written: int


class ItemManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One named part of a step: arrays in a tree, or files that a handler wrote."""

    handler: str
    """`PYTREE`, or the name of what wrote the files."""
    tree: TreeSpec = TreeSpec(leaves=())
    arrays: tuple[str | None, ...] = ()
    """Name of each leaf's array; None for a leaf without bytes."""
    chunks: dict[int, tuple[int, ...]] = {}
    writers: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    """Of a handler, by path below the item's folder."""
    extra: dict[str, str] = {}
    """Values of its Python scalars, where they are not in the step's `extra`."""


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`everstep.json`. Its digest is in the ledger's entry."""

    format: int
    step: Step
    incarnation: Incarnation
    job_uid: str
    items: dict[str, ItemManifest]
    files: dict[str, str]
    """Digest of every small file of the checkpoint, by path in its folder."""
    extra: dict[str, str]
    versions: dict[str, str]


class _Format(msgspec.Struct):
    format: int


class _Manifest1(msgspec.Struct, frozen=True, kw_only=True):
    """Format 1 had one item."""

    format: int
    step: Step
    incarnation: Incarnation
    job_uid: str
    tree: TreeSpec
    arrays: tuple[str | None, ...]
    chunks: dict[int, tuple[int, ...]]
    writers: tuple[int, ...]
    files: dict[str, str]
    extra: dict[str, str]
    versions: dict[str, str]

    def as_newest(self) -> CheckpointManifest:
        item = ItemManifest(
            handler=PYTREE,
            tree=self.tree,
            arrays=self.arrays,
            chunks=self.chunks,
            writers=self.writers,
        )
        return CheckpointManifest(
            format=self.format,
            step=self.step,
            incarnation=self.incarnation,
            job_uid=self.job_uid,
            items={STATE: item},
            files=self.files,
            extra=self.extra,
            versions=self.versions,
        )


class FormatNewer(ManifestCorrupt):
    """A newer version wrote the step. It is sound, so no older one is to be taken for it."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__(
            where,
            MANIFEST,
            f"format {FORMAT} at most",
            f"format {number}, of a newer version of Everstep, which reads it",
        )


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def decode_manifest(data: bytes, *, expected_digest: str, where: str) -> CheckpointManifest:
    """Read `everstep.json`.

    Raises:
        ManifestCorrupt: its digest differs, or it does not decode.
        FormatNewer: a newer version wrote it.
    """
    found = digest(data)
    if found != expected_digest:
        raise ManifestCorrupt(where, MANIFEST, expected_digest, found)
    try:
        number = msgspec.json.decode(data, type=_Format).format
        if number not in _READABLE:
            raise FormatNewer(where, number)
        if number == 1:
            return msgspec.json.decode(data, type=_Manifest1).as_newest()
        return msgspec.json.decode(data, type=CheckpointManifest)
    except msgspec.DecodeError as error:
        raise ManifestCorrupt(where, MANIFEST, "a manifest", str(error)) from error


def decode_part(data: bytes, *, where: str, name: str) -> PartRecord:
    try:
        return msgspec.json.decode(data, type=PartRecord)
    except msgspec.DecodeError as error:
        raise ManifestCorrupt(where, name, "the record of a part", str(error)) from error
