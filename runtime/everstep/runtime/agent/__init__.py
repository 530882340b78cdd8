"""The process that never dies with the training: one per host.

`session`, `rendezvous` and `agreement` decide (pure); `supervisor` acts. `link` is the seam to the
worker, `wire` the seam to other agents, `channel` the seam to the controller.
"""
