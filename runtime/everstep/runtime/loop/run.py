"""`Run`: what a training sees of the incarnation that it is in. The user's API.

One object per incarnation, used from the thread that called `train`. What a finished step costs
when nothing is due is a handful of loads and stores in shared memory (`Run.step_done`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.agent import signals
from everstep.runtime.agent.control import ControlBlock
from everstep.runtime.agent.link import HoldKind, Word, WorkerPhase
from everstep.runtime.errors import ConfigurationError
from everstep.runtime.loop import data, placement, randomness
from everstep.runtime.loop.ending import Leave
from everstep.runtime.loop.keeper import Facts, Keeper
from everstep.runtime.loop.metrics import MetricsFeed
from everstep.runtime.loop.reduction import (
    LOGICAL_SHARDS,
    GradientFunction,
    LossFunction,
    fast_gradients,
    ordered_gradients,
)
from everstep.runtime.topology.mesh import arrange

NEVER = 1 << 62


class Run:
    """One incarnation of a training, as `train(run)` gets it.

    Example:
        def train(run: es.Run) -> None:
            mesh = run.mesh(data=-1)
            state = run.restore(init_state, shardings(mesh))
            for step in run.steps(10_000):
                state, metrics = train_step(state, run.batch(dataset, step))
                run.step_done(step, state, metrics)
    """

    def __init__(self, facts: Facts, control: ControlBlock, keeper: Keeper, *, seed: int) -> None:
        self._facts = facts
        self._control = control
        self._keeper = keeper
        self._seed = seed
        self._metrics = MetricsFeed(control, keeper.name_metrics)
        self._mesh: Mesh | None = None
        self._logical_shards: int | None = None
        self._restored_step = facts.restored_step
        self._step: int | None = None  # Finished steps; None before `restore`.
        self._step_started = -1
        self._step_last = NEVER
        self._is_first = True
        self._is_held = False
        """Whether a step of this incarnation was copied."""
        self._owes = False
        """The first copy that was due found no slot yet: the next step makes up for it."""
        self._has_left = False
        self._is_disowned = False
        """In a process that the program forked."""
        self._durable_every = facts.durable_every_steps or NEVER

    # What is so, for the whole incarnation.

    @property
    def incarnation(self) -> Incarnation:
        """The number of this gang start. For log lines; nothing of a step may depend on it."""
        return self._facts.incarnation

    @property
    def slice_count(self) -> int:
        """How many slices take part in this incarnation."""
        return self._facts.slice_count

    @property
    def process_index(self) -> int:
        """This process among `process_count`, slice-major."""
        return self._facts.rank

    @property
    def process_count(self) -> int:
        """How many processes take part in this incarnation."""
        return self._facts.process_count

    @property
    def restored_step(self) -> Step | None:
        """The step that this incarnation started from; None for a fresh start."""
        return self._restored_step

    @property
    def step(self) -> Step:
        """How many steps are finished."""
        return Step(self._step or 0)

    @property
    def is_finished(self) -> bool:
        """Whether the last step of `run.steps` is done."""
        return self._step is not None and self._step >= self._step_last

    # Mesh, state, steps.

    def mesh(self, **axes: int) -> Mesh:
        """Make the mesh of this incarnation: the slice axis outermost, then `axes` within a slice.

        Args:
            axes: sizes within one slice, outermost first; one of them may be -1 and is inferred.
                `run.mesh(data=-1, fsdp=4)` gives the axes `slice`, `data` and `fsdp`.

        Raises:
            ConfigurationError: the sizes do not multiply to the devices of a slice.
        """
        devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        plan = arrange(axes, slice_count=self.slice_count, device_count=len(devices))
        grid = np.array(devices, dtype=object).reshape(plan.shape)
        mesh = Mesh(grid, plan.names)
        self._mesh = mesh
        return mesh

    def restore(self, init: Any, shardings: Any = None, *, like: Any = None) -> Any:
        """Give the newest step's state on these shardings; a fresh one when there is no step.

        Args:
            init: function of no arguments, or a tree. A function is evaluated for a fresh start
                only (inside `jax.jit`, so that each device makes only what it keeps).
            shardings: tree, prefix, or function from the abstract state to one. None replicates.
            like: tree of `jax.ShapeDtypeStruct` to expect, where `init` cannot be traced.

        Raises:
            StateRefused: structure, dtype or shape differ from what was saved; every leaf that
                does is named, with what was expected and found.

        Blocking: for the transfer; no step is under way.
        """
        self._refuse_fork("run.restore")
        self._control.write(Word.PHASE, WorkerPhase.RESTORING)
        abstract = placement.abstract_of(init) if like is None else like
        resolved = placement.resolve_shardings(shardings, abstract, self._current_mesh())
        state, self._restored_step = self._keeper.restore(
            abstract, resolved, lambda: placement.build_fresh(init, abstract, resolved)
        )
        step = self._restored_step or Step(0)
        self._step = step
        self._step_started = step
        self._control.write(Word.STEP_STARTED, step)
        self._control.write(Word.STEP_DONE, step)
        self._control.write(Word.PHASE, WorkerPhase.COMPILING)
        return state

    def steps(self, count: int) -> Iterator[int]:
        """Count the steps that are left, from the restored one to `count - 1`.

        Args:
            count: steps of the whole training, over all incarnations.

        Raises:
            ConfigurationError: `run.restore` was not called, or a step was not reported done.
        """
        self._refuse_fork("run.steps")
        if self._step is None:
            raise ConfigurationError("run.steps", "no state", "run.restore before run.steps")
        self._step_last = count
        return self._count_steps(count)

    def _count_steps(self, count: int) -> Iterator[int]:
        for step in range(self.step, count):
            if self._has_left:
                raise Leave(self.step)
            if self._step != step:
                self._refuse_fork("run.steps")
                raise ConfigurationError(
                    "run.steps",
                    f"step {step - 1} is not done",
                    "run.step_done(step, state) at the end of every step",
                )
            self._step_started = step + 1
            signals.adopt()
            self._control.write(Word.STEP_STARTED, step + 1)
            yield step

    def step_done(self, step: int, state: Any, metrics: Mapping[str, Any] | None = None) -> None:
        """Report a step done, with the state after it.

        Args:
            step: the number that `run.steps` gave.
            state: the whole training state; copied here when a snapshot is due.
            metrics: a few numbers or scalar arrays, the same names at each step. They are read
                once they are computed, so handing them over does not wait for the device.

        Raises:
            Leave: this was the agreed last step of the incarnation. Let it pass.
            StateRefused: the tree is another than at the step before; the leaves are named.

        Durability: after a capture the step survives this process; it is durable when the agent
            (or, alone, the writing thread) has committed it.
        Blocking: not, unless a snapshot is due (the device-to-host copy) or the program is more
            than two steps ahead of the device. From the training's thread only.
        """
        after = step + 1
        if after != self._step_started or after == self._step:
            self._refuse_step(step)
        if metrics is not None:
            self._metrics.add(after, metrics)
        self._step = after
        control = self._control
        control.write(Word.STEP_DONE, after)
        hold = control.read(Word.HOLD_AFTER)
        every = control.read(Word.SNAPSHOT_EVERY)
        if (
            hold == after
            or self._is_first
            or self._owes
            or after == self._step_last
            or (every > 0 and after % every == 0)
            or after % self._durable_every == 0
            or self._keeper.failure is not None
        ):
            self._meet_boundary(Step(after), state, hold)
        # A hold of an earlier step came a moment too late: the agent sees that from `STEP_DONE`,
        # says no to it, and a later step is proposed (agent.agreement).

    def _meet_boundary(self, step: Step, state: Any, hold: int) -> None:
        """Everything that is not on the path of an ordinary step."""
        if self._keeper.failure is not None:
            raise self._keeper.failure
        # Now and not after the copy: a later hold may be agreed on meanwhile, and its confirmation
        # is none of this step's.
        is_leaving = hold == step and self._is_confirmed(step)
        if self._is_first:
            self._is_first = False
            jax.block_until_ready(state)
            self._control.write(Word.PHASE, WorkerPhase.TRAINING)
            self._keeper.note_first_step(step)
        is_last = step == self._step_last
        if is_last or hold == step or self._owes or self._is_due(step):
            # First the metrics: a step that is restored is not made again, so what is not told of
            # it before it is held might never be.
            self._metrics.drain()
            is_required = is_last or hold == step
            self._is_held |= self._keeper.capture(step, state, is_required=is_required)
            self._owes = not self._is_held
        if is_leaving and not is_last:
            self._has_left = True
            raise Leave(step)

    def _is_confirmed(self, step: Step) -> bool:
        """Whether the hold of this step says to leave. Read in this order: see `Word.HOLD_KIND`."""
        is_leave = self._control.read(Word.HOLD_KIND) == HoldKind.LEAVE
        return is_leave and self._control.read(Word.HOLD_AFTER) == step

    def _is_due(self, step: Step) -> bool:
        every = self._control.read(Word.SNAPSHOT_EVERY)
        return (every > 0 and step % every == 0) or step % self._durable_every == 0

    def _refuse_step(self, step: int) -> None:
        self._refuse_fork("run.step_done")
        if self._has_left:
            raise Leave(self.step)
        raise ConfigurationError(
            "run.step_done", f"step {step}", f"step {self._step_started - 1}, once, from run.steps"
        )

    def _refuse_fork(self, call: str) -> None:
        if self._is_disowned:
            raise ConfigurationError(
                call,
                "called in a process that the program forked",
                "a call in the process that entered train; the forked one may use data and files",
            )

    # Data and random numbers: functions of the step alone.

    def batch(self, dataset: data.Dataset, step: int) -> Any:
        """Give the global batch of a step: the same samples whatever the slice count.

        Args:
            dataset: fixes the batch size and the order; see `es.IndexedDataset`.
            step: the number that `run.steps` gave.

        Returns:
            The tree of a batch as global arrays, `[batch, …]` sharded over the mesh's data axes;
            with ordered reduction an `es.Batch` for the step function. This host reads only the
            rows that its own devices need.

        Raises:
            ConfigurationError: the batch cannot be divided; names the counts and what would do.
        """
        mesh = self._current_mesh()
        if self._logical_shards is not None:
            return data.place_logical(dataset, step, mesh, self._logical_shards)
        return data.place_batch(dataset, step, mesh)

    def key(self, step: int) -> jax.Array:
        """A typed PRNG key of this step and the seed alone, replicated over the mesh."""
        return randomness.key_of(self._seed, step, self._current_mesh())

    def rng(self, step: int) -> np.random.Generator:
        """A numpy generator of this step and the seed alone, equal on all hosts."""
        return randomness.generator_of(self._seed, step)

    def value_and_grad(
        self,
        loss_fn: LossFunction,
        *,
        logical_shards: int = LOGICAL_SHARDS,
        reduction: str = "ordered",
    ) -> GradientFunction:
        """Make `(params, batch, key) -> (loss, aux, gradients)`. Call it before the first batch.

        The update must be a `jax.jit` of its own; `es.ordered_step` does all of it.

        Args:
            loss_fn: `(params, rows, key) -> loss` or `(loss, aux)`: the mean over its rows. A
                function of two arguments gets no key.
            logical_shards: how many fixed parts each batch has. A multiple of every device count
                that may be granted wastes nothing.
            reduction: `"ordered"` gives the same bits on every mesh of at least two devices;
                `"fast"` lets the compiler sum as it likes: equal within tolerance only.
        """
        mesh = self._current_mesh()
        if reduction == "fast":
            return fast_gradients(mesh, loss_fn)
        if reduction != "ordered":
            raise ConfigurationError("reduction", reduction, '"ordered" or "fast"')
        if self._logical_shards not in (None, logical_shards):
            raise ConfigurationError(
                "logical_shards", logical_shards, f"{self._logical_shards}, as elsewhere in train"
            )
        self._logical_shards = logical_shards
        return ordered_gradients(mesh, loss_fn, logical_shards)

    # For the parts of the loop.

    def _current_mesh(self) -> Mesh:
        return self._mesh if self._mesh is not None else self.mesh()

    def disown(self) -> None:
        """Take the training out of the hands of a fork's copy: no step is its to report."""
        self._is_disowned = True
        self._has_left = False
        # No step equals these, so that the check on a step's path costs nothing more.
        self._step = None
        self._step_started = -1

    def finish(self) -> None:
        """Write outstanding metrics; called once when `train` is over."""
        self._metrics.drain()
