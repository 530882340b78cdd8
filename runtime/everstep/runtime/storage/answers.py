"""What an answer of an object store, or the lack of one, means for who asked. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Trouble(Enum):
    """Why a request is made again."""

    THROTTLED = "throttled"
    SERVER = "server"
    """It said that something is wrong with itself; what was asked may have been done."""
    CONNECTION = "connection"
    """No answer, or only the beginning of one; what was asked may have been done."""
    ALTERED = "altered"
    """What arrived is not what was sent, on either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How often, and after how long, a request is made again."""

    attempts: int
    """In all."""
    first_s: float
    """Longest wait before the second one; doubled each time, and drawn from zero to that."""
    most_s: float


PATIENCE: Mapping[Trouble, Patience] = {
    Trouble.THROTTLED: Patience(attempts=10, first_s=1.0, most_s=32.0),
    Trouble.SERVER: Patience(attempts=8, first_s=0.5, most_s=16.0),
    Trouble.CONNECTION: Patience(attempts=6, first_s=0.2, most_s=8.0),
    Trouble.ALTERED: Patience(attempts=4, first_s=0.1, most_s=1.0),
}

RETRY_AFTER_MAX_S = 60.0
"""A server that asks for more is not waited for here: its answer goes to the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Asking again gives the same answer."""

    found: str
    remedy: str


_REFUSED: Mapping[int, tuple[str, str]] = {
    400: ("the request is not accepted", "what the message says"),
    401: ("the credentials are not accepted", "credentials that are valid"),
    403: (
        "forbidden to these credentials",
        (
            "the role Storage Object User (roles/storage.objectUser) on the bucket, and no "
            "retention policy or hold on what is to be deleted"
        ),
    ),
    409: ("something else is there already", "another path for this run"),
    413: ("larger than the bucket takes", "smaller parts"),
}

_TROUBLE: Mapping[int, Trouble] = {
    408: Trouble.CONNECTION,
    429: Trouble.THROTTLED,
}


def judge_status(status: int, words: str) -> Trouble | Refused:
    """What to do about a status that is no success.

    Args:
        status: of HTTP; 404 and 412 are answers and have their own place.
        words: the server's own.
    """
    if status == 400 and "crc32c" in words.lower():
        return Trouble.ALTERED
    if status in _TROUBLE:
        return _TROUBLE[status]
    if status >= 500 or status < 400:
        # Where success was expected, a status below 400 is a server that lost its way.
        return Trouble.SERVER
    found, remedy = _REFUSED.get(status, ("refused", "what the message says"))
    said = f": {words}" if words else ""
    return Refused(found=f"{found} ({status}{said})", remedy=remedy)


def retry_after(text: str | None) -> float | None:
    """Seconds that a server asks for, from its `Retry-After`; None where it says none.

    Its other form, a date, is not taken: it needs two clocks that agree.
    """
    if text is None or not text.strip().isascii() or not text.strip().isdigit():
        return None
    return float(text)
