"""From the address in a job's spec to a store."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from everstep.runtime.errors import ConfigurationError, StorageRefused
from everstep.runtime.storage.posix import PosixStore
from everstep.runtime.storage.store import Store

FIELD = "spec.checkpoint.uri"
_EXPECTED = "an absolute path, or file:///absolute/path"


def open_store(uri: str) -> Store:
    """Open the folder of a run. It need not exist yet; nothing is created.

    Args:
        uri: an absolute path, or `file:///absolute/path`.

    Raises:
        ConfigurationError: another kind of address.
        StorageRefused: a file is where the folder should be.
    """
    parts = urlsplit(uri) if "://" in uri else None
    if parts is None:
        path = uri
    elif parts.scheme != "file":
        raise ConfigurationError(FIELD, uri, f"{_EXPECTED}; {parts.scheme}:// is not supported yet")
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
    return PosixStore(path)
