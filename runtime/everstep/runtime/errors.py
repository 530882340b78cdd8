"""Errors, by who must act next. Every error has typed fields, not only text."""

from __future__ import annotations


class EverstepError(Exception):
    """Base of all errors of the runtime."""


class ConfigurationError(EverstepError):
    """The user changes something before running again."""

    def __init__(self, field: str, found: object, expected: str) -> None:
        self.field, self.found, self.expected = field, found, expected
        super().__init__(f"{field}: found {found!r}, expected {expected}")


class StateRefused(ConfigurationError):
    """A leaf cannot be stored, or does not fit what was stored. `field` is the leaf's path."""


class Retryable(EverstepError):
    """The caller tries again."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class StorageUnavailable(Retryable):
    """Storage did not answer, or refused in a way that may pass."""


class PeerUnavailable(Retryable):
    """Another agent did not answer."""


class StorageRefused(ConfigurationError):
    """Storage answered that it will not: not writable, full, holds something else."""


class Fenced(EverstepError):
    """This process must stop: a newer incarnation exists."""

    def __init__(self, *, own: int, newest: int, where: str) -> None:
        self.own, self.newest, self.where = own, newest, where
        super().__init__(f"incarnation {own} is fenced: {where} is at incarnation {newest}")


class CheckpointInvalid(EverstepError):
    """Try an older one."""

    def __init__(self, checkpoint: str, leaf: str, expected: object, found: object) -> None:
        self.checkpoint, self.leaf = checkpoint, leaf
        self.expected, self.found = expected, found
        super().__init__(f"{checkpoint}: {leaf}: expected {expected}, found {found}")


class ManifestCorrupt(CheckpointInvalid):
    """A manifest, metadata or ledger file does not read as what it should be."""


class ChecksumMismatch(CheckpointInvalid):
    """Bytes do not match their CRC-32C."""


class Infeasible(EverstepError):
    """No plan exists for this request; `change` is the smallest change that would make one."""

    def __init__(self, message: str, *, change: str) -> None:
        self.change = change
        super().__init__(f"{message}; {change}")


class InvariantViolated(EverstepError):
    """Our own bug. Report it with the log of this host."""


def check(condition: object, message: str) -> None:
    """Raise `InvariantViolated` unless the condition holds. Not stripped by `-O`."""
    if not condition:
        raise InvariantViolated(message)
