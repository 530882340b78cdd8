"""An agent in an odd world, as `everstep-agent` otherwise.

Environment: `CLOCK_AHEAD_S` (by how much its clock is ahead, `slice:seconds` with commas between),
`SLOW_STORAGE` (path of a file: while it exists, regions reach storage at `STORAGE_BYTES_PER_S`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from everstep.runtime.agent.main import main
from everstep.runtime.checkpoint import draft
from everstep.runtime.clock import SystemClock
from everstep.runtime.layout.manifest import Region

Read = Callable[[Region], NDArray[Any]]


def set_clock(ahead_s: float) -> None:
    def unix_s(_: SystemClock) -> float:
        return time.time() + ahead_s

    type.__setattr__(SystemClock, "unix_s", unix_s)


def slow_storage(flag: str, bytes_per_s: float) -> None:
    write_regions = draft.write_regions

    def write_slowly(*arguments: Any, read: Read, **options: Any) -> int:
        def read_slowly(region: Region) -> NDArray[Any]:
            values = read(region)
            if os.path.exists(flag):
                time.sleep(values.nbytes / bytes_per_s)
            return values

        return write_regions(*arguments, read=read_slowly, **options)

    draft.write_regions = write_slowly


def own_slice() -> str:
    return sys.argv[sys.argv.index("--slice") + 1]


if __name__ == "__main__":
    ahead = dict(one.split(":") for one in os.environ.get("CLOCK_AHEAD_S", "").split(",") if one)
    set_clock(float(ahead.get(own_slice(), "0")))
    if "SLOW_STORAGE" in os.environ:
        slow_storage(os.environ["SLOW_STORAGE"], float(os.environ["STORAGE_BYTES_PER_S"]))
    main()
