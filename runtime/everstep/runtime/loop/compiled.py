"""Compiled programs kept between incarnations, safe against a kill at any moment.

jax's own cache writes an entry in place: a worker killed meanwhile leaves half of one, which is
then found for ever. Here an entry appears whole or not at all, and carries its checksum.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from everstep.runtime.loop.distributed import is_verified

log = logging.getLogger("everstep")
DIGEST_BYTES = 32


def keep_compiled(folder: Path) -> None:
    """Use `folder` for this process's compiled programs. A folder that cannot be is done without.

    Durability: entries survive a kill of this process at any point; after a crash of the machine
    an entry may be missing or damaged, which is noticed and costs a compile.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled programs are not kept: %s: %s", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if is_verified():
        _install(folder)


def _install(folder: Path) -> None:
    """Put our entries in the place of jax's. Private, so only for versions that are known."""
    from jax._src import cache_key, compilation_cache
    from jax._src import compilation_cache_interface as interface

    base: Any = interface.CacheInterface

    class Entries(base):  # type: ignore[misc] # An untyped part of jax.
        def __init__(self) -> None:
            self._path = folder

        def get(self, key: str) -> bytes | None:
            return read_entry(folder, key)

        def put(self, key: str, value: bytes) -> None:
            write_entry(folder, key, value)

    private: Any = compilation_cache
    if private._cache is None and not private._cache_initialized:
        private._cache = Entries()
        private._cache_initialized = True
    keys: Any = cache_key
    if getattr(keys._hash_accelerator_config, "__module__", "") != __name__:
        keys._hash_accelerator_config = _make_config_hash(keys._hash_accelerator_config)


def _make_config_hash(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Leave the rank out of a CPU program's key.

    What jax hashes of a CPU client is another number in each process, and process 0 alone writes
    entries: no other process would ever find one. The program itself is the same for all; what
    counts is the kind of machine that it was compiled for.
    """

    def hash_config(hash_obj: Any, devices: Any) -> None:
        kinds = [(device.platform, device.device_kind) for device in devices.flat]
        if any(name != "cpu" for name, _ in kinds):
            original(hash_obj, devices)
        else:
            hash_obj.update(repr((kinds, machine_kind())).encode())

    return hash_config


@functools.cache
def machine_kind() -> str:
    """Architecture and instruction sets of this machine's processor, as far as it says them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    told = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return "\n".join([platform.machine(), *told])


def read_entry(folder: Path, key: str) -> bytes | None:
    """An entry, or None when there is none or it is damaged (it is then removed)."""
    path = folder / f"{key}.everstep"
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, value = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if hashlib.sha256(value).digest() == digest:
        return value
    log.warning("a compiled program was damaged and is compiled anew: %s", path)
    path.unlink(missing_ok=True)
    return None


def write_entry(folder: Path, key: str, value: bytes) -> None:
    """Write an entry so that no reader ever sees a part of it. A full disk is no error here."""
    path = folder / f"{key}.everstep"
    if path.exists():
        return
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-", delete=False) as file:
            file.write(hashlib.sha256(value).digest())
            file.write(value)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("a compiled program was not kept: %s: %s", path, error.strerror)
