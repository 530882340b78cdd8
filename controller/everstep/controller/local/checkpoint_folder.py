"""Whether a folder of this machine can be that of a run. Nothing is left behind by looking."""

from __future__ import annotations

import contextlib
import os
import tempfile
from urllib.parse import unquote, urlsplit

from everstep.controller.local.errors import FieldRefused

FIELD = "spec.checkpoint.uri"
_OWN = "_everstep"
"""What a run keeps for itself lies here, so a folder with it is a run's."""
_NOBODYS = frozenset({"lost+found"})
_SHOWN_MAX = 3


def check_checkpoint_folder(uri: str) -> FieldRefused | None:
    """Return why no checkpoint can be written there, or None where one can, or nobody here knows.

    The run itself looks again, and closer, when it starts.

    Args:
        uri: already accepted by `api.validate`.
    """
    path = _path(uri)
    if path is None:
        return None
    above = path
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        expected = "a folder, or nothing yet"
        if above == path:
            return FieldRefused(FIELD, f"a file at {path}", expected)
        return FieldRefused(FIELD, f"a file at {above}, above {path}", expected)
    refusal = _why_nothing_is_made(above)
    if refusal is not None:
        what = f"{path} cannot be written" if above == path else f"{path} cannot be made"
        expected = "a folder that this user may write, on a file system that takes folders"
        return FieldRefused(FIELD, f"{what} ({above}: {refusal})", expected)
    return _check_content(path) if above == path else None


def _path(uri: str) -> str | None:
    if "://" not in uri:
        return os.path.abspath(uri)
    parts = urlsplit(uri)
    return os.path.abspath(unquote(parts.path)) if parts.scheme == "file" else None


def _why_nothing_is_made(folder: str) -> str | None:
    """Return the system's words when a folder cannot be made in this one; tried, and taken back.

    Permissions alone do not tell: not every file system takes folders, whoever asks.
    """
    try:
        probe = tempfile.mkdtemp(prefix=".everstep-", suffix=".tmp", dir=folder)
    except OSError as error:
        return error.strerror or str(error)
    with contextlib.suppress(OSError):
        os.rmdir(probe)
    return None


def _check_content(path: str) -> FieldRefused | None:
    """Refuse a folder of foreign files. One with folders may hold steps of Orbax: the run looks."""
    try:
        entries = [entry for entry in os.scandir(path) if not entry.name.startswith(".")]
    except OSError as error:
        return FieldRefused(
            FIELD, f"{path} cannot be read ({error.strerror})", "a folder that this user may read"
        )
    if any(entry.name.startswith(_OWN) for entry in entries):
        return None
    others = sorted(entry.name for entry in entries if entry.name not in _NOBODYS)
    if not others or any(entry.is_dir() for entry in entries if entry.name not in _NOBODYS):
        return None
    shown = ", ".join(others[:_SHOWN_MAX]) + (", …" if len(others) > _SHOWN_MAX else "")
    return FieldRefused(
        FIELD, f"something else in {path} ({shown})", "an empty folder, a run's own, or nothing yet"
    )
