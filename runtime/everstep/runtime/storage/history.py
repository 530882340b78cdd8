"""What the entries of a run's ledger mean: who may commit, and which steps exist. Pure.

Invariants (`docs/reference/checkpoint-format.md` states them for readers of the format):

- C1 Entries are numbered 1, 2, 3, … without a gap, and never change.
- C2 A claim is an entry of its own: `(job, incarnation)` at a number. The newest claim is the only
  one that may append; every other entry carries the number of the claim in whose name it stands.
- C3 Within one job, a claim's incarnation is greater than all earlier ones of that job.
- C4 A job that was superseded by another job's claim never claims again. So two jobs over one
  folder cannot take it from each other in turns: the newer has it, the older stops.
- C5 A step exists exactly when a commit entry names it, no later claim committed an earlier or
  equal step, and no drop entry names its folder. Steps that exist are therefore in increasing
  order of step and of number at once: a run that went back to 10 and committed 15 has no 20.
- C6 Entries that cannot be read are an error, never an absence.
"""

from __future__ import annotations

from collections.abc import Sequence

import google_crc32c
import msgspec

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.errors import ManifestCorrupt


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="incarnation started"):
    """A claim: from here on only this incarnation of this job commits."""

    number: int
    job_uid: str
    incarnation: Incarnation


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag="step committed"):
    number: int
    claim: int
    """Number of the claim in whose name it was appended."""
    step: Step
    incarnation: Incarnation
    folder: str
    """Where the checkpoint lies, relative to the run."""
    digest: str
    """`sha256:` and the hex digest of the bytes of `everstep.json` in that folder."""
    committed_at_s: float
    extra: dict[str, str] = {}


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="step dropped"):
    """Appended before the folder is deleted."""

    number: int
    claim: int
    step: Step
    folder: str


Entry = Started | Committed | Dropped


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A step that exists, or existed."""

    step: Step
    incarnation: Incarnation
    folder: str
    digest: str
    committed_at_s: float
    extra: dict[str, str] = {}
    number: int
    claim: int
    job_uid: str


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    entry: msgspec.Raw
    crc32c: str


def encode(entry: Entry) -> bytes:
    body = msgspec.json.encode(entry)
    return b'{"entry":%b,"crc32c":"%08x"}\n' % (body, google_crc32c.value(body))


def decode(data: bytes, *, number: int, where: str) -> Entry:
    """Read one entry.

    Raises:
        ManifestCorrupt: it is torn, garbage, altered, or another number's.
    """
    name = f"ledger entry {number}"
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        body = bytes(envelope.entry)
        found = f"{google_crc32c.value(body):08x}"
        if found != envelope.crc32c:
            raise ManifestCorrupt(where, name, f"crc32c {envelope.crc32c}", f"crc32c {found}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestCorrupt(where, name, "an entry of the ledger", str(error)) from error
    try:
        entry = msgspec.json.decode(body, type=Entry)
    except msgspec.DecodeError as error:
        # It is as it was written: only not by this version.
        raise ManifestCorrupt(
            where,
            name,
            "an entry that this version knows",
            f"one of a newer version of Everstep ({error})",
        ) from error
    if entry.number != number:
        raise ManifestCorrupt(where, name, f"number {number}", f"number {entry.number}")
    return entry


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    job_uid: str
    incarnation: Incarnation


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    newest: Claim


def newest_claim(entries: Sequence[Entry]) -> Claim | None:
    for entry in reversed(entries):
        if isinstance(entry, Started):
            return Claim(number=entry.number, job_uid=entry.job_uid, incarnation=entry.incarnation)
    return None


def judge_claim(
    entries: Sequence[Entry], *, job_uid: str, incarnation: Incarnation
) -> Claim | Refusal | None:
    """Whether a job's incarnation may claim: the claim it has, why not, or None: go ahead."""
    newest = newest_claim(entries)
    if newest is None:
        return None
    if newest.job_uid == job_uid:
        if newest.incarnation == incarnation:
            return newest
        # C3
        return None if incarnation > newest.incarnation else Refusal(newest=newest)
    # C4
    was_superseded = any(
        isinstance(entry, Started) and entry.job_uid == job_uid for entry in entries
    )
    return Refusal(newest=newest) if was_superseded else None


def all_commits(entries: Sequence[Entry]) -> tuple[Commit, ...]:
    """Every commit that was not dropped, in the order of its claim and step."""
    dropped = _dropped(entries)
    return tuple(commit for commit in _ordered(entries) if commit.folder not in dropped)


def live_commits(entries: Sequence[Entry]) -> tuple[Commit, ...]:
    """The steps that exist, newest last (C5)."""
    dropped = _dropped(entries)
    live: list[Commit] = []
    lowest: Step | None = None
    for commit in reversed(_ordered(entries)):
        # Also a dropped commit has replaced what it replaced: dropping it revives nothing.
        if lowest is None or commit.step < lowest:
            lowest = commit.step
            if commit.folder not in dropped:
                live.append(commit)
    return tuple(reversed(live))


def superseded_commits(entries: Sequence[Entry]) -> tuple[Commit, ...]:
    """Commits that a later claim replaced or left behind; their folders may still be there."""
    live = {commit.number for commit in live_commits(entries)}
    return tuple(c for c in all_commits(entries) if c.number not in live)


def _dropped(entries: Sequence[Entry]) -> frozenset[str]:
    return frozenset(entry.folder for entry in entries if isinstance(entry, Dropped))


def _ordered(entries: Sequence[Entry]) -> list[Commit]:
    owners = {e.number: e.job_uid for e in entries if isinstance(e, Started)}
    commits = [
        Commit(
            step=e.step,
            incarnation=e.incarnation,
            folder=e.folder,
            digest=e.digest,
            committed_at_s=e.committed_at_s,
            extra=e.extra,
            number=e.number,
            claim=e.claim,
            job_uid=owners.get(e.claim, ""),
        )
        for e in entries
        if isinstance(e, Committed)
    ]
    # Within a claim, a slow write of an earlier step may be committed after a later one.
    return sorted(commits, key=lambda c: (c.claim, c.step, c.number))
