"""A real training whose processes are all killed, and that goes on from its hosts' own disks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.controller.api.reasons import Reason
from everstep.runtime.checkpoint.digest import digest_newest
from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.disk.copies import find_copies
from everstep.runtime.storage.open import open_store
from trained_job import NAME, STEPS, Shape, TrainedJob
from waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CHECKPOINT_EVERY = 40
STEPS_UNHURRIED = 44
"""Just past the first checkpoint, and long before the second, which ends the copies before it."""


class LocalJob(TrainedJob):
    """The same job with a local tier, and with checkpoints that are far between."""

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    def _manifest(self) -> dict[str, Any]:
        manifest = super()._manifest()
        checkpoint: dict[str, Any] = manifest["spec"]["checkpoint"]
        checkpoint["everySteps"] = CHECKPOINT_EVERY
        checkpoint["local"] = {"path": str(self.disk)}
        return manifest

    def step_copied(self) -> int:
        """The newest step that the disks of all hosts have."""
        record = msgspec.json.decode(self.state.job(NAME).record.read_bytes())
        uid: str = record["metadata"]["uid"]
        by_owner: dict[str, set[int]] = {}
        for copy in find_copies(str(self.disk), f"{uid} {self.uri}")[0]:
            by_owner.setdefault(copy.record.owner, set()).add(copy.record.step)
        if len(by_owner) < len(self.all_hosts):
            return 0
        return max(set.intersection(*by_owner.values()), default=0)


def test_a_job_that_lost_all_memory_goes_on_from_its_hosts_disks_at_a_newer_step(
    tmp_path: Path,
) -> None:
    undisturbed = TrainedJob(tmp_path / "undisturbed", Shape(slices=1, devices=2), tmp_path / "xla")
    # Each host has half of the state: only the two disks together have a step.
    job = LocalJob(tmp_path / "job", Shape(slices=2, is_spread=True), tmp_path / "xla")
    try:
        job.apply()
        job.pace.write_text(str(STEPS_UNHURRIED))
        job.wait_trained((0, 1), 1)
        job.wait_committed()
        committed = list_commits(open_store(job.uri))[-1].step
        wait_for(lambda: job.step_copied() > committed, what="newer copies", timeout_s=60)
        job.kill_slices(0, 1)
        copied = job.step_copied()
        assert list_commits(open_store(job.uri))[-1].step < copied
        job.give_back(0, 1)
        job.wait_trained((0, 1), 2)
        recovery = job.status().recoveries[-1]
        assert recovery.step_restored == copied
        assert recovery.source == "local"
        assert recovery.local_bytes > 0
        assert recovery.storage_bytes == recovery.own_bytes == recovery.peer_bytes == 0
        job.finish()
        assert Reason.RESTORED_FROM_DISKS.value in {event["reason"] for event in job.events()}
        assert job.run.conflicts == [], "a replayed step had another loss"
        undisturbed.hurry()
        undisturbed.apply()
        undisturbed.finish()
        assert digest_newest(job.uri) == digest_newest(undisturbed.uri)
        assert digest_newest(job.uri)[0] == STEPS
    finally:
        job.close()
        undisturbed.close()
