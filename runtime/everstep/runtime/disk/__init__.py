"""The local tier: what a host holds of its newest steps, on a disk of its own.

A local copy is what a snapshot is (regions, and a checksum of every block) in files instead of
memory, so it outlives the host's processes. It never makes a step exist: whoever reads one says
which step, and of which content. `record` and `choice` decide and are pure; `tier` writes, `copies`
finds and reads.
"""
