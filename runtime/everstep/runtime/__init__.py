"""The runtime: what runs on each host beside and inside the user's training.

`import everstep.runtime as es` is the user's door. Names are resolved when they are first used, so
that a process that needs one of them (an agent, a tool) does not import jax for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.runtime._version import __version__

if TYPE_CHECKING:
    from everstep.runtime.engine.checkpoints import Checkpoints
    from everstep.runtime.engine.options import LocalTier, Retention, StepMetadata
    from everstep.runtime.engine.parts import Json, PartFiles, PartHandler, Parts
    from everstep.runtime.engine.saved import CheckpointFailed, Saved
    from everstep.runtime.errors import (
        CheckpointInvalid,
        ConfigurationError,
        EverstepError,
        Fenced,
        Infeasible,
        PeerUnavailable,
        StateRefused,
        StorageRefused,
        StorageUnavailable,
    )
    from everstep.runtime.loop.data import Batch, Dataset, IndexedDataset, ShuffledIndices
    from everstep.runtime.loop.ending import Leave
    from everstep.runtime.loop.main import main
    from everstep.runtime.loop.reduction import ordered_step
    from everstep.runtime.loop.run import Run

__all__ = [
    "Batch",
    "CheckpointFailed",
    "CheckpointInvalid",
    "Checkpoints",
    "ConfigurationError",
    "Dataset",
    "EverstepError",
    "Fenced",
    "IndexedDataset",
    "Infeasible",
    "Json",
    "Leave",
    "LocalTier",
    "PartFiles",
    "PartHandler",
    "Parts",
    "PeerUnavailable",
    "Retention",
    "Run",
    "Saved",
    "ShuffledIndices",
    "StateRefused",
    "StepMetadata",
    "StorageRefused",
    "StorageUnavailable",
    "__version__",
    "main",
    "ordered_step",
]

_HOMES = {
    "Batch": "loop.data",
    "CheckpointFailed": "engine.saved",
    "CheckpointInvalid": "errors",
    "Checkpoints": "engine.checkpoints",
    "ConfigurationError": "errors",
    "Dataset": "loop.data",
    "EverstepError": "errors",
    "Fenced": "errors",
    "IndexedDataset": "loop.data",
    "Infeasible": "errors",
    "Json": "engine.parts",
    "Leave": "loop.ending",
    "LocalTier": "engine.options",
    "PartFiles": "engine.parts",
    "PartHandler": "engine.parts",
    "Parts": "engine.parts",
    "PeerUnavailable": "errors",
    "Retention": "engine.options",
    "Run": "loop.run",
    "Saved": "engine.saved",
    "ShuffledIndices": "loop.data",
    "StateRefused": "errors",
    "StepMetadata": "engine.options",
    "StorageRefused": "errors",
    "StorageUnavailable": "errors",
    "main": "loop.main",
    "ordered_step": "loop.reduction",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
