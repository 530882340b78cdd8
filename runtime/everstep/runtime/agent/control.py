"""The control block from either side: words that two processes share, and the ring of metrics.

Reading or writing a word is one aligned 64-bit access, which the machine does whole; each word has
one writer (see `link.Word`). No system call, no lock.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence

from everstep.runtime.agent.link import (
    CONTROL_BYTES,
    METRICS_PER_STEP_MAX,
    METRICS_RING_OFFSET,
    METRICS_RING_SLOTS,
    Word,
)

_ENTRY = struct.Struct(f"<qq{METRICS_PER_STEP_MAX}d")


def create_control_file() -> int:
    """A new control block, as a descriptor that the worker inherits, in its initial state."""
    fd = os.memfd_create("everstep-control")
    os.ftruncate(fd, CONTROL_BYTES)
    block = ControlBlock(fd)
    for word in (Word.STEP_DONE, Word.STEP_STARTED, Word.HOLD_AFTER, Word.SLOT_GRANTED):
        block.write(word, -1)
    block.write(Word.SLOT_WRITING, -1)
    block.close()
    return fd


class ControlBlock:
    """A mapping of one control block. The descriptor stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, CONTROL_BYTES, mmap.MAP_SHARED)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:METRICS_RING_OFFSET].cast("q")

    def read(self, word: Word) -> int:
        return self._words[word]

    def write(self, word: Word, value: int) -> None:
        self._words[word] = value

    def record(self, step: int, values: Sequence[float]) -> None:
        """Add one entry to the ring; the oldest is overwritten when the agent fell behind."""
        head = self._words[Word.METRICS_HEAD]
        padded = (*values, *([0.0] * (METRICS_PER_STEP_MAX - len(values))))
        offset = METRICS_RING_OFFSET + (head % METRICS_RING_SLOTS) * _ENTRY.size
        _ENTRY.pack_into(self._map, offset, step, len(values), *padded)
        self._words[Word.METRICS_HEAD] = head + 1

    def entries(self, tail: int) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Entries `tail` to the newest, as (step, values). `head` is then the next tail.

        Entries that were overwritten before they were read are skipped.
        """
        head = self.head
        for index in range(max(tail, head - METRICS_RING_SLOTS), head):
            offset = METRICS_RING_OFFSET + (index % METRICS_RING_SLOTS) * _ENTRY.size
            step, count, *values = _ENTRY.unpack_from(self._map, offset)
            yield step, tuple(values[:count])

    @property
    def head(self) -> int:
        return self._words[Word.METRICS_HEAD]

    def close(self) -> None:
        self._words.release()
        self._bytes.release()
        self._map.close()
