"""What a program says to `es.main`, and where the rest comes from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ENV_CHECKPOINTS = "EVERSTEP_CHECKPOINTS"
ENV_COMPILED = "JAX_COMPILATION_CACHE_DIR"
DEFAULT_CHECKPOINTS = "checkpoints"
EVERY_STEPS_ALONE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    seed: int = 0
    """Of `run.key`, `run.rng`; part of what makes a step."""
    checkpoints: str | None = None
    """Alone only: folder or `file://` address. Else `$EVERSTEP_CHECKPOINTS`, else `checkpoints`."""
    every_steps: int = EVERY_STEPS_ALONE
    """Alone only: a checkpoint is due at multiples of this."""

    @property
    def checkpoints_alone(self) -> str:
        """Where a training without an agent keeps its checkpoints."""
        return self.checkpoints or os.environ.get(ENV_CHECKPOINTS) or DEFAULT_CHECKPOINTS


def compiled_folder() -> Path:
    """Where compiled programs are kept between incarnations: shared by the hosts of a machine."""
    named = os.environ.get(ENV_COMPILED)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "everstep" / "compiled"
