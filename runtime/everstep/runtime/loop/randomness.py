"""Random numbers that depend on the seed and the step alone.

Derived on the host by a hash: no device program, so a new incarnation compiles nothing for them,
and no process index or device count can find its way in.
"""

from __future__ import annotations

import functools
import hashlib

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray


def words_of(seed: int, step: int, purpose: str, count: int) -> NDArray[np.uint32]:
    """`count` independent 32-bit words for one purpose of one step."""
    text = f"everstep {purpose} {seed} {step}".encode()
    data = hashlib.shake_256(text).digest(4 * count)
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


@functools.cache
def _key_words() -> int:
    """Words of a key of jax's configured implementation (two for threefry, four for rbg)."""
    shape = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
    return int(shape[-1])


def key_of(seed: int, step: int, mesh: Mesh) -> jax.Array:
    """A typed key of this step, on every device of the mesh."""
    words = words_of(seed, step, "key", _key_words())
    data = jax.make_array_from_callback(
        words.shape, NamedSharding(mesh, PartitionSpec()), lambda index: words[index]
    )
    key: jax.Array = jax.random.wrap_key_data(data)
    return key


def generator_of(seed: int, step: int) -> np.random.Generator:
    """A numpy generator of this step."""
    return np.random.Generator(np.random.Philox(words_of(seed, step, "rng", 4)))
