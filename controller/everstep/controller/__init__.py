"""The controller: what decides, and the worlds that it decides for.

Nothing here imports `everstep.runtime`, jax or tensorstore. Of this package the runtime may import
`everstep.controller.api` and nothing else. Import the rooms by name; this module exports nothing.
"""
