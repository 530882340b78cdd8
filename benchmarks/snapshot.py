"""How long a snapshot blocks a step, against a plain copy into memory that was touched before.

The worker's own path is measured, with everything in it: the state taken apart, the layout
checked, the granted slot read from the control block, the copy, the word to the agent. The agent
is this process too, but what it does afterwards (checksums, the next grant) is not in the time,
as it is not in a step's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks.figures import Arguments, Figure, alternating, compared, reaching

MIB = 1 << 20
LEAF_COUNT = 16
SIZES = {"1 element": 4, "64 MiB": 64 * MIB, "256 MiB": 256 * MIB, "1 GiB": 1024 * MIB}
RATIO_MAX = 1.3
ONE_ELEMENT_S_MAX = 2e-3
IDLE_STEP_S_MAX = 50e-6
IDLE_STEPS = 3000


def run(arguments: Arguments) -> list[Figure]:
    # Settled before jax is imported: a host with two devices, as in the demo.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")
    figures: list[Figure] = []
    for name, size_bytes in SIZES.items():
        if arguments.quick and size_bytes > 64 * MIB:
            continue
        count = 3 if arguments.quick else max(9, min(200, 4096 * MIB // max(size_bytes, 1)))
        figures.append(_blocked(name, size_bytes, count))
    figures.append(_idle_step())
    return figures


def _blocked(name: str, size_bytes: int, count: int) -> Figure:
    import jax
    import numpy as np

    state = _state(size_bytes)
    sources = [
        np.asarray(shard.data) for leaf in state.values() for shard in leaf.addressable_shards
    ]
    # Written once, so that its pages exist: that is the memory a slot is made of too.
    targets = [np.ones_like(source) for source in sources]
    jax.block_until_ready(state)

    def plain_copy() -> float:
        started_s = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)
        return time.perf_counter() - started_s

    with ExitStack() as stack:
        snapshot = _worker(state, stack)
        blocked_s, copy_s = alternating(snapshot, plain_copy, count=count)
    figure = compared(
        f"step blocked by a snapshot of {name}",
        blocked_s,
        "s",
        against="a plain copy into touched memory",
        against_value=copy_s,
    )
    if size_bytes < MIB:
        reach = f"<= {ONE_ELEMENT_S_MAX * 1e3:g} ms"
        return reaching(figure, reach, blocked_s <= ONE_ELEMENT_S_MAX)
    return reaching(figure, f"<= {RATIO_MAX} x that copy", blocked_s <= RATIO_MAX * copy_s)


def _state(size_bytes: int) -> dict[str, Any]:
    """f32 leaves sharded over all devices; one leaf of one element for the smallest."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows, replicated = (NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
    if size_bytes < MIB:
        return {"a": jax.device_put(np.ones(1, np.float32), replicated)}
    length = size_bytes // LEAF_COUNT // 4
    return {
        f"leaf {number}": jax.device_put(np.full(length, number, np.float32), rows)
        for number in range(LEAF_COUNT)
    }


def _worker(state: Any, stack: ExitStack) -> Callable[[], float]:
    """A worker with real slots; each call takes one snapshot and returns how long it blocked."""
    from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step
    from everstep.runtime.agent.control import ControlBlock, create_control_file
    from everstep.runtime.agent.frames import receive, send
    from everstep.runtime.agent.link import Captured, PlotAnnounced, SlotsGranted, Word
    from everstep.runtime.clock import SystemClock
    from everstep.runtime.loop.slots import AgentSlots
    from everstep.runtime.snapshot.shelf import Shelf

    ours, agents = socket.socketpair()
    stack.callback(ours.close)
    stack.callback(agents.close)
    control_fd = create_control_file()
    stack.callback(os.close, control_fd)
    control = ControlBlock(control_fd)
    host = HostId(SliceId(0), 0)
    shelf = Shelf(host=host, slots=2, bytes_max=None, namespace="bench")
    stack.callback(shelf.close)

    def grant_slots() -> None:
        frame, _ = receive(agents, PlotAnnounced)
        fds = shelf.allocate(frame.plot)
        send(agents, SlotsGranted(count=len(fds), size_bytes=shelf.slot_size_bytes), fds)

    agent = threading.Thread(target=grant_slots)
    agent.start()
    slots = AgentSlots(ours, control, SystemClock(), grant_timeout_s=10.0)
    slots.prepare(state)
    agent.join()
    step = 0

    def snapshot() -> float:
        nonlocal step
        step += 1
        granted = shelf.grant()
        control.write(Word.SLOT_GRANTED, -1 if granted is None else granted)
        started_s = time.perf_counter()
        slots.capture(Step(step), state, is_required=True)
        blocked_s = time.perf_counter() - started_s
        frame, _ = receive(agents, Captured)
        asyncio.run(shelf.complete(frame.slot, frame.step, Incarnation(1), dict(frame.extra)))
        return blocked_s

    return snapshot


def _idle_step() -> Figure:
    """What the loop itself costs in a step that takes no snapshot."""
    import jax.numpy as jnp

    from everstep.runtime.testing.memory_keeper import MemoryKeeper

    run = MemoryKeeper().start()
    state = run.restore(lambda: {"w": jnp.zeros(8)})
    loss = jnp.float32(0.5)
    costs: list[float] = []
    for step in run.steps(IDLE_STEPS):
        started_s = time.perf_counter()
        run.step_done(step, state, {"loss": loss})
        costs.append(time.perf_counter() - started_s)
    cost_s = statistics.median(costs)
    figure = Figure(name="a step without a snapshot", value=cost_s, unit="s")
    return reaching(figure, f"< {IDLE_STEP_S_MAX * 1e6:g} µs", cost_s < IDLE_STEP_S_MAX)
