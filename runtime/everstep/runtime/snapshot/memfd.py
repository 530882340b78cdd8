"""Anonymous shared memory. Nothing of it has a name, so nothing can be left behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = mmap.PAGESIZE


class SharedMemory:
    """One memfd whose pages all exist, mapped for reading and writing.

    The memory lives until the last descriptor and the last mapping are gone, in any process. Its
    size is sealed: a holder of the descriptor cannot shorten it under somebody else's mapping.
    """

    __slots__ = ("_map", "fd", "size_bytes")

    def __init__(self, name: str, size_bytes: int) -> None:
        """Make the memory and all its pages.

        Raises:
            MemoryError: the kernel would not give that many pages.

        **Blocking**: touches every page once, about one second per GiB.
        """
        self.size_bytes = max(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES, PAGE_BYTES)
        # The kernel takes names of up to 249 bytes; it is shown in /proc and has no other use.
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.fd = os.memfd_create(name[:200], flags)
        try:
            os.posix_fallocate(self.fd, 0, self.size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map: mmap.mmap | None = mmap.mmap(
                self.fd, self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
            )
        except OSError as error:
            os.close(self.fd)
            if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
                raise MemoryError(f"{size_bytes} bytes of shared memory: {error}") from error
            raise

    def bytes(self) -> NDArray[np.uint8]:
        """All of the memory, writable. Keeps the mapping alive as long as it is referenced."""
        if self._map is None:
            raise KeyError("this memory is closed")
        return np.frombuffer(self._map, dtype=np.uint8)

    def view(self) -> memoryview:
        """All of the memory, read only."""
        return self.bytes().data.toreadonly()

    def close(self) -> None:
        """Give up this descriptor and mapping; memory still viewed lives on until it is not."""
        if self._map is not None:
            self._map = None
            os.close(self.fd)
