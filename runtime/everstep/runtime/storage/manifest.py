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

FORMAT = 1
MANIFEST = "everstep.json"
ARRAYS = "state"
"""Folder of the arrays in a checkpoint; Orbax's name for the item."""


def part_name(writer: int) -> str:
    return f"everstep.part_{writer}.json"


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


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`everstep.json`. Its digest is in the ledger's entry."""

    format: int
    step: Step
    incarnation: Incarnation
    job_uid: str
    tree: TreeSpec
    arrays: tuple[str | None, ...]
    """Name of each leaf's array; None for a leaf without bytes."""
    chunks: dict[int, tuple[int, ...]]
    writers: tuple[int, ...]
    files: dict[str, str]
    """Digest of every small file of the checkpoint, by path in its folder."""
    extra: dict[str, str]
    versions: dict[str, str]


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def decode_manifest(data: bytes, *, expected_digest: str, where: str) -> CheckpointManifest:
    """Read `everstep.json`.

    Raises:
        ManifestCorrupt: its digest differs, it does not decode, or its format is newer.
    """
    found = digest(data)
    if found != expected_digest:
        raise ManifestCorrupt(where, MANIFEST, expected_digest, found)
    try:
        manifest = msgspec.json.decode(data, type=CheckpointManifest)
    except msgspec.DecodeError as error:
        raise ManifestCorrupt(where, MANIFEST, "a manifest", str(error)) from error
    if manifest.format != FORMAT:
        raise ManifestCorrupt(where, MANIFEST, f"format {FORMAT}", f"format {manifest.format}")
    return manifest


def decode_part(data: bytes, *, where: str, name: str) -> PartRecord:
    try:
        return msgspec.json.decode(data, type=PartRecord)
    except msgspec.DecodeError as error:
        raise ManifestCorrupt(where, name, "the record of a part", str(error)) from error
