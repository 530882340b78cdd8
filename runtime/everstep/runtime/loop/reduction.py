"""Gradients that do not depend on how many devices computed them.

Ordered reduction: a batch is divided into a fixed number of logical shards. A step is four
separate programs: gather the parameters; compute the gradient of exactly one logical shard on each
device, as often as needed; sum the shards' gradients in their fixed order; update. Separate,
because a compiler that sees two of them at once fuses them, and fuses them otherwise on another
mesh. Each device then does the same arithmetic on the same shapes wherever a logical shard lands,
and additions are done in one order (`tree_of`), so every bit is equal on every mesh of at least two
devices.
(One device in all is compiled without partitioning, which is another program.)

The sum moves few bytes: what a device can add alone it adds alone; then each device gets its piece
of everyone's sums (all-to-all), adds the pieces in order, and the results are gathered.

What it needs: the parameters fit on one device, and the update sums nothing across a whole
parameter tree on sharded values (`ordered_step` has `prepare` for a clip by global norm).
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from everstep.runtime.errors import ConfigurationError
from everstep.runtime.loop.data import DATA_AXES, Batch, slot_count

if TYPE_CHECKING:
    from everstep.runtime.loop.run import Run

LOGICAL_SHARDS = 12
"""Divided by 1, 2, 3, 4, 6 and 12 devices."""

log = logging.getLogger("everstep")

LossFunction = Callable[..., Any]
GradientFunction = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any, Any]]


def fast_gradients(mesh: Mesh, loss_fn: LossFunction) -> GradientFunction:
    """`(params, batch, key) -> (loss, aux, gradients)` in one program, summed as it comes."""
    split = [name for name in mesh.axis_names if name not in DATA_AXES and mesh.shape[name] > 1]
    if split:
        _warn_tolerance(f"axes {', '.join(split)} of the mesh split contractions")

    @jax.jit
    def compute(params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any, Any]:
        (loss, aux), gradients = jax.value_and_grad(_with_aux(loss_fn), has_aux=True)(
            params, batch, key
        )
        return loss, aux, gradients

    return compute


def ordered_gradients(mesh: Mesh, loss_fn: LossFunction, logical_shards: int) -> GradientFunction:
    """`(params, batch, key) -> (loss, aux, gradients)`, the same bits on every mesh.

    Args:
        mesh: of two devices at least; all of its axes carry logical shards.
        loss_fn: `(params, rows, key) -> loss` or `(loss, aux)`, the mean over its rows. `aux` is a
            tree of arrays, and comes back as the mean over logical shards. `key` differs from
            logical shard to logical shard.
        logical_shards: into how many parts each batch is divided.
    """
    if logical_shards < 1:
        raise ConfigurationError("logical_shards", logical_shards, "a positive number")
    if mesh.size == 1:
        _warn_tolerance("there is only one device in all, which is compiled as another program")
    return _OrderedGradients(mesh, loss_fn, logical_shards)


class _OrderedGradients:
    """The first three programs. A callable, so that its parts can be tested and timed."""

    def __init__(self, mesh: Mesh, loss_fn: LossFunction, logical_shards: int) -> None:
        self._mesh = mesh
        self._logical_shards = logical_shards
        self._rounds = slot_count(logical_shards, mesh.size) // mesh.size
        self._loss_fn = _with_aux(loss_fn)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._divided = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self.gather = jax.jit(lambda params: params, out_shardings=self._everywhere)
        self.take_round = jax.jit(self._take_round)
        self.gradient = jax.jit(self._gradient)
        self.add = jax.jit(self._add)
        self._round_numbers = [self._everywhere_number(r) for r in range(self._rounds)]
        self._shard_numbers = [self._number_shards(r) for r in range(self._rounds)]

    def __call__(self, params: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Any, Any]:
        if not isinstance(batch, Batch):
            raise ConfigurationError(
                "batch",
                type(batch).__name__,
                "what run.batch gives once the step function is made (make it before the first "
                "batch)",
            )
        whole = params if _is_everywhere(params) else self.gather(params)
        outputs: list[Any] = []
        for number, shards in zip(self._round_numbers, self._shard_numbers, strict=True):
            rows = batch.rows if self._rounds == 1 else self.take_round(batch.rows, number)
            outputs.append(self.gradient(whole, rows, key, shards))
        loss, aux, gradients = self.add(outputs)
        return loss, aux, gradients

    def _number_shards(self, round_number: int) -> jax.Array:
        """Which logical shard each device computes in this round, `[devices]`.

        Device d holds slots d*rounds to (d+1)*rounds, so a batch needs no moving. As data, not as
        a constant: the gradient program is then the same in every round and on every mesh.
        """
        numbers = np.arange(self._mesh.size, dtype=np.int32) * self._rounds + round_number
        return jax.make_array_from_callback(numbers.shape, self._divided, lambda i: numbers[i])

    def _everywhere_number(self, number: int) -> jax.Array:
        value = np.asarray(number, np.int32)
        return jax.make_array_from_callback((), self._everywhere, lambda _: value)

    def _take_round(self, rows: Any, number: jax.Array) -> Any:
        def take(part: Any, number: jax.Array) -> Any:
            return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, number, 1), part)

        divided = self._divided.spec
        on_each = self._on_each_device(
            take, in_specs=(divided, self._everywhere.spec), out_specs=divided
        )
        return on_each(rows, number)

    def _gradient(self, params: Any, rows: Any, key: jax.Array, shard_numbers: jax.Array) -> Any:
        def of_one_shard(params: Any, rows: Any, key: jax.Array, number: jax.Array) -> Any:
            own = jax.tree.map(lambda a: a[0], rows)
            (loss, aux), gradients = jax.value_and_grad(self._loss_fn, has_aux=True)(
                params, own, jax.random.fold_in(key, number[0])
            )
            return jax.tree.map(lambda a: jnp.asarray(a)[None], (loss, aux, gradients))

        divided, everywhere = self._divided.spec, self._everywhere.spec
        compute = self._on_each_device(
            of_one_shard,
            in_specs=(everywhere, divided, everywhere, divided),
            out_specs=divided,
        )
        return compute(params, rows, key, shard_numbers)

    def _add(self, outputs: list[Any]) -> Any:
        add = self._on_each_device(
            self._add_on_each, in_specs=self._divided.spec, out_specs=self._everywhere.spec
        )
        return add(outputs)

    def _add_on_each(self, outputs: list[Any]) -> Any:
        """Sum in the order of logical shards; `outputs[round]` are this device's, `[1, …]`."""
        treedef = jax.tree.structure(outputs[0])
        by_leaf = zip(*(jax.tree.leaves(output) for output in outputs), strict=True)
        return jax.tree.unflatten(treedef, self._mean_of_all(list(by_leaf)))

    def _mean_of_all(self, leaves: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
        """Mean over logical shards of every leaf; leaves of one dtype travel as one vector."""
        results: list[jax.Array | None] = [None] * len(leaves)
        kinds = {_sum_dtype(rounds[0].dtype) for rounds in leaves}
        for kind in sorted(kinds, key=str):
            chosen = [i for i, rounds in enumerate(leaves) if _sum_dtype(rounds[0].dtype) == kind]
            vectors = [
                jnp.concatenate([leaves[i][r].astype(kind).reshape(-1) for i in chosen])
                for r in range(self._rounds)
            ]
            mean = self._mean_of_vectors(vectors)
            start = 0
            for i in chosen:
                like = leaves[i][0]
                results[i] = mean[start : start + like.size].reshape(like.shape[1:])
                start += like.size
        return [r for r in results if r is not None]

    def _mean_of_vectors(self, vectors: list[jax.Array]) -> jax.Array:
        """Mean over all logical shards of one vector per round, on every device."""
        count, length = self._mesh.size, vectors[0].size
        here, beyond = split_tree(self._logical_shards, self._rounds)
        sums = _sum_by(here, vectors)
        padding = -length % count
        pieces = jnp.stack([jnp.pad(v, (0, padding)).reshape(count, -1) for v in sums])
        # [sums, devices, piece]: mine of all pieces, becomes everyone's of my piece.
        received = jax.lax.all_to_all(
            pieces, self._mesh.axis_names, split_axis=1, concat_axis=1, tiled=True
        )
        # Slots of device d are d*rounds to (d+1)*rounds: device-major is the order of shards.
        ordered = received.transpose(1, 0, 2).reshape(count * len(sums), -1)
        counted = self._logical_shards * len(sums) // self._rounds
        (total,) = _sum_by(beyond, list(ordered[:counted]))
        mean = total / self._logical_shards
        gathered: jax.Array = jax.lax.all_gather(mean, self._mesh.axis_names, tiled=True)
        return gathered[:length]

    def _on_each_device(self, fn: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(
            fn, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def tree_of(logical_shards: int) -> tuple[int, ...]:
    """The fixed order of the sum: how many neighbours are added at each level, from the leaves.

    The smallest prime factor first, then the others from the largest: 12 shards are added in
    pairs, the 6 sums in threes, the 2 sums to one. So 6, 2 and 1 devices need to exchange one sum
    each, and 3 devices two.
    """
    factors: list[int] = []
    left, factor = logical_shards, 2
    while left > 1:
        while left % factor == 0:
            factors.append(factor)
            left //= factor
        factor += 1
    return (*factors[:1], *reversed(factors[1:]))


def split_tree(logical_shards: int, rounds: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Levels that a device can add alone, having `rounds` neighbouring shards; and the rest."""
    levels = tree_of(logical_shards)
    for depth in range(len(levels), 0, -1):
        if rounds % math.prod(levels[:depth]) == 0:
            return levels[:depth], levels[depth:]
    return (), levels


def _sum_by(levels: Sequence[int], rows: list[jax.Array]) -> list[jax.Array]:
    """Add neighbours level by level, each group from the left."""
    for size in levels:
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        rows = [functools.reduce(jnp.add, group) for group in groups]
    return rows


def _sum_dtype(dtype: Any) -> Any:
    """In what a leaf is summed and returned: floats as they are, numbers and flags as float32."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.dtype(jnp.float32)


def _is_everywhere(params: Any) -> bool:
    return all(a.sharding.is_fully_replicated for a in jax.tree.leaves(params))


def _with_aux(loss_fn: LossFunction) -> Callable[..., tuple[jax.Array, Any]]:
    """`(params, rows, key) -> (loss, aux)` of a function that may want no key and give no aux."""
    wants_key = _positional_count(loss_fn) >= 3

    def compute(params: Any, rows: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        result = loss_fn(params, rows, key) if wants_key else loss_fn(params, rows)
        return result if isinstance(result, tuple) else (result, {})

    return compute


def _positional_count(function: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return 3
    return sum(p.kind in kinds for p in parameters)


@functools.cache
def _warn_tolerance(why: str) -> None:
    log.warning("equal bits are not promised in this incarnation, only tolerance: %s", why)


def ordered_step(
    run: Run,
    loss_fn: LossFunction,
    optimizer: Any,
    *,
    logical_shards: int = LOGICAL_SHARDS,
    reduction: str = "ordered",
    prepare: Callable[[Any], Any] | None = None,
) -> Callable[[Any, Any, Any, jax.Array], tuple[Any, Any, dict[str, Any]]]:
    """Make a whole training step, `(params, optimizer_state, batch, key)`, out of four programs.

    Example:
        step_fn = es.ordered_step(run, loss_fn, optax.adamw(1e-3))
        params, opt, metrics = step_fn(params, opt, run.batch(dataset, step), run.key(step))

    Args:
        run: of this incarnation.
        loss_fn: `(params, rows, key) -> loss` or `(loss, aux)`; mean over its rows.
        optimizer: an optax transformation whose update is elementwise (AdamW, SGD, Lion, …).
        logical_shards: fixed parts of every batch.
        reduction: `"ordered"` or `"fast"`, as for `run.value_and_grad`.
        prepare: applied to the whole gradients on every device, as a program of its own: here a
            clip by global norm keeps its bits on every mesh.

    Returns:
        A function that gives the new parameters, the new optimizer state, and the metrics
        `loss` and what `aux` holds when it is a dict. It consumes (donates) what it replaces.
    """
    compute = run.value_and_grad(loss_fn, logical_shards=logical_shards, reduction=reduction)
    prepared = jax.jit(prepare) if prepare is not None else None
    update: Any = None

    def step(params: Any, state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, Any]:
        nonlocal update
        if update is None:
            update = make_update(optimizer, params, state)
        loss, aux, gradients = compute(params, batch, key)
        if prepared is not None:
            gradients = prepared(gradients)
        params, state = update(params, state, gradients)
        return params, state, {"loss": loss, **(aux if isinstance(aux, dict) else {})}

    return step


def make_update(optimizer: Any, params: Any, state: Any) -> Callable[[Any, Any, Any], Any]:
    """The fourth program, `(params, state, gradients) -> (params, state)`; it donates both.

    What comes out lies where what went in lay: a step moves nothing.
    """

    def apply(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        changes, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, c: (p + c).astype(p.dtype), params, changes), state

    shardings = jax.tree.map(lambda a: a.sharding, (params, state))
    update: Callable[[Any, Any, Any], Any] = jax.jit(
        apply, out_shardings=shardings, donate_argnums=(0, 1)
    )
    return update
