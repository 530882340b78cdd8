"""A step on its way to storage, and how it ended."""

from __future__ import annotations

import threading

from everstep.controller.api.ids import Step
from everstep.runtime.errors import CheckpointInvalid, EverstepError, StateRefused


class CheckpointFailed(EverstepError):
    """A captured step could not be written, so it does not exist.

    `step` says which, `leaf` where in the state it was, as far as that is known.
    """

    def __init__(self, step: Step, why: BaseException, leaf: str | None = None) -> None:
        self.step = step
        self.leaf = _leaf_of(why) or leaf
        first = str(why).strip().splitlines()
        words = f"{type(why).__name__}: {first[0] if first else 'no words'}"
        where = f" (at {self.leaf})" if self.leaf and self.leaf not in words else ""
        super().__init__(f"step {step} could not be saved: {words}{where}")


def _leaf_of(why: BaseException) -> str | None:
    match why:
        case StateRefused():
            return why.field
        case CheckpointInvalid():
            return why.leaf
        case _:
            return None


class Saved:
    """A step on its way. It exists once `wait` has returned."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._done = threading.Event()
        self._failure: CheckpointFailed | None = None
        self.was_told = False
        """Whether somebody was told of the failure."""

    def done(self) -> bool:
        """Whether the step is committed, or has failed."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the commit.

        Raises:
            CheckpointFailed: the step does not exist; why.
            TimeoutError: it is not decided yet.

        Durability: on return the step exists.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"step {self.step} is not committed after {timeout_s:g} s")
        if self._failure is not None:
            self.was_told = True
            raise self._failure

    @property
    def failure(self) -> CheckpointFailed | None:
        """Why the step does not exist; None while it is on its way, and when it is there."""
        return self._failure

    def settle(self, failure: CheckpointFailed | None) -> None:
        """Say how it ended. For the engine, once."""
        self._failure = failure
        self._done.set()
