"""A saved step on its way back to devices, from whatever sources hold it.

`reshard` and `division` decide what is read from where and by whom (pure), `options` what may
differ from what was saved (pure), `sources` and `peers` read, `fetch` and `stored` carry a plan out
and verify every block, `exchange` hands what one process read to the others, `assemble` makes jax
arrays of it all; it and `wanted` are the only ones to import jax.
"""
