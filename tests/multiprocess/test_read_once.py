"""Hosts that lost all memory read each stored byte once, and pass it on to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trained_job import STATE_BYTES, Shape, TrainedJob

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class PatientJob(TrainedJob):
    """The same job, in which nobody is given up for being slow."""

    def _manifest(self) -> dict[str, Any]:
        manifest = super()._manifest()
        timeouts: dict[str, float] = manifest["spec"]["runtime"]["timeouts"]
        timeouts |= {"progressSeconds": 120, "joinSeconds": 130, "startSeconds": 140}
        return manifest


@pytest.mark.parametrize("is_spread", [False, True], ids=["replicated", "sharded"])
def test_after_the_loss_of_everything_each_byte_is_read_once(
    tmp_path: Path, is_spread: bool
) -> None:
    shape = Shape(slices=2, hosts=2, is_spread=is_spread)
    job = PatientJob(tmp_path / "job", shape, tmp_path / "compiled")
    try:
        job.apply()
        job.wait_trained((0, 1), 1)
        job.wait_committed()
        job.kill_slices(0, 1)
        job.give_back(0, 1)
        job.wait_trained((0, 1), 2)
        recovery = job.status().recoveries[-1]
        assert recovery.source == "storage"
        assert recovery.storage_bytes == STATE_BYTES
        # Two hosts need the same half, or all four need all; the count is for everybody.
        copies = 2 if is_spread else 4
        assert recovery.peer_bytes == (copies - 1) * (STATE_BYTES - 4) + 3 * 4
        job.finish()
        job.assert_nothing_left()
    finally:
        job.close()
