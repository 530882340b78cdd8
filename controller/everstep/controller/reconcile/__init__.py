"""Observe, plan, persist, act: the loop that drives any world with the pure core."""
