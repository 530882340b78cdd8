"""Fixtures of tests that need a bucket; `conftest.py` of their folder takes them over."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping

import pytest

from everstep.runtime.storage.answers import Patience, Trouble
from everstep.runtime.storage.buckets import BucketStore
from object_server import ObjectServer, environment_for

BUCKET = "bucket"
QUICK: Mapping[Trouble, Patience] = {
    trouble: Patience(attempts=6, first_s=0.01, most_s=0.05) for trouble in Trouble
}
"""As often as in earnest, or more, and without the waiting."""

_numbers = itertools.count()


@pytest.fixture(scope="session")
def object_server() -> Generator[ObjectServer]:
    with ObjectServer() as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def bucket_environment(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Clients of this process use the server; the address of a run of its own."""
    use(object_server.url, monkeypatch)
    return f"gs://{BUCKET}/run-{next(_numbers)}"


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_for(url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)


def quick_store(
    uri: str,
    *,
    patience: Mapping[Trouble, Patience] = QUICK,
    timeout_s: tuple[float, float] = (2.0, 2.0),
    page_size: int = 1000,
) -> BucketStore:
    """The store of a run in the bucket, that gives up soon."""
    from everstep.runtime.storage.gcs import GcsBucket

    bucket = GcsBucket(BUCKET, patience=patience, timeout_s=timeout_s, page_size=page_size)
    path = uri.removeprefix(f"gs://{BUCKET}/")
    return BucketStore(bucket, path, driver="gcs", bucket=BUCKET)
