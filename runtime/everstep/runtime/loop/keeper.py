"""What a run needs of whoever keeps its steps: an agent, or a local folder when alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Where this process stands in the incarnation. Nothing here changes while it lives."""

    incarnation: Incarnation
    host: HostId
    rank: Rank
    process_count: int
    slices: tuple[SliceId, ...]
    """Member slices in rank order."""
    restored_step: Step | None
    """The step to restore, as far as it is known before the restore."""
    durable_every_steps: int | None = None
    """A snapshot is also due at multiples of this, so that a checkpoint can be written."""

    @property
    def slice_count(self) -> int:
        return len(self.slices)


class Keeper(Protocol):
    """Restores the state and takes copies of it. Called from the training's thread only."""

    @property
    def failure(self) -> BaseException | None:
        """Of a write in the background; raised at the next boundary."""
        ...

    def restore(
        self, abstract: Any, shardings: list[Any], build_fresh: Callable[[], Any]
    ) -> tuple[Any, Step | None]:
        """The state of the newest step on these shardings; `build_fresh()` when there is none.

        Args:
            abstract: tree of arrays, `jax.ShapeDtypeStruct` and plain values.
            shardings: one a leaf of `abstract`, in order; None for what is no array.

        Returns:
            The state, and the step that it is of; None for a fresh one.

        Raises:
            StateRefused: the tree is not the one that was saved; all bad leaves are named.
        """
        ...

    def capture(self, step: Step, state: Any, *, is_required: bool) -> bool:
        """Copy the state; False when there is nowhere to copy it and it is not required.

        Blocking: for the copy; when required also until a slot is free, with a deadline.
        """
        ...

    def note_first_step(self, step: Step) -> None:
        """The first step of this incarnation is really finished."""
        ...

    def name_metrics(self, names: tuple[str, ...]) -> None:
        """The names of the values that the ring will carry, in order."""
        ...

    def close(self) -> None:
        """Finish what is under way. Durability: as the keeper promises for captured steps."""
        ...
