"""Durable storage: small files, the ledger of a run, and arrays.

`store` is the seam, `posix` and `memory` implement it, `open` chooses. `history` (pure) says what
the ledger's entries mean, `ledger` reads and writes them. `tensors` is the only door to
tensorstore; `reader` reads a committed checkpoint through it.
"""
