"""State on its way from devices into host memory that outlives the worker.

Worker's side: `capture` (device → slot) and `slots` (the mapping of the slots). Agent's side:
`shelf` owns the slots and says what is valid; `memfd` is the memory, `memory` how much there is.
`cadence` decides how often (pure). The agent imports no jax, so it never imports `capture`.
"""
