"""Benchmarks: `python -m benchmarks NAME`; see README.md beside this file."""
