"""What an error number of the operating system means for who asked. Pure."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    MISSING = "missing"
    REFUSED = "refused"
    """Asking again gives the same answer."""
    PASSING = "passing"
    """It may pass by itself: a bounded number of further tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    verdict: Verdict
    found: str
    remedy: str


_REFUSED: dict[int, tuple[str, str]] = {
    errno.EACCES: ("not permitted to this user", "a folder that this user may write"),
    errno.EPERM: ("not permitted to this user", "a folder that this user may write"),
    errno.EROFS: ("the file system is read-only", "a writable file system"),
    errno.ENOSPC: ("no space left on the device", "more space, or fewer checkpoints kept"),
    errno.EDQUOT: ("the disk quota is used up", "a larger quota, or fewer checkpoints kept"),
    errno.EFBIG: ("larger than a file may be here", "a larger limit of file size (ulimit -f)"),
    errno.EISDIR: ("a folder is where a file should be", "another folder for this run"),
    errno.ENOTDIR: ("a file is where a folder should be", "another folder for this run"),
    errno.ENOTEMPTY: ("the folder is not empty", "another folder for this run"),
    errno.EEXIST: ("something else is there already", "another folder for this run"),
    errno.ENAMETOOLONG: ("the path is too long", "a shorter path"),
    errno.ELOOP: ("the path is a loop of links", "a path without that loop"),
    errno.EBUSY: ("held by something else", "that nothing else holds it"),
    errno.ETXTBSY: ("held by something else", "that nothing else holds it"),
    errno.EMLINK: ("too many links", "another file system"),
    errno.EXDEV: ("the folder spans two file systems", "a folder on one file system"),
    errno.ENOTSUP: ("not supported by this file system", "a file system with hard links"),
    errno.ENOSYS: ("not supported by this file system", "a file system with hard links"),
}

_PASSING = frozenset(
    {
        errno.EINTR,
        errno.EAGAIN,
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ENOTCONN,
        errno.EREMOTEIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOLCK,
    }
)


def judge(number: int | None, words: str) -> Judgement:
    """What to do about an error.

    Args:
        number: the `errno`; None when there is none.
        words: the system's own words for it.
    """
    if number == errno.ENOENT:
        return Judgement(verdict=Verdict.MISSING, found="nothing", remedy="a file or folder here")
    if number in _REFUSED:
        found, remedy = _REFUSED[number]
        return Judgement(
            verdict=Verdict.REFUSED, found=f"{found} ({errno.errorcode[number]})", remedy=remedy
        )
    # An unknown number is tried again a few times: the tries are bounded, and a wrong "it will
    # never work" ends a job that could have gone on.
    name = errno.errorcode.get(number, str(number)) if number is not None else "no error number"
    known = "" if number in _PASSING else "unexpected: "
    return Judgement(
        verdict=Verdict.PASSING, found=f"{known}{words} ({name})", remedy="storage that answers"
    )
