"""The user's program as processes: the zygote, and workers forked from it or started afresh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from structlog.typing import FilteringBoundLogger

from everstep.runtime.agent import tether
from everstep.runtime.agent.control import ControlBlock, create_control_file
from everstep.runtime.agent.frames import FrameStream, LinkClosed
from everstep.runtime.agent.link import (
    ENV_LINK_FD,
    ENV_ZYGOTE_FD,
    Assignment,
    WorkerFrame,
    patience_of,
)
from everstep.runtime.agent.supervisor.spares import Spare
from everstep.runtime.agent.zygote import CannotFork, Fork, Forked, Ready, Reaped, ZygoteFrame

# Threads that a library starts at import would make the program unfit to be forked. Set unless
# the user has set them.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """Exactly one is set."""

    code: int | None = None
    signal: int | None = None


class ProgramEnded(Exception):
    """The program ended before it could be a worker."""

    def __init__(self, status: ExitStatus) -> None:
        self.status = status
        super().__init__(str(status))


def _status_of(raw: int) -> ExitStatus:
    code = os.waitstatus_to_exitcode(raw)
    return ExitStatus(signal=-code) if code < 0 else ExitStatus(code=code)


class WorkerProcess:
    """One worker: its process, its link, its control block."""

    def __init__(
        self, pid: int, pidfd: int, link: FrameStream[WorkerFrame], control_fd: int
    ) -> None:
        self.pid = pid
        self.link = link
        self.control = ControlBlock(control_fd)
        self.exited: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        self._pidfd = pidfd
        self._control_fd = control_fd

    async def assign(self, assignment: Assignment, own_slots: Sequence[int]) -> None:
        """Send the first frame of the link, with all that the worker inherits."""
        await self.link.send(assignment, [self._control_fd, *own_slots])

    def kill(self) -> None:
        """SIGKILL. Never hits another process, since the pidfd names this one."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def note_exit(self, status: ExitStatus) -> None:
        if not self.exited.done():
            self.exited.set_result(status)

    def close(self) -> None:
        """Give up everything that belongs to the process, which has ended."""
        self.link.close()
        self.control.close()
        os.close(self._control_fd)
        os.close(self._pidfd)


class _Zygote:
    """The agent's side of one zygote process."""

    def __init__(
        self,
        command: Sequence[str],
        log: FilteringBoundLogger,
        note_end: Callable[[_Zygote], None],
        note_settled: Callable[[], None],
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = spawn(command, {ENV_ZYGOTE_FD: str(theirs.fileno())}, [theirs.fileno()])
        self._log = log
        self._note_end = note_end
        self._note_settled = note_settled
        self._link: FrameStream[ZygoteFrame] = FrameStream(ours, ZygoteFrame)
        self._settled = asyncio.Event()
        self._forking: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._fork_last = 0
        self._workers: dict[int, WorkerProcess] = {}
        self._reaped: dict[int, ExitStatus] = {}
        self.was_ready = False
        self.refused: str | None = None
        self.status: ExitStatus | None = None
        self._exited: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        watch(self._process, self._exited.set_result)
        self._exited.add_done_callback(lambda _: self._link.finish())
        self._reading = asyncio.create_task(self._read(), name="zygote")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_settled(self) -> bool:
        """Whether the imports are over: it can be forked, or says why not, or has ended."""
        return self._settled.is_set()

    async def fork(self) -> WorkerProcess | None:
        """Fork a process that waits for its assignment.

        Returns:
            The process; None when the program refuses to be forked (`refused` says why).

        Raises:
            ProgramEnded: the zygote is gone.
        """
        await self._settled.wait()
        if self.status is not None:
            raise ProgramEnded(self.status)
        if self.refused is not None:
            return None
        ours, theirs = socket.socketpair()
        control_fd = create_control_file()
        self._fork_last += 1
        number = self._fork_last
        forked = self._forking[number] = asyncio.get_running_loop().create_future()
        with theirs:
            try:
                await self._link.send(Fork(number=number), [theirs.fileno(), control_fd])
                pid, pidfd = await forked
            except LinkClosed:
                ours.close()
                os.close(control_fd)
                if self.refused is not None:
                    return None
                raise ProgramEnded(await self._exited) from None
            except asyncio.CancelledError:
                # Whatever is forked after all finds its link closed, and is killed by `_read`.
                if forked.done() and not forked.cancelled() and forked.exception() is None:
                    _kill_and_close(forked.result()[1])
                ours.close()
                os.close(control_fd)
                raise
            finally:
                self._forking.pop(number, None)
        worker = WorkerProcess(pid, pidfd, FrameStream(ours, WorkerFrame), control_fd)
        self._workers[pid] = worker
        if pid in self._reaped:
            worker.note_exit(self._reaped.pop(pid))
        return worker

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._link.receive()
                match frame:
                    case Ready():
                        self.was_ready = True
                        self._settle()
                    case CannotFork():
                        self.refused = frame.why
                        self._settle()
                    case Forked():
                        pidfd = self._link.take_descriptor()
                        forked = self._forking.get(frame.number)
                        if forked is not None and not forked.done():
                            forked.set_result((frame.pid, pidfd))
                        else:
                            _kill_and_close(pidfd)
                    case Reaped():
                        self._note_exit(frame.pid, _status_of(frame.status))
                    case _:
                        assert_never(frame)
        except LinkClosed:
            pass
        if self.refused is None:
            # It has gone, or is going, without having said a word.
            self.status = await self._exited
        for forked in self._forking.values():
            if not forked.done():
                forked.set_exception(LinkClosed("the zygote has ended"))
        self._settle()
        for worker in self._workers.values():
            # Tied to the zygote by the kernel.
            worker.note_exit(ExitStatus(signal=signal.SIGKILL))
        self._link.close()
        self._note_end(self)

    def _note_exit(self, pid: int, status: ExitStatus) -> None:
        worker = self._workers.pop(pid, None)
        if worker is not None:
            worker.note_exit(status)
        elif self._forking:
            # Read in one go with its `Forked`, before the one who waits for that could run.
            self._reaped[pid] = status

    def _settle(self) -> None:
        self._settled.set()
        self._note_settled()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._reading.cancel()
        self._link.close()
        self._process.kill()
        self._process.wait()


class Program:
    """Makes workers of one command: at most one at a time, and a spare for the next."""

    def __init__(
        self, command: Sequence[str], log: FilteringBoundLogger, note_ready: Callable[[], None]
    ) -> None:
        self._command = tuple(command)
        self._log = log
        self._note_ready = note_ready
        self._zygote: _Zygote | None = None
        self._direct: subprocess.Popen[bytes] | None = None
        self._spare: Spare | None = None
        self._has_spares = True
        self._is_abandoned = False
        self._is_launching = False
        self._ended_early: ExitStatus | None = None
        """How the program ended by itself while nobody waited for it."""
        self.fork_refused: str | None = None
        """Why workers are started in fresh interpreters; None while they are forked."""

    @property
    def own_pids(self) -> frozenset[int]:
        """Children of this process that belong to the program."""
        pids = {self._zygote.pid} if self._zygote is not None else set[int]()
        if self._direct is not None:
            pids.add(self._direct.pid)
        return frozenset(pids)

    @property
    def is_ready(self) -> bool:
        """Whether a launch would be answered at once, and not after the program's imports."""
        return self._zygote is None or self._zygote.is_settled

    @property
    def has_warm_spare(self) -> bool:
        """Whether the next worker waits already, and would act at once."""
        return self._spare is not None and self._spare.is_warm and self._spare.ended is None

    def warm(self) -> None:
        """Start the zygote, unless there is one or the program cannot be forked."""
        if self._zygote is None and self.fork_refused is None:
            self._zygote = _Zygote(self._command, self._log, self._zygote_gone, self._note_ready)

    async def launch(
        self,
        assignment: Assignment,
        own_slots: Sequence[int],
        prepare: Callable[[ControlBlock], None],
    ) -> WorkerProcess:
        """Start a worker and hand it its assignment.

        Args:
            assignment: its first frame.
            own_slots: descriptors of `assignment.own_slots`, in that order.
            prepare: sets words of the control block before the worker can read them.

        Raises:
            ProgramEnded: the program ended before it was a worker; the next launch tries again.

        Blocking: until the program's imports are done, when they are not.
        """
        worker = self._take_spare(patience_of(assignment.settings))
        if worker is not None:
            prepare(worker.control)
            await worker.assign(assignment, own_slots)
            return worker
        early, self._ended_early = self._ended_early, None
        if early is not None:
            # It has shown its error. Running it again now would show the same once more.
            raise ProgramEnded(early)
        self._is_launching = True
        try:
            return await self._launch(assignment, own_slots, prepare)
        finally:
            self._is_launching = False

    async def _launch(
        self,
        assignment: Assignment,
        own_slots: Sequence[int],
        prepare: Callable[[ControlBlock], None],
    ) -> WorkerProcess:
        worker: WorkerProcess | None = None
        self._is_abandoned = False
        # A zygote that was killed is replaced once; one that ends by itself is the user's doing.
        for is_last in (False, True):
            self.warm()
            if self._zygote is None:
                break
            try:
                worker = await self._zygote.fork()
            except ProgramEnded as ended:
                if is_last or ended.status.signal is None or self._is_abandoned:
                    raise
                continue
            if worker is None:
                self.fork_refused = self._zygote.refused
                self._log.warning("program cannot be forked", why=self.fork_refused)
                self._zygote = None
            break
        worker = worker or self._start_fresh()
        prepare(worker.control)
        await worker.assign(assignment, own_slots)
        return worker

    async def keep_spare(self, patience_s: float) -> None:
        """See to it that a process waits, warm, to be the next worker.

        Args:
            patience_s: `patience_of` the settings that the next assignment will probably have.

        Blocking: until it is forked, where the program can be forked.
        """
        zygote = self._zygote
        if zygote is None or not zygote.was_ready or not self._has_spares:
            return
        if self._spare is not None:
            if self._spare.suits(patience_s):
                return
            self._drop_spare()
            if not self._has_spares:
                return
        try:
            worker = await zygote.fork()
        except ProgramEnded:
            return  # Whoever launches the next worker starts another zygote.
        if worker is not None:
            self._drop_spare()
            self._spare = Spare(worker, patience_s)

    def _take_spare(self, patience_s: float) -> WorkerProcess | None:
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        self._judge(spare)
        return spare.take(patience_s)

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            self._judge(spare)
            spare.discard()

    def _judge(self, spare: Spare) -> None:
        """Make no more where one has ended by itself: warming up does not suit this program."""
        status = spare.ended
        if status is not None and status.code is not None:
            self._has_spares = False
            self._log.warning("a spare worker ended; none are kept any more", status=str(status))

    def abandon_launch(self) -> None:
        """End a launch that takes too long: the zygote is frozen, or its imports never end."""
        self._is_abandoned = True
        if self._zygote is not None:
            self._zygote.kill()

    def _start_fresh(self) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            process = spawn(self._command, {ENV_LINK_FD: str(theirs.fileno())}, [theirs.fileno()])
        self._direct = process
        worker = WorkerProcess(
            process.pid,
            os.pidfd_open(process.pid),
            FrameStream(ours, WorkerFrame),
            create_control_file(),
        )
        watch(process, worker.note_exit)
        return worker

    def _zygote_gone(self, zygote: _Zygote) -> None:
        if self._zygote is zygote:
            self._zygote = None
            status = zygote.status
            if not self._is_launching and not zygote.was_ready and status is not None:
                self._ended_early = status if status.signal is None else None
            if zygote.was_ready and zygote.refused is None:
                self._log.warning("zygote ended; starting another", status=str(zygote.status))
                self.warm()

    def close(self) -> None:
        """End the zygote and any worker. Blocking: until they are reaped."""
        self._drop_spare()
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            zygote.close()
        if self._direct is not None:
            self._direct.kill()
            self._direct.wait()


def _kill_and_close(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


def spawn(
    command: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process, with these variables added."""
    tethered = [sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid()), *command]
    return subprocess.Popen(
        tethered,
        env={**_ONE_THREAD, **os.environ, **environment},
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        # A signal to the agent's group is a notice, and the agent's to act on: a shell in front of
        # the program would end from it, and take the program with it.
        process_group=0,
    )


def watch(process: subprocess.Popen[bytes], note: Callable[[ExitStatus], None]) -> None:
    """Call `note` from the event loop as soon as a child has ended."""
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(process.pid)

    def ended() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        code = process.wait()
        note(ExitStatus(signal=-code) if code < 0 else ExitStatus(code=code))

    loop.add_reader(pidfd, ended)
