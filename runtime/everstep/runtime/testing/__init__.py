"""For tests of trainings: a clock that stands still, and slices as processes of this machine.

Shipped, so that users test their own `train` with it. `clock` has no dependencies; `local_slices`
starts real workers with real collectives, without agents or a controller.
"""
