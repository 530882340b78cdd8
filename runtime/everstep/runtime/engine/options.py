"""What a user says about his checkpoints, and what he is told about a step. Values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from everstep.runtime.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which steps stay: those that any of the rules wants, and always the newest two.

    `every_steps` keeps the multiples of a number, `every_seconds` the first step of each so many
    seconds, `best` so many of the steps with the best `metric`, a number in the step's metadata.
    """

    latest: int = 3
    every_steps: int | None = None
    every_seconds: float | None = None
    best: int = 0
    metric: str = "loss"
    mode: str = "min"

    def __post_init__(self) -> None:
        for name, least in (("latest", 1), ("best", 0)):
            if getattr(self, name) < least:
                raise ConfigurationError(
                    f"retention.{name}", getattr(self, name), f"{least} or more"
                )
        for name in ("every_steps", "every_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"retention.{name}", value, "more than 0, or None")
        if self.mode not in ("min", "max"):
            raise ConfigurationError("retention.mode", self.mode, '"min" or "max"')


@dataclass(frozen=True, slots=True)
class LocalTier:
    """A folder on the host's own disk, where each process keeps what it holds of its newest steps.

    A restore reads from there what it finds of the very content that is committed, and the rest
    from the run. What fails there is a warning, never a failure of a step.
    """

    path: str | os.PathLike[str]
    every_saves: int = 1
    """So many saves from one local copy to the next. Fewer are made when the disk is slower."""
    latest: int = 1
    """So many copies stay, and one more while the next is written."""

    def __post_init__(self) -> None:
        for name in ("every_saves", "latest"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"local.{name}", getattr(self, name), "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """What is known of a step without reading its arrays."""

    step: int
    committed_at_s: float | None
    """Unix seconds; None where Orbax wrote the step and did not say."""
    metadata: Any
    """What was given to `save`."""
    parts: tuple[str, ...]
    size_bytes: int
    """Of its arrays."""


def as_tier(local: str | os.PathLike[str] | LocalTier) -> LocalTier:
    """What was said of the local tier, as a value.

    Raises:
        ConfigurationError: it is no path, or the address of something that is no disk.
    """
    tier = local if isinstance(local, LocalTier) else LocalTier(local)
    if "://" in os.fspath(tier.path) or not os.fspath(tier.path):
        raise ConfigurationError("local", os.fspath(tier.path), "a folder on this host's own disk")
    return tier
