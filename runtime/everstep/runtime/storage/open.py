"""From the address in a job's spec to a store."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from everstep.runtime.errors import ConfigurationError, StorageRefused
from everstep.runtime.storage.buckets import BucketStore
from everstep.runtime.storage.posix import PosixStore
from everstep.runtime.storage.store import Store

FIELD = "spec.checkpoint.uri"
_EXPECTED = "an absolute path, file:///absolute/path, or gs://bucket/path"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_LACKING = {
    "s3": "no client for s3:// among Everstep's dependencies both creates an object only if it "
    "does not exist and shows the checksum that was stored, and a commit rests on both",
}


def open_store(uri: str) -> Store:
    """Open the folder of a run. It need not exist yet; nothing is created.

    Args:
        uri: an absolute path, `file:///absolute/path`, or `gs://bucket/path`.

    Raises:
        ConfigurationError: another kind of address.
        StorageRefused: a file is where the folder should be; the bucket is missing or forbidden.
        StorageUnavailable: the bucket does not answer.

    Blocking: for a bucket, until it has answered once.
    """
    scheme, separator, rest = uri.partition("://")
    if separator and scheme == "gs":
        return _open_gcs(uri, rest)
    return PosixStore(_folder(uri))


def _folder(uri: str) -> str:
    parts = urlsplit(uri) if "://" in uri else None
    if parts is None:
        path = uri
    elif parts.scheme != "file":
        why = _LACKING.get(parts.scheme, f"{parts.scheme}:// is not supported")
        raise ConfigurationError(FIELD, uri, f"{_EXPECTED}; {why}")
    elif parts.netloc not in ("", "localhost"):
        raise ConfigurationError(
            FIELD, uri, f"{_EXPECTED}; {parts.netloc!r} would be a host (three slashes?)"
        )
    else:
        path = unquote(parts.path)
    if not os.path.isabs(path) or "\0" in path:
        raise ConfigurationError(FIELD, uri, _EXPECTED)
    if os.path.exists(path) and not os.path.isdir(path):
        raise StorageRefused(path, "a file", "a folder, or nothing yet")
    return path


def _open_gcs(uri: str, rest: str) -> Store:
    bucket, _, path = rest.partition("/")
    path = path.rstrip("/")
    parts = path.split("/") if path else []
    if not _BUCKET.fullmatch(bucket) or any(
        part in ("", ".", "..") or not part.isprintable() for part in parts
    ):
        raise ConfigurationError(FIELD, uri, _EXPECTED)
    # Only here: Google's clients take a second to import, and most runs have no bucket.
    from everstep.runtime.storage.gcs import GcsBucket

    store = BucketStore(GcsBucket(bucket), path, driver="gcs", bucket=bucket)
    store.probe()
    return store
