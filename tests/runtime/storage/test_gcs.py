"""A bucket that does what buckets and networks do: slow, cut, full of refusals, and lying."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from checkpoints import array, claimed, load, random_values, same_bits, save, tree_of
from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.checkpoint.commit import begin
from everstep.runtime.errors import CheckpointInvalid, Fenced, StorageRefused, StorageUnavailable
from everstep.runtime.storage.answers import Patience, Trouble
from everstep.runtime.storage.buckets import BucketStore
from everstep.runtime.storage.gcs import GcsBucket
from everstep.runtime.storage.ledger import FOLDER, RunLedger
from everstep.runtime.storage.open import open_store
from everstep.runtime.storage.store import StorageMissing
from object_fixtures import quick_store, use
from object_server import ObjectServer
from unkind_proxy import (
    Answer,
    Asked,
    Cut,
    Delay,
    Fault,
    Flip,
    Lie,
    Rule,
    Shorten,
    UnkindProxy,
    describe,
)

TREE = tree_of(
    array("w", shape=(700, 1000)),
    array("b", dtype="bfloat16", shape=(33, 65)),
    array("empty", shape=(0, 4)),
    array("scalar", shape=()),
)
SMALL = tree_of(array("w", shape=(30, 20)))
TWICE = {trouble: Patience(attempts=2, first_s=0.01, most_s=0.01) for trouble in Trouble}
OLD, NEW = random_values(TREE, 1), random_values(TREE, 2)


@pytest.fixture
def proxy(
    object_server: ObjectServer,
    bucket_environment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Generator[UnkindProxy]:
    # After that fixture, which points the clients to the server itself.
    assert bucket_environment
    with UnkindProxy(object_server.url) as found:
        use(found.url, monkeypatch)
        yield found


@pytest.fixture
def store(proxy: UnkindProxy, bucket_environment: str) -> BucketStore:
    assert proxy.port
    return quick_store(bucket_environment)


def every(period: int, fault: Fault, *kinds: str) -> Rule:
    """The fault for the first try of every so manyth request of these kinds."""

    def rule(asked: Asked) -> Fault | None:
        is_due = asked.kind in kinds and asked.tries == 0 and asked.number % period == 0
        return fault if is_due else None

    return rule


PASSING: dict[str, Rule] = {
    "slow": every(2, Delay(0.05), "create", "read", "list", "stat"),
    "throttled": every(2, Answer(429, retry_after="0"), "create", "read", "list", "stat"),
    "server error": every(2, Answer(500), "create", "read", "list", "stat", "delete"),
    "stored, and 503": every(2, Answer(503, is_done_first=True), "create"),
    "stored, and cut": every(2, Cut(is_done_first=True), "create"),
    "cut before": every(2, Cut(), "create", "read", "list", "stat"),
    "answers cut at the first byte": every(1, Cut(after_bytes=0), "read", "list"),
    "answers cut in the middle": every(1, Cut(after_bytes=1000), "read"),
    "a list that ends in its middle": every(1, Cut(after_bytes=40), "list"),
    "a bit of what is sent": every(2, Flip(5, is_of_request=True), "create"),
    "a bit of what is read": every(2, Flip(7), "read"),
    "less than there is": every(2, Shorten(3), "read"),
}


@pytest.mark.parametrize("kind", PASSING)
def test_what_passes_is_not_noticed(kind: str, proxy: UnkindProxy, store: BucketStore) -> None:
    ledger = claimed(store)
    save(store, ledger, 1, TREE, OLD)
    proxy.rule = PASSING[kind]
    commit = save(store, ledger, 2, TREE, NEW)
    assert same_bits(load(store, commit), NEW)
    assert sum(proxy.faults.values()) >= 2, describe(proxy.asked)
    # Another reader, without trouble, sees the same.
    proxy.rule = None
    assert same_bits(load(store, commit), NEW)


def always(fault: Fault, *kinds: str) -> Rule:
    return lambda asked: fault if asked.kind in kinds else None


LASTING: dict[str, Rule] = {
    "nothing is taken": always(Answer(503), "create"),
    "cut each time": always(Cut(), "create"),
    "throttled for ever": always(Answer(429, retry_after="0"), "create"),
    "too long a wait": always(Answer(429, retry_after="86400"), "create"),
    "forbidden": always(Answer(403), "create"),
    "lies": always(Lie(), "create"),
    "lies about data": lambda a: Lie() if a.kind == "create" and "/d/" in a.name else None,
    "lies about metadata": lambda a: Lie() if a.name.endswith("/_METADATA") else None,
    "lies about the ledger": lambda a: (
        Lie() if a.kind == "create" and FOLDER in a.name and a.name.endswith(".json") else None
    ),
    "a bit of all that is sent": always(Flip(3, is_of_request=True), "create"),
    "nothing can be read": always(Answer(500), "read"),
    "nothing can be listed": always(Answer(500), "list"),
}


@pytest.mark.parametrize("kind", LASTING)
def test_what_lasts_is_an_error_in_words_and_the_old_step_is_whole(
    kind: str, proxy: UnkindProxy, store: BucketStore, bucket_environment: str
) -> None:
    ledger = claimed(store)
    old = save(store, ledger, 1, TREE, OLD)
    proxy.rule = LASTING[kind]
    with pytest.raises((StorageRefused, StorageUnavailable)) as caught:
        save(store, ledger, 2, TREE, NEW)
    assert "gs://bucket/run-" in str(caught.value)
    proxy.rule = None
    fresh = quick_store(bucket_environment)
    reader = RunLedger(fresh)
    reader.refresh()
    assert [commit.step for commit in reader.commits()] == [1]
    assert same_bits(load(fresh, old), OLD)
    # And the run goes on when the trouble is over.
    assert same_bits(load(fresh, save(fresh, ledger, 3, TREE, NEW)), NEW)


def test_whatever_request_fails_for_good_the_step_is_there_whole_or_not_at_all(
    proxy: UnkindProxy, store: BucketStore, bucket_environment: str
) -> None:
    first, second = random_values(SMALL, 1), random_values(SMALL, 2)
    ledger = claimed(store)
    save(store, ledger, 1, SMALL, first)
    faults: list[Fault] = [
        Answer(503),
        Cut(is_done_first=True),
        Answer(503, is_done_first=True),
        Cut(),
    ]
    outcomes: set[bool] = set()
    newest, values = 1, first
    # One request more is answered each time, until all are and the save succeeds.
    for number in itertools.count():
        seen = [0]

        def rule(_: Asked, seen: list[int] = seen, from_: int = number) -> Fault | None:
            seen[0] += 1
            return faults[from_ % len(faults)] if seen[0] > from_ else None

        # A step of its own: the drafts that failed are still there, and would be passed by.
        step, wanted = number + 2, second if values is first else first
        writer = quick_store(bucket_environment, patience=TWICE)
        mine = again(writer, ledger)
        proxy.rule = rule
        try:
            save(writer, mine, step, SMALL, wanted)
            has_failed = False
        except (StorageRefused, StorageUnavailable):
            has_failed = True
        proxy.rule = None
        reader = RunLedger(writer)
        reader.refresh()
        is_there = reader.commits()[-1].step == step
        if has_failed:
            outcomes.add(is_there)
        else:
            assert is_there
        if is_there:
            newest, values = step, wanted
        assert reader.commits()[-1].step == newest
        assert same_bits(load(writer, reader.commits()[-1]), values)
        if not has_failed:
            break
    assert outcomes == {True, False}


def again(store: BucketStore, ledger: RunLedger) -> RunLedger:
    """The claim of an earlier ledger, over another store."""
    claim = ledger.own_claim
    assert claim is not None
    return claimed(store, claim.incarnation, claim.job_uid)


def test_a_create_whose_answer_was_lost_is_known_as_ours(
    proxy: UnkindProxy, store: BucketStore
) -> None:
    proxy.rule = every(1, Cut(is_done_first=True), "create")
    assert store.create_exclusive("l/1", b"mine")
    assert proxy.faults["Cut"] == 1
    proxy.rule = None
    assert not store.create_exclusive("l/1", b"yours")


def test_a_create_that_lost_the_race_while_it_was_cut_is_known_as_lost(
    proxy: UnkindProxy, store: BucketStore, bucket_environment: str
) -> None:
    other = quick_store(bucket_environment)
    rival: list[bool] = []

    def rule(asked: Asked) -> Fault | None:
        if asked.kind == "create" and asked.tries == 0:
            # The rival comes between the first try and the second.
            thread = threading.Thread(
                target=lambda: rival.append(other.create_exclusive("l/1", b"theirs"))
            )
            thread.start()
            threads.append(thread)
            return Cut()
        return None

    threads: list[threading.Thread] = []
    proxy.rule = rule
    won = store.create_exclusive("l/1", b"mine")
    for thread in threads:
        thread.join()
    assert [won] != rival
    assert store.read("l/1") == (b"mine" if won else b"theirs")


def test_a_server_that_asks_for_patience_is_given_it(
    proxy: UnkindProxy, store: BucketStore
) -> None:
    times: list[float] = []

    def rule(asked: Asked) -> Fault | None:
        if asked.kind == "create":
            times.append(time.monotonic())
            return Answer(429, retry_after="1") if asked.tries == 0 else None
        return None

    proxy.rule = rule
    store.write_durable("a", b"1")
    assert times[1] - times[0] >= 1.0


def test_a_longer_wait_than_is_sensible_goes_to_the_caller(
    proxy: UnkindProxy, store: BucketStore
) -> None:
    proxy.rule = always(Answer(503, retry_after="3600"), "create")
    with pytest.raises(StorageUnavailable) as caught:
        store.write_durable("a", b"1")
    assert caught.value.retry_after_s == 3600
    assert proxy.faults["Answer"] == 1


def test_tries_are_bounded(proxy: UnkindProxy, store: BucketStore) -> None:
    proxy.rule = always(Answer(500), "read")
    with pytest.raises(StorageUnavailable, match="status 500"):
        store.read("a")
    assert proxy.faults["Answer"] == 6


def test_a_server_that_says_nothing_is_given_up(
    proxy: UnkindProxy, bucket_environment: str
) -> None:
    store = quick_store(bucket_environment, timeout_s=(0.2, 0.2))
    proxy.rule = always(Delay(1.0), "read")
    with pytest.raises(StorageUnavailable):
        store.read("a")


def test_long_lists_come_in_pages(proxy: UnkindProxy, bucket_environment: str) -> None:
    store = quick_store(bucket_environment, page_size=7)
    for number in range(30):
        store.write_durable(f"x/{number:02}/a", b"")
        store.write_durable(f"x/file-{number:02}", b"")
    proxy.rule = every(2, Cut(), "list")
    assert store.list("x") == (
        *(f"{n:02}" for n in range(30)),
        *(f"file-{n:02}" for n in range(30)),
    )
    store.delete_tree("x")
    assert store.list("x") == ()
    assert store.list("") == ()


def test_a_note_of_an_empty_folder_is_no_file(store: BucketStore) -> None:

    name = store.uri.removeprefix("gs://bucket/")
    GcsBucket("bucket").replace(f"{name}/x/", b"")
    assert store.list("") == ("x",)
    assert store.list("x") == ()
    store.delete_tree("x")
    assert store.list("") == ()


def test_a_delete_that_was_done_and_not_answered_is_done(
    proxy: UnkindProxy, store: BucketStore
) -> None:
    for number in range(5):
        store.write_durable(f"x/{number}", b"1")
    proxy.rule = every(1, Answer(503, is_done_first=True), "delete")
    store.delete_tree("x")
    assert not store.exists("x")
    assert proxy.faults["Answer"] == 5


@pytest.mark.parametrize(
    ("fault", "said"),
    [(Answer(403), "roles/storage.objectUser"), (Answer(401), "credentials")],
    ids=["forbidden", "not known"],
)
def test_a_forbidden_bucket_is_said_when_it_is_opened(
    fault: Fault, said: str, proxy: UnkindProxy, bucket_environment: str
) -> None:
    proxy.rule = lambda _: fault
    with pytest.raises(StorageRefused, match=said) as caught:
        open_store(bucket_environment)
    assert "gs://bucket" in str(caught.value)
    assert len(proxy.asked) <= 3


def test_a_missing_bucket_is_said_when_it_is_opened(bucket_environment: str) -> None:
    assert bucket_environment
    with pytest.raises(StorageRefused, match="no bucket of this name") as caught:
        open_store("gs://no-such-bucket/run")
    assert caught.value.field == "gs://no-such-bucket"


def test_a_file_where_the_run_should_be_is_said_when_it_is_opened(
    store: BucketStore,
) -> None:
    store.write_durable("x", b"1")
    with pytest.raises(StorageRefused, match="an object"):
        open_store(f"{store.uri}/x")


def test_who_may_read_and_not_write_can_look(
    proxy: UnkindProxy, store: BucketStore, bucket_environment: str
) -> None:
    commit = save(store, claimed(store), 1, TREE, OLD)
    proxy.rule = always(Answer(403), "create", "delete")
    assert same_bits(load(open_store(bucket_environment), commit), OLD)
    with pytest.raises(StorageRefused, match="forbidden"):
        claimed(open_store(bucket_environment), 2)


def test_a_stale_incarnation_that_wakes_up_in_its_commit_is_fenced(
    proxy: UnkindProxy, store: BucketStore, bucket_environment: str
) -> None:
    # G6: the entry of the old one is on its way while the new one claims.
    old = claimed(store, 1)
    save(store, old, 1, TREE, OLD)
    other = quick_store(bucket_environment)
    new: list[RunLedger] = []

    def rule(asked: Asked) -> Fault | None:
        if asked.kind == "create" and FOLDER in asked.name and not new:
            new.append(RunLedger(other))
            thread = threading.Thread(target=lambda: new[0].claim(Incarnation(2), "job"))
            threads.append(thread)
            thread.start()
            return Delay(0.3)
        return None

    threads: list[threading.Thread] = []
    proxy.rule = rule
    try:
        save(store, old, 2, TREE, NEW)
        was_fenced = False
    except Fenced:
        was_fenced = True
    for thread in threads:
        thread.join()
    proxy.rule = None
    assert new[0].own_claim is not None
    reader = RunLedger(other)
    reader.refresh()
    assert [c.step for c in reader.commits()] == ([1] if was_fenced else [1, 2])
    assert all(c.number < new[0].own_claim.number for c in reader.commits())
    with pytest.raises(Fenced):
        begin(store, Step(3), Incarnation(1), ledger=old)


def test_of_two_writers_of_one_number_one_has_it(
    proxy: UnkindProxy, bucket_environment: str
) -> None:
    stores = [quick_store(bucket_environment) for _ in range(6)]
    proxy.rule = every(2, Cut(is_done_first=True), "create")
    barrier = threading.Barrier(len(stores))
    won: list[int] = []

    def create(number: int) -> None:
        barrier.wait()
        if stores[number].create_exclusive("l/1", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % n for n in won] == [stores[0].read("l/1")]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "swapped"])
def test_damage_of_a_stored_object_is_found(damage: str, store: BucketStore) -> None:

    commit = save(store, claimed(store), 1, TREE, OLD)
    bucket = GcsBucket("bucket")
    prefix = f"{store.uri.removeprefix('gs://bucket/')}/{commit.folder}/"
    objects = bucket.list(prefix, is_deep=True).objects
    # Values, and not an index: the largest object.
    name = max(objects, key=lambda one: objects[one].size)
    data = bucket.get(name)
    if damage == "missing":
        bucket.delete(name)
    else:
        altered = {
            "flipped": data[:100] + bytes([data[100] ^ 16]) + data[101:],
            "truncated": data[: len(data) // 2],
            "swapped": bytes(len(data)),
        }[damage]
        bucket.replace(name, altered)
    with pytest.raises(CheckpointInvalid):
        load(store, commit)


def test_every_object_that_is_gone_or_altered_is_noticed_or_harmless(
    store: BucketStore,
) -> None:

    commit = save(store, claimed(store), 1, TREE, OLD)
    bucket = GcsBucket("bucket")
    prefix = f"{store.uri.removeprefix('gs://bucket/')}/{commit.folder}/"
    dice = np.random.default_rng(1)
    caught = 0
    for name in bucket.list(prefix, is_deep=True).objects:
        data = bucket.get(name)
        at = int(dice.integers(max(len(data), 1)))
        flipped = data[:at] + bytes(one ^ 1 << at % 8 for one in data[at : at + 1]) + data[at + 1 :]
        for altered in (None, flipped):
            if altered is None:
                bucket.delete(name)
            else:
                bucket.replace(name, altered)
            try:
                assert same_bits(load(store, commit), OLD), name
            except CheckpointInvalid:
                caught += 1
            bucket.replace(name, data)
    assert same_bits(load(store, commit), OLD)
    assert caught >= 8


@pytest.fixture
def service_account(
    proxy: UnkindProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> UnkindProxy:
    """Credentials of a token server that gives a new token each time."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
    path = tmp_path / "account.json"
    account = {
        "type": "service_account",
        "client_email": "run@example.invalid",
        "private_key_id": "1",
        "private_key": text,
        "token_uri": f"{proxy.url}/token",
    }
    path.write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    proxy.is_guarded = True
    return proxy


def test_a_token_that_expires_in_the_middle_is_renewed(
    service_account: UnkindProxy, bucket_environment: str
) -> None:
    store = quick_store(bucket_environment)
    ledger = claimed(store)

    def rule(asked: Asked) -> Fault | None:
        if asked.number % 5 == 4 and asked.tries == 0:
            # From now on the one in use is refused.
            service_account.expire_tokens()
        return None

    service_account.rule = rule
    commit = save(store, ledger, 1, TREE, OLD)
    assert same_bits(load(store, commit), OLD)
    assert len(service_account.tokens_given) >= 4


@pytest.mark.parametrize("status", [400, 503], ids=["taken away", "not answering"])
def test_credentials_that_are_not_renewed_are_a_clear_error_and_nothing_is_lost(
    status: int, service_account: UnkindProxy, bucket_environment: str
) -> None:
    store = quick_store(bucket_environment)
    ledger = claimed(store)
    old = save(store, ledger, 1, TREE, OLD)
    service_account.stop_giving(status)
    service_account.expire_tokens()
    with pytest.raises((StorageRefused, StorageUnavailable), match="credentials"):
        save(store, ledger, 2, TREE, NEW)
    service_account.stop_giving(None)
    assert same_bits(load(store, old), OLD)
    assert same_bits(load(store, save(store, ledger, 2, TREE, NEW)), NEW)


def test_no_credentials_at_all_are_said_with_what_would_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "not-there.json"))
    with pytest.raises(StorageRefused, match="gcloud auth application-default login"):
        open_store("gs://bucket/run")


def test_missing_is_not_confused_with_trouble(proxy: UnkindProxy, store: BucketStore) -> None:
    proxy.rule = every(1, Answer(503), "read")
    with pytest.raises(StorageMissing):
        store.read("nothing")
