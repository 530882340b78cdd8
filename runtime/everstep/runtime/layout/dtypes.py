"""The dtypes that a state may have, by the names that numpy and ml_dtypes give them."""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

_NUMPY = (
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
_ML_DTYPES = (
    "bfloat16",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int2",
    "int4",
    "uint2",
    "uint4",
)

STORABLE = frozenset((*_NUMPY, *_ML_DTYPES))
"""What fits in a snapshot. A checkpoint on storage may take fewer, and says so itself."""


@cache
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The dtype of this name, one of `STORABLE`; native byte order.

    Raises:
        KeyError: not a storable dtype.
    """
    if name not in STORABLE:
        raise KeyError(name)
    return np.dtype(name if name in _NUMPY else getattr(ml_dtypes, name))


@cache
def itemsize(name: str) -> int:
    """Bytes of one element in memory. Sub-byte dtypes take one."""
    return numpy_dtype(name).itemsize


@cache
def dtype_name(dtype: np.dtype[np.generic]) -> str:
    """The name of a dtype. Numpy makes it anew each time, which is long for thousands of leaves."""
    return dtype.name
