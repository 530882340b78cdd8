"""A real training with its checkpoints in a bucket: what it does when all memory is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.runtime.checkpoint.discover import list_commits
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.reader import CheckpointReader, read_leaf
from object_fixtures import BUCKET, use
from object_server import ObjectServer
from trained_job import STEPS, Shape, TrainedJob
from waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.slow]


class BucketJob(TrainedJob):
    """The same job with another address."""

    @property
    def uri(self) -> str:
        return f"gs://{BUCKET}/run"


def test_a_job_that_lost_all_memory_goes_on_from_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ObjectServer() as server:
        server.make_bucket(BUCKET)
        use(server.url, monkeypatch)
        job = BucketJob(tmp_path / "job", Shape(slices=2), tmp_path / "compiled")
        try:
            job.apply()
            job.wait_trained((0, 1), 1)
            job.wait_committed()
            job.kill_slices(0, 1)
            job.give_back(0, 1)
            job.wait_trained((0, 1), 2)
            recovery = job.status().recoveries[-1]
            assert recovery.step_restored
            assert recovery.storage_bytes > 0
            job.finish()
            commits = list_commits(open_store(job.uri))
            assert commits[-1].step == STEPS
            reader = CheckpointReader(open_store(job.uri), commits[-1])
            for number, leaf in enumerate(reader.tree.leaves):
                if leaf.is_stored_as_bytes:
                    assert read_leaf(reader, number).shape == leaf.shape
            assert job.run.conflicts == [], "a replayed step had another loss"
            assert not (job.folder / "checkpoints").exists()
            wait_for(lambda: not job.processes(), what="every process of the job to be gone")
        finally:
            job.close()


def test_a_bucket_that_is_not_there_is_said_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ObjectServer() as server:
        use(server.url, monkeypatch)
        job = BucketJob(tmp_path / "job", Shape(slices=1), tmp_path / "compiled")
        try:
            job.apply()
            said = wait_for(
                lambda: [text for text in reports(job) if "no bucket of this name" in text],
                what="the missing bucket to be reported",
                timeout_s=60,
            )
            assert "gs://bucket" in said[0]
            assert job.run.read_metrics() is None, "no step was done"
        finally:
            job.close()


def reports(job: TrainedJob) -> list[str]:
    found = [job.report(host) for host in job.all_hosts]
    return [str(report) for report in found if report is not None]
