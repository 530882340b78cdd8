"""Saving to and restoring from an object server on this machine, against Orbax on the same one.

The server takes part in every figure: it shares the cores, and computes MD5 and CRC-32C of all that
it gets. What it can do at most is shown beside: the same bytes, sent in as many requests.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from benchmarks.figures import Arguments, Figure, compared, reaching

MIB = 1 << 20
LEAVES = 16
BUCKET = "bench"
OBJECT_BYTES = 8 * MIB
REACH = 2.0


def run(arguments: Arguments) -> list[Figure]:
    sys.path.append("tests/harness")
    from object_server import ObjectServer

    # Orbax's way to a bucket tells at each call that there are no credentials.
    logging.getLogger("gcsfs").setLevel(logging.ERROR)
    size, count = (32 * MIB, 2) if arguments.quick else (256 * MIB, 5)
    with ObjectServer() as server:
        server.make_bucket(BUCKET)
        os.environ.pop("GOOGLE_APPLICATION_CREDENTIALS", None)
        os.environ.update(server.environment())
        times = _measure(size, count, arguments.seed)
    medians = {name: statistics.median(found) for name, found in times.items()}
    figures = [
        _figure(f"{verb}, {size // MIB} MiB f32 in {LEAVES} leaves", verb, medians)
        for verb in ("save", "restore")
    ]
    bare = compared(
        "save, beside the bare requests",
        medians["save ours"],
        "s",
        against="the same bytes sent in 8 MiB objects",
        against_value=medians["save bare"],
    )
    return [*figures, bare]


def _figure(name: str, verb: str, medians: dict[str, float]) -> Figure:
    ours, orbax = medians[f"{verb} ours"], medians[f"{verb} orbax"]
    figure = compared(name, ours, "s", against="Orbax, same server", against_value=orbax)
    return reaching(figure, f"Orbax takes {REACH:g} times as long", orbax >= REACH * ours)


def _measure(size: int, count: int, seed: int) -> dict[str, list[float]]:
    """Seconds of each verb and side, in turns; the first round is thrown away."""
    import orbax.checkpoint as ocp

    import everstep.runtime as es
    from everstep.runtime.storage.open import open_store

    dice = np.random.default_rng(seed)
    shape = (size // 4 // LEAVES // 1024, 1024)
    host = {f"w{n}": dice.standard_normal(shape, dtype=np.float32) for n in range(LEAVES)}
    state = jax.block_until_ready(jax.device_put(host))
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    times: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, act: Callable[[], Any], number: int) -> Any:
        started_s = time.perf_counter()
        result = act()
        if number:
            times[name].append(time.perf_counter() - started_s)
        return result

    def check(restored: Any) -> None:
        assert all(np.array_equal(restored[name], value) for name, value in host.items())

    for number in range(count + 1):
        with es.Checkpoints(f"gs://{BUCKET}/ours-{number}") as ours:
            timed("save ours", lambda: ours.save(1, state).wait(), number)
        with es.Checkpoints(f"gs://{BUCKET}/ours-{number}") as ours:
            back = timed(
                "restore ours",
                lambda: jax.block_until_ready(ours.restore(state)),
                number,
            )
        check(back)
        with ocp.StandardCheckpointer() as orbax:
            folder = f"gs://{BUCKET}/orbax-{number}"

            def save() -> None:
                orbax.save(folder, state)  # noqa: B023
                orbax.wait_until_finished()

            timed("save orbax", save, number)
            back = timed(
                "restore orbax",
                lambda: jax.block_until_ready(orbax.restore(folder, abstract)),  # noqa: B023
                number,
            )
        check(back)
        timed("save bare", lambda: _send(host, number), number)  # noqa: B023
        # The server keeps all in memory.
        store = open_store(f"gs://{BUCKET}")
        for name in store.list(""):
            store.delete_tree(name)
    return times


def _send(host: dict[str, Any], number: int) -> None:
    from everstep.runtime.storage.gcs import THREADS, GcsBucket
    from everstep.runtime.storage.objects import Body

    bucket = GcsBucket(BUCKET)
    pieces = [
        flat[start : start + OBJECT_BYTES]
        for value in host.values()
        for flat in [value.reshape(-1).view(np.uint8)]
        for start in range(0, flat.size, OBJECT_BYTES)
    ]

    def send(index: int) -> None:
        piece = pieces[index]
        assert bucket.create(f"bare-{number}/{index}", Body(piece.size, lambda: iter([piece])))

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(send, range(len(pieces))))
