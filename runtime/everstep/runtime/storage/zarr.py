"""What zarr keeps of an array beside its chunks: `zarr.json`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from everstep.runtime.layout.dtypes import itemsize

ENDIAN = "little"


def metadata_key(name: str) -> str:
    return f"{name}/zarr.json"


def encode_metadata(dtype: str, shape: Sequence[int], chunk: Sequence[int]) -> bytes:
    """Describe an array: regular chunks, bytes as they are in memory, then their CRC-32C.

    Args:
        dtype: as stored, one that zarr3 has.
        shape: of the array.
        chunk: of its chunks.
    """
    return msgspec.json.encode(
        {
            **described(dtype, shape, chunk),
            "fill_value": _fill_value(dtype),
            "node_type": "array",
            "zarr_format": 3,
        },
        order="sorted",
    )


def described(dtype: str, shape: Sequence[int], chunk: Sequence[int]) -> dict[str, Any]:
    """The part of the description that says how bytes become values."""
    endian = {"configuration": {"endian": ENDIAN}} if itemsize(dtype) > 1 else {}
    return {
        "data_type": dtype,
        "shape": list(shape),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "bytes", **endian}, {"name": "crc32c"}],
    }


def differences(
    data: bytes, dtype: str, shape: Sequence[int], chunk: Sequence[int]
) -> tuple[str, str] | None:
    """What a stored description should say and says, or None when it says what it should."""
    if data == encode_metadata(dtype, shape, chunk):
        return None
    expected = described(dtype, shape, chunk)
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        return "a description of an array", str(error)
    for field, value in expected.items():
        if found.get(field) != value:
            return f"{field} {value}", f"{found.get(field)}"
    return None


def _fill_value(dtype: str) -> Any:
    if dtype == "bool":
        return False
    if dtype.startswith("complex"):
        return [0.0, 0.0]
    return 0 if dtype.startswith(("int", "uint")) else 0.0
