"""The checkpoint engine on its own: states of any JAX program to storage and back.

It composes `snapshot`, `checkpoint` and `restore`; the loop without an agent is one of its users.
"""
