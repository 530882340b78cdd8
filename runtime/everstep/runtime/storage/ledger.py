"""The numbered log of a run: one small file an entry, created exclusively, never changed.

The fence (G6): an entry gets number `n` only when nobody else has it, and is only tried after all
entries before `n` were read. So whoever appends has seen every claim before his entry; a writer
of a superseded incarnation loses the race for the number, reads on, finds the newer claim, stops.
What the entries mean is in `history`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.errors import (
    Fenced,
    InvariantViolated,
    ManifestCorrupt,
    StorageRefused,
    StorageUnavailable,
    check,
)
from everstep.runtime.storage import history
from everstep.runtime.storage.foreign_steps import ForeignRun
from everstep.runtime.storage.history import (
    Claim,
    Commit,
    Committed,
    Dropped,
    Entry,
    Refusal,
    Started,
)
from everstep.runtime.storage.store import StorageMissing, Store

FOLDER = "_everstep/ledger"
_SUFFIX = ".json"
_DAMAGED = ".json.damaged"
"""A person who accepts the loss of an unreadable entry renames its file to this."""


class EntryUncertain(StorageUnavailable):
    """Storage failed after an entry may have got its name: it is there or not, and a crash may
    decide. What it says is whole in either case; the next `refresh` shows it.
    """

    def __init__(self, entry: str) -> None:
        self.entry = entry
        super().__init__(f"{entry} may exist or not: storage failed while it was made")


def entry_path(number: int) -> str:
    return f"{FOLDER}/{number:020d}{_SUFFIX}"


class RunLedger:
    """The ledger of the run that a store holds. Reading never writes.

    Blocking: every method may wait for storage. One lock; may be called from any thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: list[Entry] = []
        self._top = 0
        self._claim: Claim | None = None
        self._lock = threading.RLock()

    @property
    def uri(self) -> str:
        return self._store.uri

    def refresh(self) -> None:
        """Read the entries that are new.

        Raises:
            ManifestCorrupt: an entry is unreadable or missing (C6); names the file.
            StorageUnavailable: storage did not answer. What was read before stays as it was.
        """
        with self._lock:
            self._read_on(*self._listed())

    def look(self) -> None:
        """As `refresh`, for a ledger that is kept to look at, and never claimed.

        A run that was deleted and begun anew in the same folder is read from its start, and so is
        one in which a person gave an entry up.
        """
        with self._lock:
            present, damaged = self._listed()
            if self._is_of_this_run(present, damaged):
                self._read_on(present, damaged)
                return
            anew = RunLedger(self._store)
            anew.refresh()
            self._entries, self._top = anew._entries, anew._top

    def _is_of_this_run(self, present: set[int], damaged: set[int]) -> bool:
        """Whether what was read is still there. Of two runs, no two commits are the same."""
        known = {entry.number for entry in self._entries}
        if known != {number for number in present - damaged if number <= self._top}:
            return False
        commits = [entry for entry in self._entries if isinstance(entry, Committed)]
        telling = (commits or self._entries)[-1:]
        return all(self._read(entry.number) == entry for entry in telling)

    def _listed(self) -> tuple[set[int], set[int]]:
        """Numbers of the entries that are there, and of those that a person gave up."""
        names = self._store.list(FOLDER)
        present = {number for name in names if (number := _number(name, _SUFFIX)) is not None}
        damaged = {number for name in names if (number := _number(name, _DAMAGED)) is not None}
        return present, damaged

    def _read_on(self, present: set[int], damaged: set[int]) -> None:
        for number in range(self._top + 1, max(present | damaged, default=0) + 1):
            if number not in damaged:
                self._entries.append(self._read(number))
            self._top = number

    def is_behind(self) -> bool:
        """Whether somebody has appended since the last `refresh`. One question to storage.

        Without the lock: who asks does not wait for an entry that is just being written.
        """
        return self._store.exists(entry_path(self._top + 1))

    @property
    def newest_claim(self) -> Claim | None:
        """Whose run it is, as of the last `refresh`."""
        return history.newest_claim(self._entries)

    @property
    def newest_incarnation(self) -> Incarnation | None:
        """Of the newest claim, as of the last `refresh`; None when nothing ever started."""
        claim = self.newest_claim
        return claim.incarnation if claim is not None else None

    @property
    def own_claim(self) -> Claim | None:
        """What `claim` got."""
        return self._claim

    def commits(self) -> tuple[Commit, ...]:
        """The steps that exist, newest last, as of the last `refresh`."""
        return history.live_commits(self._entries)

    def superseded(self) -> tuple[Commit, ...]:
        """Commits that were replaced or left behind, and not dropped yet."""
        return history.superseded_commits(self._entries)

    def dropped_folders(self) -> frozenset[str]:
        return frozenset(e.folder for e in self._entries if isinstance(e, Dropped))

    def claim(self, incarnation: Incarnation, job_uid: str) -> Claim:
        """Become the only one who may commit. Idempotent for the same job and incarnation.

        Raises:
            Fenced: a newer incarnation of this job, or another job, has the run.
            StorageRefused: the folder holds something that is no run; nothing is written then.

        Durability: on return the claim is on storage and all earlier ones are fenced.
        """
        with self._lock:
            while True:
                self.refresh()
                judgement = history.judge_claim(
                    self._entries, job_uid=job_uid, incarnation=incarnation
                )
                if isinstance(judgement, Refusal):
                    raise self._fenced(incarnation, judgement.newest, job_uid)
                if judgement is not None:
                    self._claim = judgement
                    return judgement
                if not self._entries:
                    self._refuse_foreign_folder()
                number = self._top + 1
                entry = Started(number=number, job_uid=job_uid, incarnation=incarnation)
                self._create(entry)

    def append_commit(
        self,
        *,
        step: Step,
        folder: str,
        digest: str,
        committed_at_s: float,
        extra: Mapping[str, str] | None = None,
    ) -> Commit:
        """Make a step exist. `claim` comes first.

        Raises:
            Fenced: a newer claim exists; nothing was appended.

        Durability: on return the step exists on storage. After a crash within, it exists or not.
        """

        def build(claim: Claim, number: int) -> Entry:
            return Committed(
                number=number,
                claim=claim.number,
                step=step,
                incarnation=claim.incarnation,
                folder=folder,
                digest=digest,
                committed_at_s=committed_at_s,
                extra=dict(extra or {}),
            )

        with self._lock:
            number = self._append(build)
            return next(c for c in history.all_commits(self._entries) if c.number == number)

    def append_dropped(self, step: Step, folder: str | None = None) -> None:
        """Say that a step is gone, before its folder is deleted.

        Args:
            step: one that exists, unless `folder` names a superseded commit of it.
            folder: of the commit; by default that of the step that exists.

        Raises:
            Fenced: a newer claim exists; nothing may be deleted.
        """
        with self._lock:
            if folder is None:
                found = [commit for commit in self.commits() if commit.step == step]
                check(found, f"step {step} is dropped and does not exist")
                folder = found[0].folder
            name = folder
            self._append(
                lambda claim, number: Dropped(
                    number=number, claim=claim.number, step=step, folder=name
                )
            )

    def verify_claim(self) -> Claim:
        """Read on, and return the own claim if it is still the newest.

        Raises:
            Fenced: a newer claim exists.
        """
        with self._lock:
            self.refresh()
            claim = self._claim
            if claim is None:
                raise InvariantViolated("a ledger is written to before it was claimed")
            newest = self.newest_claim
            if newest is not None and newest.number != claim.number:
                raise self._fenced(claim.incarnation, newest, claim.job_uid)
            return claim

    def _append(self, build: Callable[[Claim, int], Entry]) -> int:
        while True:
            claim = self.verify_claim()
            entry = build(claim, self._top + 1)
            if self._create(entry):
                return entry.number

    def _create(self, entry: Entry) -> bool:
        """Try for the entry's number; whoever won it, it is read by the next `refresh`."""
        data = history.encode(entry)
        try:
            won = self._store.create_exclusive(entry_path(entry.number), data)
        except (StorageRefused, StorageUnavailable) as error:
            if self._may_hold(entry.number, data):
                raise EntryUncertain(f"{self._store.uri}/{entry_path(entry.number)}") from error
            raise
        if won:
            self._entries.append(entry)
            self._top = entry.number
        return won

    def _may_hold(self, number: int, data: bytes) -> bool:
        try:
            return self._store.read(entry_path(number)) == data
        except StorageMissing:
            return False
        except (StorageRefused, StorageUnavailable):
            return True

    def _read(self, number: int) -> Entry:
        path = entry_path(number)
        where = f"{self._store.uri}/{path}"
        try:
            data = self._store.read(path)
        except StorageRefused as error:
            raise ManifestCorrupt(
                where, f"ledger entry {number}", "an entry of the ledger", error.found
            ) from error
        try:
            return history.decode(data, number=number, where=where)
        except ManifestCorrupt as error:
            error.add_note(
                f"To go on without this entry, rename {where} to "
                f"{entry_path(number).rpartition('/')[2]}.damaged; a step that it committed is "
                "lost with it."
            )
            raise

    def _refuse_foreign_folder(self) -> None:
        others = [name for name in self._store.list("") if not name.startswith((".", "_everstep"))]
        others = [name for name in others if name != "lost+found"]
        if others and not self._is_of_orbax():
            shown = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
            raise StorageRefused(
                self._store.uri,
                f"something else ({shown})",
                "an empty folder, or one with steps of Orbax or a run's ledger (_everstep/ledger)",
            )

    def _is_of_orbax(self) -> bool:
        """Whether Orbax keeps steps here: those of a run may lie beside them."""
        run = ForeignRun(self._store)
        return bool(run.steps()) and not run.is_one_checkpoint

    def _fenced(self, own: Incarnation, newest: Claim, job_uid: str) -> Fenced:
        by = "" if newest.job_uid == job_uid else f" (taken over by job {newest.job_uid})"
        return Fenced(own=own, newest=newest.incarnation, where=f"{self._store.uri}{by}")


def _number(name: str, suffix: str) -> int | None:
    digits = name.removesuffix(suffix)
    if digits == name or len(digits) != 20 or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits)
