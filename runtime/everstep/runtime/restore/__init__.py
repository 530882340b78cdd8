"""A saved step on its way back to devices, from whatever sources hold it.

`reshard` decides what is read from where (pure), `sources` and `peers` read it, `fetch` carries a
plan out and verifies every block, `assemble` makes jax arrays of it and is the only one to
import jax.
"""
