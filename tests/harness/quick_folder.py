"""A folder in memory where there is one: for tests that save hundreds of times.

What they try does not depend on how long a disk takes to sync.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

_MEMORY = "/dev/shm"


@contextlib.contextmanager
def quick_folder() -> Generator[Path]:
    """A new folder that is gone afterwards."""
    where = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="quick-", dir=where) as folder:
        yield Path(folder)
