"""Who computes where, and who writes what. Pure.

`mesh` orders devices and sizes axes, `ownership` shares the writing of a checkpoint.
"""
