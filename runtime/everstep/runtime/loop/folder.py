"""A keeper whose steps lie in a local folder: what a training without an agent has.

The engine copies the state at a step boundary and writes the copy while training goes on. The
format and the commit protocol are those of a run under agents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from everstep.controller.api.ids import HostId, Rank, SliceId, Step
from everstep.runtime.clock import Clock
from everstep.runtime.engine.checkpoints import Checkpoints
from everstep.runtime.engine.placement import with_shardings
from everstep.runtime.engine.saved import CheckpointFailed
from everstep.runtime.engine.state import flatten, reflatten
from everstep.runtime.errors import Fenced, InvariantViolated, Retryable, StorageRefused
from everstep.runtime.layout.flat import FlatState
from everstep.runtime.loop.ending import Leave
from everstep.runtime.loop.keeper import Facts
from everstep.runtime.loop.linked import RESTORE_BYTES_IN_FLIGHT

HOST = HostId(SliceId(0), 0)

__all__ = ["CheckpointFailed", "FolderKeeper"]


class FolderKeeper:
    """Implements `Keeper` over a local folder. One training at a time: the newer one wins."""

    def __init__(self, uri: str, clock: Clock) -> None:
        """Claim the folder.

        Raises:
            StorageRefused: it cannot be written, or holds something that is no run.
            Fenced: another job has it.
        """
        self._uri = uri
        self._checkpoints = Checkpoints(uri, memory_bytes=RESTORE_BYTES_IN_FLIGHT, clock=clock)
        self._incarnation = self._checkpoints.claim()
        self._newest = self._checkpoints.latest()
        self._before: FlatState | None = None

    @property
    def failure(self) -> BaseException | None:
        """See `Keeper.failure`."""
        return self._checkpoints.failure

    @property
    def facts(self) -> Facts:
        return Facts(
            incarnation=self._incarnation,
            host=HOST,
            rank=Rank(0),
            process_count=1,
            slices=(HOST.slice,),
            restored_step=None if self._newest is None else Step(self._newest),
        )

    def restore(
        self, abstract: Any, shardings: list[Any], build_fresh: Callable[[], Any]
    ) -> tuple[Any, Step | None]:
        """See `Keeper.restore`. A damaged checkpoint is passed over for the next older one."""
        if self._newest is None:
            state, step = build_fresh(), None
            sys.stderr.write(f"everstep: a fresh start; checkpoints go to {self._uri}\n")
        else:
            like = with_shardings(abstract, shardings)
            state, found = self._checkpoints.restore_newest(like)
            step = Step(found)
            sys.stderr.write(f"everstep: resumed at step {step} from {self._uri}\n")
        self._before = flatten(state).without_values()
        return state, step

    def capture(self, step: Step, state: Any, *, is_required: bool) -> bool:
        """See `Keeper.capture`. Waits while two earlier steps are still being written.

        Nothing is skipped: a checkpoint that is due is the only copy that there will be.

        Raises:
            CheckpointFailed: this step cannot be saved, or an earlier one could not.
        """
        del is_required
        if self._before is None:
            raise InvariantViolated("a state was captured before run.restore")
        # A training's tree does not change; the engine itself would take another one.
        reflatten(state, self._before)
        try:
            self._checkpoints.save(step, state)
        except (Fenced, Retryable, StorageRefused) as error:
            # Found out right now, and not by the writing thread: it is the same to whoever trains.
            raise CheckpointFailed(step, error) from error
        return True

    def note_first_step(self, step: Step) -> None:
        """See `Keeper.note_first_step`."""

    def name_metrics(self, names: tuple[str, ...]) -> None:
        """See `Keeper.name_metrics`."""

    def close(self) -> None:
        """Wait until what was captured is durable.

        Raises:
            CheckpointFailed: a step could not be written, and `train` had not been told yet. When
                `train` is being ended by an error already, it is said beside that one.
        """
        ending = sys.exc_info()[1]
        try:
            self._checkpoints.close()
        except CheckpointFailed as failed:
            if ending is None or isinstance(ending, Leave):
                raise
            if failed is not ending:
                sys.stderr.write(f"everstep: {failed}\n")
