"""One process of one side of the comparison: makes a state, then saves and restores on request.

Standard library only: the side that runs in an environment of its own imports it too. Requests and
answers are lines of JSON on standard input and output.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from typing import Any, Protocol


class Side(Protocol):
    """What is compared. Made with the case: `mib`, `leaves`, `dtype`, `processes`, `process`."""

    def save(self, folder: str) -> tuple[float, float]:
        """Save. Returns seconds until it is durable, and for how many the caller was kept."""
        ...

    def restore(self, folder: str, layout: str) -> None:
        """Restore to where a program would use it, in a layout, and keep it."""
        ...

    def verify(self) -> bool:
        """Whether what was restored is what was saved, bit for bit. It is given up then."""
        ...

    def drop(self) -> None:
        """Give up what was restored."""
        ...


def main() -> int:
    case: dict[str, Any] = json.loads(sys.argv[1])
    # Libraries write to standard output; the answers have it for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side: Side = importlib.import_module(case["module"]).make(case)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = _carry_out(side, json.loads(line))
        except Exception:  # noqa: BLE001  # It is told to the other side, whatever it is.
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _carry_out(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    what = request["do"]
    if what == "verify":
        return {"is_same": side.verify()}
    if what == "drop":
        side.drop()
        return {"is_dropped": True}
    side.drop()
    _forget_peak()
    before, read_before = _memory("VmRSS"), _bytes_read()
    if what == "save":
        took_s, kept_s = side.save(request["folder"])
    else:
        started_s = time.perf_counter()
        side.restore(request["folder"], request["layout"])
        took_s, kept_s = time.perf_counter() - started_s, 0.0
    return {
        "took_s": took_s,
        "kept_s": kept_s,
        "peak_bytes": max(_memory("VmHWM") - before, 0),
        "read_bytes": _bytes_read() - read_before,
    }


def _forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _memory(field: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field + ":"))
    return int(line.split()[1]) << 10


def _bytes_read() -> int:
    """By system calls that read, wherever from."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


if __name__ == "__main__":
    sys.exit(main())
