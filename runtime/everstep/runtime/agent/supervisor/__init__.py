"""The agent's hands: what `session` decides is done here, one file for each kind of thing.

Nothing in this room decides about a job. `host` feeds events and performs effects, and is the only
one that knows all others.
"""
