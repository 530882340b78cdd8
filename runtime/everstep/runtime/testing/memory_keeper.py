"""A keeper of steps in this process's memory, to test a `train` without processes or files."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step
from everstep.runtime.agent.control import ControlBlock, create_control_file
from everstep.runtime.agent.link import Word
from everstep.runtime.engine.state import flatten, reflatten
from everstep.runtime.layout.compare import match_leaves
from everstep.runtime.layout.flat import FlatState
from everstep.runtime.loop.keeper import Facts
from everstep.runtime.loop.run import Run


class MemoryKeeper:
    """Implements `Keeper`. Hand the same one to the next incarnation, and it goes on.

    Example:
        keeper = MemoryKeeper()
        run = keeper.start(snapshot_every_steps=5)
        train(run)
        assert keeper.steps == [5, 10]
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.states: dict[Step, Any] = {}
        self.metric_names: tuple[str, ...] = ()
        self.first_steps: list[Step] = []
        self.control = _make_control()
        self._before: FlatState | None = None
        self._incarnation = 0

    @property
    def steps(self) -> list[Step]:
        """Steps that are held, in the order of their capture."""
        return list(self.states)

    def start(
        self,
        *,
        snapshot_every_steps: int = 0,
        durable_every_steps: int | None = None,
        seed: int = 0,
    ) -> Run:
        """A run of the next incarnation, on the devices of this process."""
        self._incarnation += 1
        self.control = _make_control()
        self.control.write(Word.SNAPSHOT_EVERY, snapshot_every_steps)
        facts = Facts(
            incarnation=Incarnation(self._incarnation),
            host=HostId(SliceId(0), 0),
            rank=Rank(0),
            process_count=1,
            slices=(SliceId(0),),
            restored_step=max(self.states, default=None),
            durable_every_steps=durable_every_steps,
        )
        return Run(facts, self.control, self, seed=seed)

    def restore(
        self, abstract: Any, shardings: list[Any], build_fresh: Callable[[], Any]
    ) -> tuple[Any, Step | None]:
        """See `Keeper.restore`."""
        step = max(self.states, default=None)
        if step is None:
            state = build_fresh()
        else:
            match_leaves(flatten(self.states[step]).tree, flatten(abstract).tree)
            leaves, treedef = jax.tree.flatten(self.states[step])
            # jax may use a numpy array as it is, and the program may donate it: hence the copies.
            placed = [
                leaf if sharding is None else jax.device_put(_copy(leaf), sharding)
                for leaf, sharding in zip(leaves, shardings, strict=True)
            ]
            state = jax.tree.unflatten(treedef, placed)
        self._before = flatten(state)
        return state, step

    def capture(self, step: Step, state: Any, *, is_required: bool) -> bool:
        """See `Keeper.capture`. There is always room."""
        del is_required
        if self._before is not None:
            reflatten(state, self._before)
        self.states.pop(step, None)
        self.states[step] = jax.tree.map(_copy, state)
        return True

    def note_first_step(self, step: Step) -> None:
        """See `Keeper.note_first_step`."""
        self.first_steps.append(step)

    def name_metrics(self, names: tuple[str, ...]) -> None:
        """See `Keeper.name_metrics`."""
        self.metric_names = names

    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics of this incarnation, by the number of finished steps."""
        return {
            step: dict(zip(self.metric_names, values, strict=True))
            for step, values in self.control.entries(0)
        }

    def close(self) -> None:
        """See `Keeper.close`."""


def _copy(leaf: Any) -> Any:
    """A copy on the host; of typed keys one on the device, which is theirs alone."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.array(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(leaf)))
    return np.array(leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf


def _make_control() -> ControlBlock:
    fd = create_control_file()
    control = ControlBlock(fd)
    os.close(fd)
    return control
