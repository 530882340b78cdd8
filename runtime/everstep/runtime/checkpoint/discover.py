"""Which steps exist. The ledger says so; a folder's presence says nothing."""

from __future__ import annotations

from everstep.runtime.storage.history import Commit
from everstep.runtime.storage.ledger import RunLedger
from everstep.runtime.storage.store import Store


def list_commits(store: Store) -> tuple[Commit, ...]:
    """The committed steps of a run, newest last; none only when there truly is none.

    Raises:
        ManifestCorrupt: the ledger cannot be read. That is not the same as an empty one.
        StorageUnavailable: storage did not answer.
    """
    ledger = RunLedger(store)
    ledger.refresh()
    return ledger.commits()
