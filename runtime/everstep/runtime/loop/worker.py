"""One worker from its assignment to its ending. Its process ends with it.

Runs in a process that the zygote forked or that was started afresh; both come here with one end of
a link. What happens, in order: the assignment is read, jax is configured and connected, the user's
`train` runs, its end is judged, said in one frame, and the process exits with the code of that
kind. The agent may kill it anywhere in between.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import NoReturn, assert_never

from everstep.controller.api.ids import SliceId, Step
from everstep.runtime.agent.control import ControlBlock
from everstep.runtime.agent.frames import LinkClosed, receive, send
from everstep.runtime.agent.link import (
    EXIT_CODES,
    SPARE_NAME,
    WORKER_NAME,
    Assignment,
    Connected,
    Ending,
    EndKind,
    Warmed,
    WarmUp,
    Word,
    WorkerPhase,
    patience_of,
)
from everstep.runtime.agent.process import name_process
from everstep.runtime.clock import Clock, SystemClock
from everstep.runtime.errors import EverstepError, InvariantViolated
from everstep.runtime.loop.ending import Verdict, judge, line_of
from everstep.runtime.loop.environment import backend_flags, identity_variables
from everstep.runtime.loop.options import Options, compiled_folder

Train = Callable[..., object]

DESCRIPTORS_MAX = 250
END_TOGETHER_S = 5.0
CONNECT_TIMEOUT_S = 60.0


def run_worker(
    train: Train,
    link_sock: socket.socket,
    control_fd: int | None = None,
    own_slot_fds: list[int] | None = None,
    *,
    options: Options | None = None,
) -> NoReturn:
    """Carry one incarnation. Never returns.

    Args:
        train: the user's function.
        link_sock: the worker's end of the link; its first frame is the `Assignment`.
        control_fd: the control block, where it did not come with that frame.
        own_slot_fds: slots of this host in the order of `Assignment.own_slots`, likewise.
        options: what the program said to `es.main`.
    """
    worker = _Worker(train, link_sock, options or Options(), SystemClock())
    try:
        kind = worker.carry(control_fd, own_slot_fds or [])
    except LinkClosed:
        # The agent has ended, so nobody is left to report to.
        kind = EndKind.COLLECTIVE_ERROR
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that the user's program left, and a client whose other members are gone, would hold
    # up an ordinary exit.
    os._exit(EXIT_CODES[kind])


DEVICE_TOO_EARLY = (
    "the program used a jax device before es.main, so it cannot join the other processes; create "
    "arrays and keys inside `train`"
)


class _Worker:
    def __init__(self, train: Train, sock: socket.socket, options: Options, clock: Clock) -> None:
        self._train = train
        self._sock = sock
        self._options = options
        self._clock = clock

    def carry(self, control_fd: int | None, own_slot_fds: list[int]) -> EndKind:
        assignment, fds = self._await_assignment()
        started_s = self._clock.monotonic_s()
        if fds:
            for superseded in (control_fd, *own_slot_fds):
                if superseded is not None:
                    os.close(superseded)
            control_fd, own_slot_fds = fds[0], fds[1:]
        if control_fd is None:
            raise InvariantViolated("the assignment came without a control block")
        control = ControlBlock(control_fd)
        os.close(control_fd)
        control.write(Word.PHASE, WorkerPhase.CONNECTING)
        prepare_process(assignment)

        # jax is imported now at the latest; in a forked worker it is there already.
        from everstep.runtime.loop.distributed import connect, has_devices

        if assignment.process_count > 1 and has_devices():
            return self._end(Verdict(kind=EndKind.USER_ERROR, message=DEVICE_TOO_EARLY), Step(-1))
        try:
            connection = connect(
                address=assignment.coordinator_address,
                rank=assignment.rank,
                process_count=assignment.process_count,
                local_address=assignment.local_address,
                timeout_s=min(CONNECT_TIMEOUT_S, assignment.settings.join_timeout_s),
            )
            _prepare_devices(assignment)
        except (RuntimeError, EverstepError) as error:
            message = f"jax did not come up: {line_of(error)}"
            return self._end(Verdict(kind=EndKind.STARTUP_FAILED, message=message), Step(-1))
        start_s = self._clock.monotonic_s() - started_s
        send(self._sock, Connected(pid=os.getpid(), start_s=start_s))

        verdict, step = self._run(assignment, control, own_slot_fds, is_alone=connection.is_alone)
        phase = WorkerPhase(control.read(Word.PHASE))
        control.write(Word.PHASE, WorkerPhase.ENDING)
        if verdict.traceback:
            _show(verdict, assignment, step, connection)
        if verdict.kind in (EndKind.DONE, EndKind.LEFT):
            # Whoever leaves first would take its connections from under the last collective of a
            # slower member. A member that is gone is waited for briefly, and in vain.
            connection.wait_for_all(f"end/{assignment.incarnation}", END_TOGETHER_S)
        return self._end(verdict, step, phase)

    def _await_assignment(self) -> tuple[Assignment, list[int]]:
        """Wait until it is said what this process is for; as a spare, get warm meanwhile."""
        while True:
            order, fds = receive(self._sock, WarmUp | Assignment, DESCRIPTORS_MAX)
            match order:
                case Assignment():
                    name_process(WORKER_NAME)
                    return order, fds
                case WarmUp():
                    name_process(SPARE_NAME)
                    prepare_backend(order.patience_s)
                    _warm_up()
                    send(self._sock, Warmed())
                case _:
                    assert_never(order)

    def _run(
        self, assignment: Assignment, control: ControlBlock, fds: list[int], *, is_alone: bool
    ) -> tuple[Verdict, Step]:
        from everstep.runtime.loop import forks
        from everstep.runtime.loop.keeper import Facts
        from everstep.runtime.loop.linked import LinkedKeeper
        from everstep.runtime.loop.run import Run

        control.write(Word.PHASE, WorkerPhase.PREPARING)
        facts = Facts(
            incarnation=assignment.incarnation,
            host=assignment.host,
            rank=assignment.rank,
            process_count=assignment.process_count,
            slices=tuple(SliceId(m.slice) for m in assignment.members),
            restored_step=assignment.restore_step,
            durable_every_steps=assignment.settings.checkpoint_every_steps,
        )
        keeper = LinkedKeeper(assignment, self._sock, control, fds, self._clock)
        run = Run(facts, control, keeper, seed=self._options.seed)
        error: BaseException | None = None
        try:
            forks.enter(self._train, run)
        except BaseException as raised:  # noqa: BLE001 - whatever it was, it is judged and said.
            error = raised
        if isinstance(error, LinkClosed):
            raise error
        verdict = judge(error, step=run.step, is_finished=run.is_finished, is_alone=is_alone)
        return verdict, run.step

    def _end(self, verdict: Verdict, step: Step, phase: WorkerPhase | None = None) -> EndKind:
        ending = Ending(kind=verdict.kind, step=step, message=verdict.message, phase=phase)
        send(self._sock, ending)
        return verdict.kind


def prepare_process(assignment: Assignment) -> None:
    """Set the environment and jax's configuration as the assignment wants them.

    Nothing of the environment may say who is a member: what is stale there is replaced.
    """
    for name, value in identity_variables(assignment, os.environ).items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    prepare_backend(patience_of(assignment.settings))
    # jax says at warning level that it saw a proxy variable, once per worker, to everyone.
    logging.getLogger("jax._src.distributed").setLevel(logging.ERROR)


def prepare_backend(patience_s: float) -> None:
    """Set what jax's backends read when the first one of the process is made, and never again."""
    os.environ["XLA_FLAGS"] = backend_flags(os.environ.get("XLA_FLAGS", ""), patience_s=patience_s)


def _warm_up() -> None:
    from everstep.runtime.loop.warming import warm_up

    try:
        warm_up()
    except Exception as error:  # noqa: BLE001 - jax's own private parts; without them it goes, too.
        sys.stderr.write(f"everstep: a spare worker did not get warm: {line_of(error)}\n")
        sys.stderr.flush()
        os._exit(EXIT_CODES[EndKind.STARTUP_FAILED])


def _prepare_devices(assignment: Assignment) -> None:
    import jax

    from everstep.runtime.loop.compiled import keep_compiled

    keep_compiled(compiled_folder())
    found = jax.process_count()
    if found != assignment.process_count:
        raise InvariantViolated(
            f"jax counts {found} processes, the assignment {assignment.process_count}"
        )
    jax.devices()


def _show(verdict: Verdict, assignment: Assignment, step: Step, connection: object) -> None:
    """Print the user's exception: whole on the first host that has it, a line on the others."""
    from everstep.runtime.loop.distributed import Connection

    who = (
        f"rank {assignment.rank} (slice {assignment.host.slice}, host {assignment.host.host}), "
        f"incarnation {assignment.incarnation}, after step {step}"
    )
    first = None
    if isinstance(connection, Connection):
        digest = hashlib.sha256(verdict.traceback.encode()).hexdigest()[:16]
        first = connection.claim(f"error/{assignment.incarnation}/{digest}", str(assignment.rank))
    if first is None:
        text = f"everstep: {who}: the training raised\n{verdict.traceback}"
    else:
        text = f"everstep: {who}: raised the same as rank {first}: {verdict.message}\n"
    # In one write, so that other output cannot come in between.
    sys.stderr.flush()
    os.write(sys.stderr.fileno(), text.encode())
