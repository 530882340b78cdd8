"""A training on one process with no agent, no controller and no configuration.

It resumes from a local folder and checkpoints to it (`loop.folder`). A job with agents can take
such a folder over, and go on from its newest step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from everstep.controller.api.ids import Step
from everstep.runtime.agent.control import ControlBlock, create_control_file
from everstep.runtime.agent.link import EXIT_CODES, EndKind, HoldKind, Word
from everstep.runtime.agent.signals import ProgramSignals
from everstep.runtime.clock import SystemClock
from everstep.runtime.errors import ConfigurationError, EverstepError, Fenced
from everstep.runtime.loop import forks
from everstep.runtime.loop.compiled import keep_compiled
from everstep.runtime.loop.ending import judge, line_of
from everstep.runtime.loop.folder import CheckpointFailed, FolderKeeper
from everstep.runtime.loop.options import Options, compiled_folder
from everstep.runtime.loop.run import Run


def run_alone(train: Callable[[Run], object], options: Options) -> int:
    """Train in this process; the exit code.

    Durability: on return with 0 the last step is durable; after SIGINT or SIGTERM (130, 143) the
    step that was under way is. A second signal ends at once.
    """
    control = _make_control()
    control.write(Word.SNAPSHOT_EVERY, options.every_steps)
    uri = str(Path(options.checkpoints_alone.removeprefix("file://")).absolute())
    keep_compiled(compiled_folder())
    asked = _Asked(control)
    signals = ProgramSignals(asked.hear)
    error: BaseException | None = None
    run: Run | None = None
    try:
        keeper = FolderKeeper(uri, SystemClock())
        try:
            run = Run(keeper.facts, control, keeper, seed=options.seed)
            signals.open()
            os.register_at_fork(after_in_child=signals.hand_to_child)
            forks.enter(train, run)
        finally:
            # Still heard while the last step is being written.
            keeper.close()
            signals.close()
    except BaseException as raised:  # noqa: BLE001 - whatever it was, it is judged and said.
        error = raised
    return _conclude(error, run, asked.number)


def _make_control() -> ControlBlock:
    fd = create_control_file()
    control = ControlBlock(fd)
    os.close(fd)
    return control


def _conclude(error: BaseException | None, run: Run | None, received: int | None) -> int:
    step = run.step if run is not None else Step(0)
    is_finished = run is not None and run.is_finished
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, CheckpointFailed | ConfigurationError) or (
        isinstance(error, EverstepError) and run is None
    ):
        sys.stderr.write(f"everstep: {line_of(error)}\n")
        if isinstance(error.__cause__, Fenced):
            return EXIT_CODES[EndKind.FENCED]
        return EXIT_CODES[EndKind.STATE_REFUSED] if run is not None else 1
    verdict = judge(error, step=step, is_finished=is_finished, is_alone=True)
    if received is not None and verdict.kind in (EndKind.LEFT, EndKind.DONE):
        sys.stderr.write(f"everstep: step {step} is saved; run again to go on\n")
        return 128 + received
    if verdict.kind is EndKind.DONE:
        sys.stderr.write(f"everstep: finished at step {step}, which is saved\n")
    if verdict.traceback:
        sys.stderr.write(verdict.traceback)
    elif verdict.message:
        sys.stderr.write(f"everstep: {verdict.message}\n")
    return EXIT_CODES[verdict.kind]


class _Asked:
    """The first SIGINT or SIGTERM asks to hold the step under way and leave."""

    def __init__(self, control: ControlBlock) -> None:
        self._control = control
        self.number: int | None = None

    def hear(self, number: int) -> None:
        # In one line: the second may come while the first is being heard.
        is_first, self.number = self.number is None, number
        done = self._control.read(Word.STEP_DONE)
        if not is_first or done < 0:
            # Asked twice, or there is no state yet that could be held.
            raise SystemExit(128 + number)
        self._control.write(Word.HOLD_KIND, HoldKind.LEAVE)
        self._control.write(Word.HOLD_AFTER, done + 1)
