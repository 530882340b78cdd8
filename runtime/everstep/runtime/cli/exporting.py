"""Write a step elsewhere, in a format that others read. Every byte is verified on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everstep.runtime.checkpoint import orbax
from everstep.runtime.checkpoint.draft import array_plan
from everstep.runtime.cli.opened import ItemReader, leaf_bytes, spans
from everstep.runtime.errors import StateRefused, StorageRefused
from everstep.runtime.layout.dtypes import numpy_dtype
from everstep.runtime.layout.manifest import Region
from everstep.runtime.layout.scalars import inline_values, with_values
from everstep.runtime.storage.manifest import STATE
from everstep.runtime.storage.store import Store
from everstep.runtime.storage.tensors import ArrayPlan, PartWriter, merge

SAFETENSORS: Mapping[str, str] = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
"""dtypes that safetensors has, in its words (its format page, "Format")."""

_FILE_BYTES = 64 << 20
_HEADER_ALIGN = 8


def export_safetensors(
    reader: ItemReader, target: Path, metadata: Mapping[str, str], advance: Callable[[int], None]
) -> None:
    """Write one item as one safetensors file: arrays by their dotted names.

    Python scalars and strings go into the file's metadata; typed PRNG keys are written as their
    uint32 data, with the implementation in the metadata.

    Raises:
        StateRefused: leaves of a dtype that safetensors does not have; all are named, and nothing
            is written.
        StorageRefused: the file exists.
        CheckpointInvalid: the step is damaged; no file is left.

    Durability: on return the file is there whole and synced; before that it is not there.
    Blocking: for the whole copy; memory in use is one read.
    """
    names = orbax.array_names(reader.tree)
    refused = [
        leaf
        for leaf in reader.tree.leaves
        if leaf.is_stored_as_bytes and leaf.dtype not in SAFETENSORS
    ]
    if refused:
        raise StateRefused(
            ", ".join(leaf.name for leaf in refused),
            ", ".join(sorted({leaf.dtype for leaf in refused})),
            "a dtype of safetensors; --format orbax holds it",
        )
    notes = {**metadata, **_plain_values(reader)}
    header: dict[str, Any] = {}
    offset = 0
    # Widest elements first, so that every array starts at a multiple of its element.
    order = sorted(
        (i for i, leaf in enumerate(reader.tree.leaves) if leaf.is_stored_as_bytes),
        key=lambda i: -numpy_dtype(reader.tree.leaves[i].dtype).itemsize,
    )
    for index in order:
        leaf, size = reader.tree.leaves[index], leaf_bytes(reader.tree.leaves[index])
        if leaf.impl is not None:
            notes[f"{names[index]} (PRNG key)"] = leaf.impl
        header[str(names[index])] = {
            "dtype": SAFETENSORS[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps({"__metadata__": notes, **header}, ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN)
    _write_whole(target, text, reader, order, advance)


def _write_whole(
    target: Path,
    header: bytes,
    reader: ItemReader,
    order: list[int],
    advance: Callable[[int], None],
) -> None:
    if target.exists():
        raise StorageRefused(str(target), "a file", "a name that is free")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with draft.open("xb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for index in order:
                for values in _rows(reader, index):
                    file.write(values.reshape(-1).view(np.uint8).data)
                    advance(values.nbytes)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, target)
        except FileExistsError as error:
            raise StorageRefused(str(target), "a file", "a name that is free") from error
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _rows(reader: ItemReader, index: int) -> Iterator[NDArray[Any]]:
    """A leaf's values in C order, part by part: whole rows of chunks along the first axis."""
    leaf = reader.tree.leaves[index]
    chunk = reader.chunks[index]
    rows = (chunk[0], *leaf.shape[1:]) if leaf.shape else ()
    for box in spans(leaf, rows):
        out: NDArray[Any] = np.empty(box.shape, numpy_dtype(leaf.dtype))
        reader.read_many([(Region(index, box), out)])
        yield out


def _plain_values(reader: ItemReader) -> dict[str, str]:
    keys = orbax.orbax_keys(reader.tree)
    return {
        ".".join(keys[index]): value if isinstance(value, str) else repr(value)
        for index, value in inline_values(reader.tree, reader.extra).items()
    }


def export_orbax(
    reader: ItemReader,
    store: Store,
    folder: str,
    *,
    committed_s: float,
    advance: Callable[[int], None],
) -> None:
    """Write one item as a checkpoint of Orbax, with nothing of ours in it but the checksums.

    Args:
        reader: of the item.
        store: the place to write to.
        folder: of the step there; must not exist.
        committed_s: Unix seconds at which the step was committed.
        advance: called with the bytes that were read.

    Raises:
        StorageRefused: something is there already.
        CheckpointInvalid: the step is damaged; what was written is deleted.

    Durability: on return it is on storage; its marker is written last.
    """
    if store.exists(folder):
        raise StorageRefused(f"{store.uri}/{folder}", "something", "a folder that does not exist")
    tree = reader.tree
    names = orbax.array_names(tree)
    chunks = {
        index: tuple(reader.chunks.get(index) or (max(n, 1) for n in leaf.shape))
        for index, leaf in enumerate(tree.leaves)
        if leaf.is_stored_as_bytes
    }
    layout = orbax.layout(with_values(tree, reader.extra), chunks)
    small_files = {f"{STATE}/{path}": data for path, data in layout.files.items()}
    small_files |= orbax.step_files(
        {STATE: orbax.HANDLER}, begun_s=committed_s, committed_s=committed_s
    )
    arrays = store.location(f"{folder}/{STATE}")
    try:
        part = PartWriter(arrays, "ocdbt.process_0", file_bytes=_FILE_BYTES)
        small: list[tuple[ArrayPlan, NDArray[Any]]] = [
            (
                ArrayPlan(name=scalar.name, dtype=scalar.dtype, shape=(), chunk=()),
                np.asarray(scalar.value, scalar.dtype),
            )
            for scalar in layout.scalars
        ]
        for index, leaf in enumerate(tree.leaves):
            if not leaf.is_stored_as_bytes:
                continue
            plan = array_plan(tree, names, index, chunks[index])
            if 0 in leaf.shape:
                small.append((plan, np.empty(leaf.shape, numpy_dtype(leaf.dtype))))
                continue
            for box in spans(leaf, chunks[index]):
                out: NDArray[Any] = np.empty(box.shape, numpy_dtype(leaf.dtype))
                reader.read_many([(Region(index, box), out)])
                part.write(plan, box, out)
                part.flush()
                advance(out.nbytes)
        has_part = any(leaf.is_stored_as_bytes and 0 not in leaf.shape for leaf in tree.leaves)
        merged = merge(arrays, ["ocdbt.process_0"] if has_part else [], small)
        below = arrays.path.removeprefix(store.location(folder).path)
        store.write_together(folder, small_files, unsynced=[f"{below}{name}" for name in merged])
        store.write_durable(f"{folder}/{orbax.MARKER}", b"Checkpoint commit was successful.\n")
    except BaseException:
        store.delete_tree(folder)
        raise
