"""Where bytes of a state lie, without knowing who holds them. Pure; numpy is not needed.

`boxes` is index arithmetic, `tree` describes the leaves of a state, `manifest` describes which
regions of which leaves one holder has, and where.
"""
