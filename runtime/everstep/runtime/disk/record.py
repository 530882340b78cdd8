"""The record of a local copy: its last file, and the only thing that makes it one. Pure."""

from __future__ import annotations

import hashlib

import msgspec

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.errors import ManifestCorrupt
from everstep.runtime.layout.boxes import whole
from everstep.runtime.layout.checksums import block_count
from everstep.runtime.layout.dtypes import itemsize
from everstep.runtime.layout.manifest import SnapshotManifest

FORMAT = 1
RECORD = "copy.json"
LOCK = "owner.lock"
COPY_PREFIX = "copy-"


class CopyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a local copy is of. Its manifests carry a CRC-32C for every block of its bytes."""

    format: int = FORMAT
    run: str
    """Whose step it is: the uid of a job, or the address of a run."""
    owner: str
    """Who wrote it: a host, or a process of a program."""
    step: Step
    incarnation: Incarnation
    digest: str
    """Of the manifest of the commit that it equals; empty when the step was not committed then."""
    items: dict[str, SnapshotManifest]
    """By named part of the step. The bytes of each are in a file of that name."""


class _Format(msgspec.Struct):
    format: int


def bytes_name(item: str) -> str:
    """File with the bytes of one item."""
    return f"{item}.bytes"


def run_folder(run: str) -> str:
    """Name of the folder of a run, which may be called anything."""
    return f"run-{hashlib.sha256(run.encode()).hexdigest()[:24]}"


def copy_folder(number: int) -> str:
    return f"{COPY_PREFIX}{number:010d}"


def number_of(folder: str) -> int | None:
    """The number of a copy's folder; None for a folder that is none."""
    digits = folder.removeprefix(COPY_PREFIX)
    return int(digits) if folder == f"{COPY_PREFIX}{digits}" and digits.isdigit() else None


def size_bytes(record: CopyRecord) -> int:
    """Of all its bytes."""
    return sum(manifest.plot.size_bytes for manifest in record.items.values())


def encode_record(record: CopyRecord) -> bytes:
    """The record and its own digest, so that no bit of it can change unseen."""
    body = msgspec.json.encode(record)
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def decode_record(data: bytes, *, where: str) -> CopyRecord:
    """Read a record.

    Raises:
        ManifestCorrupt: it is torn, altered, or of a newer version; `where` is in the message.
    """
    body, _, rest = data.rstrip(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != rest:
        raise ManifestCorrupt(where, RECORD, "a record with its digest", "a torn or altered one")
    try:
        found = msgspec.json.decode(body, type=_Format).format
        if found != FORMAT:
            raise ManifestCorrupt(where, RECORD, f"format {FORMAT}", f"format {found}")
        record = msgspec.json.decode(body, type=CopyRecord)
    except (msgspec.DecodeError, ValueError) as error:
        raise ManifestCorrupt(where, RECORD, "a record", str(error)) from error
    for item, manifest in record.items.items():
        _check_manifest(manifest, where, item)
    return record


def _check_manifest(manifest: SnapshotManifest, where: str, item: str) -> None:
    """That it is whole: every shard inside the bytes and its leaf, every block with a checksum."""
    plot, leaves = manifest.plot, manifest.plot.tree.leaves
    for shard in plot.shards:
        leaf = leaves[shard.leaf] if 0 <= shard.leaf < len(leaves) else None
        if (
            leaf is None
            or len(shard.box.start) != len(leaf.shape)
            or not whole(leaf.shape).contains(shard.box)
            or shard.size_bytes != shard.box.size * itemsize(leaf.dtype)
            or not 0 <= shard.offset <= plot.size_bytes - shard.size_bytes
        ):
            raise ManifestCorrupt(where, item, "shards of its leaves", f"{shard}")
    counts = [block_count(shard.size_bytes) for shard in plot.shards]
    if [len(crcs) for crcs in manifest.crcs] != counts:
        raise ManifestCorrupt(where, item, "a checksum of every block", "another count")
