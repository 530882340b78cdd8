"""A training program without jax that speaks the link as a worker does, for tests of the agent.

Its state is one array whose every element is the number of finished steps, replicated over all
hosts or (`SHARDED=1`) divided among them by rows; with `MARKED=1` each row has a number of its own
added. Environment: `STEPS`, `STEP_S`, `MEETING` (path of the file in which members wait for each
other), `SNAPSHOT_KB`, `PREPARE_S` (time before the state is there, from the second incarnation on),
`STALL_RANK` and `STALL_S` (a restore that takes so long), `PAUSE_AT` and `PAUSE_S` (a long
evaluation), `FAULT` (`import`, `exit-at-import`, `thread`, `raise`, `os-exit`, `loader`, `SIGABRT`,
`SIGSEGV`), `FAULT_STEP`, `FAULT_RANK` (-1: all).
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

import numpy as np

from everstep.controller.api.ids import Step
from everstep.controller.api.wire import RestoreFigures
from everstep.runtime.agent.control import ControlBlock
from everstep.runtime.agent.frames import LinkClosed, receive, send
from everstep.runtime.agent.link import (
    ENV_LINK_FD,
    ENV_ZYGOTE_FD,
    EXIT_CODES,
    SPARE_NAME,
    WORKER_NAME,
    AgentFrame,
    Assignment,
    Captured,
    Connected,
    Ending,
    EndKind,
    FirstStepDone,
    HoldKind,
    MetricNames,
    PlotAnnounced,
    Restored,
    SlotsGranted,
    Warmed,
    WarmUp,
    Word,
    WorkerPhase,
)
from everstep.runtime.agent.process import name_process
from everstep.runtime.agent.signals import pass_by_in_worker
from everstep.runtime.agent.zygote import serve
from everstep.runtime.layout.boxes import Box
from everstep.runtime.layout.manifest import Plot, Region, Shard
from everstep.runtime.layout.tree import Key, KeyKind, Leaf, LeafKind, TreeSpec
from everstep.runtime.restore.fetch import Fetch
from everstep.runtime.restore.outcome import Target
from everstep.runtime.restore.peers import PeerMemory
from everstep.runtime.restore.reshard import SourceHolding, SourceKind, plan_reads
from everstep.runtime.snapshot.slots import SlotWriter

ROWS = 12
STEPS = int(os.environ.get("STEPS", "20"))
STEP_S = float(os.environ.get("STEP_S", "0.02"))
COLUMNS = int(os.environ.get("SNAPSHOT_KB", "48")) * 1024 // 4 // ROWS
FAULT = os.environ.get("FAULT", "")
FAULT_STEP = int(os.environ.get("FAULT_STEP", "3"))
FAULT_RANK = int(os.environ.get("FAULT_RANK", "-1"))
IS_SHARDED = os.environ.get("SHARDED") == "1"
IS_MARKED = os.environ.get("MARKED") == "1"
ROW_MARK = 1 << 16

TREE = TreeSpec(
    leaves=(
        Leaf(
            path=(Key(KeyKind.DICT, "w"),),
            kind=LeafKind.ARRAY,
            dtype="float32",
            shape=(ROWS, COLUMNS),
        ),
    )
)


def own_box(assignment: Assignment) -> Box:
    if not IS_SHARDED:
        return Box((0, 0), (ROWS, COLUMNS))
    count, rank = assignment.process_count, assignment.rank
    return Box((ROWS * rank // count, 0), (ROWS * (rank + 1) // count, COLUMNS))


class Training:
    def __init__(self, sock: socket.socket, assignment: Assignment, fds: list[int]) -> None:
        self.sock = sock
        self.assignment = assignment
        self.control = ControlBlock(fds[0])
        self.own_slots = fds[1:]
        self.box = own_box(assignment)
        rows = np.arange(self.box.start[0], self.box.stop[0], dtype=np.float32)
        self.marks = rows[:, None] * (ROW_MARK if IS_MARKED else 0)
        self.state = np.zeros(self.box.shape, np.float32) + self.marks
        self.writer: SlotWriter | None = None
        self.last_slot = -1
        self.others = self.meet()

    def meet(self) -> memoryview:
        """Steps that each rank has begun, in a file that stands for the collectives."""
        count, incarnation = self.assignment.process_count, self.assignment.incarnation
        path = f"{os.environ['MEETING']}-{incarnation}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 8 * count)
        return memoryview(mmap.mmap(fd, 8 * count)).cast("q")

    def meet_in(self, step: int) -> None:
        """A step needs all members: nobody finishes it before everyone has begun it."""
        self.others[self.assignment.rank] = step + 1
        time.sleep(STEP_S)
        while min(self.others) < step + 1:
            time.sleep(0.0005)

    def run(self) -> EndKind:
        self.control.write(Word.PHASE, WorkerPhase.CONNECTING)
        if self.assignment.coordinator_address:
            host, _, port = self.assignment.coordinator_address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=5).close()
        send(self.sock, Connected(pid=os.getpid(), start_s=0.0))
        self.control.write(Word.PHASE, WorkerPhase.PREPARING)
        if self.assignment.incarnation > 1:
            time.sleep(float(os.environ.get("PREPARE_S", "0")))
        self.control.write(Word.PHASE, WorkerPhase.RESTORING)
        if os.environ.get("STALL_RANK") == str(self.assignment.rank):
            time.sleep(float(os.environ["STALL_S"]))
        step = self.restore()
        self.control.write(Word.STEP_STARTED, step)
        self.control.write(Word.STEP_DONE, step)
        self.announce()
        self.control.write(Word.PHASE, WorkerPhase.COMPILING)
        send(self.sock, MetricNames(names=("loss",)))
        return self.train(step)

    def restore(self) -> int:
        assignment = self.assignment
        step = assignment.restore_step
        source, own_bytes, peer_bytes = "fresh", 0, 0
        if step is not None and assignment.holdings:
            source = "memory"
            own = {
                id_: mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
                for id_, fd in zip(assignment.own_slots, self.own_slots, strict=True)
            }
            assert all(len(memory) for memory in own.values())
            outcome = self.fetch()
            own_bytes = outcome.get(SourceKind.OWN, 0)
            peer_bytes = outcome.get(SourceKind.PEER, 0)
            wanted = self.marks + step
            assert (self.state == wanted).all(), f"restored {self.state[:, 0]}, expected {wanted}"
        elif step is not None:
            source = "storage"
            self.state[:] = self.marks + step
        figures = RestoreFigures(
            incarnation=assignment.incarnation,
            step=Step(step or 0),
            source=source,
            own_bytes=own_bytes,
            peer_bytes=peer_bytes,
        )
        send(self.sock, Restored(figures=figures))
        return step or 0

    def fetch(self) -> dict[SourceKind, int]:
        assignment = self.assignment
        memories: dict[int, PeerMemory] = {}
        holdings: list[SourceHolding] = []
        for index, holding in enumerate(assignment.holdings):
            kind = SourceKind.OWN if holding.host == assignment.host else SourceKind.PEER
            memories[index] = PeerMemory(
                holding, kind=kind, token=assignment.token, incarnation=assignment.incarnation
            )
            holdings.append(SourceHolding(index=index, kind=kind, shards=holding.shards))
        region = Region(0, self.box)
        plan = plan_reads([region], holdings, TREE)
        fetch = Fetch(
            TREE, [Target(region=region, array=self.state)], memories, {}, memory_bytes=1 << 24
        )
        outcome = fetch.execute(plan.reads)
        assert not outcome.missing, outcome.rejected
        return outcome.bytes_by_kind

    def announce(self) -> None:
        plot = Plot(
            tree=TREE,
            shards=(Shard(0, self.box, 0, self.state.nbytes),),
            size_bytes=max(64, self.state.nbytes),
        )
        send(self.sock, PlotAnnounced(plot=plot))
        frame, fds = receive(self.sock, AgentFrame, 64)
        assert isinstance(frame, SlotsGranted), frame
        self.writer = SlotWriter(fds, frame.size_bytes, plot)

    def train(self, step: int) -> EndKind:
        is_first = True
        while step < STEPS:
            self.control.write(Word.STEP_STARTED, step + 1)
            self.meet_in(step)
            if step + 1 == FAULT_STEP and FAULT_RANK in (-1, self.assignment.rank):
                self.misbehave()
            if step + 1 == int(os.environ.get("PAUSE_AT", "-1")):
                time.sleep(float(os.environ["PAUSE_S"]))
            step += 1
            self.state += 1
            self.control.record(step, (1.0 / step,))
            self.control.write(Word.STEP_DONE, step)
            hold = self.control.read(Word.HOLD_AFTER)
            is_leaving = (
                hold == step
                and self.control.read(Word.HOLD_KIND) == HoldKind.LEAVE
                and self.control.read(Word.HOLD_AFTER) == step
            )
            every = self.control.read(Word.SNAPSHOT_EVERY)
            if is_first:
                is_first = False
                self.control.write(Word.PHASE, WorkerPhase.TRAINING)
                send(self.sock, FirstStepDone(step=Step(step), at_s=time.time()))
            if hold == step or step == STEPS or (every and step % every == 0):
                self.capture(step, is_required=hold == step or step == STEPS)
            if is_leaving:
                return self.end(EndKind.LEFT, step)
        return self.end(EndKind.DONE, step)

    def capture(self, step: int, *, is_required: bool) -> None:
        deadline_s = time.monotonic() + 60
        while (slot := self.control.read(Word.SLOT_GRANTED)) in (-1, self.last_slot):
            if not is_required:
                return
            assert time.monotonic() < deadline_s, "no slot was granted"
            time.sleep(0.001)
        assert self.writer is not None
        self.control.write(Word.SLOT_WRITING, slot)
        self.writer.write(slot, [self.state])
        self.last_slot = slot
        send(self.sock, Captured(slot=slot, step=Step(step), copy_s=0.0001))
        self.control.write(Word.SLOT_WRITING, -1)

    def misbehave(self) -> None:
        once = os.environ.get("FAULT_ONCE")
        if once is not None:
            if os.path.exists(once):
                return
            open(once, "w").close()
        if FAULT == "raise":
            sys.stderr.write("Traceback: a fault of the user's\n")
            self.end(EndKind.USER_ERROR, FAULT_STEP - 1, "ValueError: a fault of the user's")
            os._exit(EXIT_CODES[EndKind.USER_ERROR])
        if FAULT == "os-exit":
            os._exit(3)
        if FAULT in ("SIGABRT", "SIGSEGV"):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.raise_signal(signal.Signals[FAULT])
        if FAULT == "hang":
            time.sleep(3600)
        if FAULT == "loader" and os.fork() == 0:
            time.sleep(3600)

    def end(self, kind: EndKind, step: int, message: str = "") -> EndKind:
        self.control.write(Word.PHASE, WorkerPhase.ENDING)
        send(self.sock, Ending(kind=kind, step=Step(step), message=message))
        return kind


def enter(sock: socket.socket, control_fd: int, slots: list[int]) -> NoReturn:
    assignment, fds = receive(sock, WarmUp | Assignment, 250)
    while isinstance(assignment, WarmUp):
        name_process(SPARE_NAME)
        send(sock, Warmed())
        assignment, fds = receive(sock, WarmUp | Assignment, 250)
    name_process(WORKER_NAME)
    for fd in (control_fd, *slots):
        if fd >= 0:
            os.close(fd)
    try:
        kind = Training(sock, assignment, fds).run()
    except LinkClosed:
        kind = EndKind.COLLECTIVE_ERROR
    sys.stdout.flush()
    os._exit(EXIT_CODES[kind])


def main() -> None:
    if FAULT == "import":
        raise ValueError("a fault at import")
    if FAULT == "exit-at-import":
        sys.exit(0)
    if FAULT == "thread":
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    if ENV_ZYGOTE_FD in os.environ:
        serve(int(os.environ[ENV_ZYGOTE_FD]), enter=enter)
    pass_by_in_worker()
    enter(socket.socket(fileno=int(os.environ[ENV_LINK_FD])), -1, [])


if __name__ == "__main__":
    main()
