"""Job records: one precondition for two kinds of writers, and garbage that harms nobody."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep.controller.api.ids import Incarnation, Step
from everstep.controller.api.status import JobStatus
from everstep.controller.core.ledger import Ledger
from everstep.controller.local.errors import Conflict, FolderBusy, NotFound, RecordCorrupt
from everstep.controller.local.files import write_durable
from everstep.controller.local.folder import StateFolder, lock_holder
from everstep.controller.local.records import Outcome
from everstep.controller.local.store import Store
from jobs import make_job
from local_rig import LocalRig


@pytest.fixture
def store(rig: LocalRig) -> Store:
    return rig.world.store


def _apply(store: Store, root: Path, *, uid: str = "another-uid", slices: int = 2) -> Outcome:
    job = make_job(folder=root, slices=slices, hosts=2)
    return store.apply(job, uid=uid, now_s=100.0)[0]


def test_applying_the_same_again_changes_nothing(store: Store, tmp_path: Path) -> None:
    before = store.read("llm")
    assert _apply(store, tmp_path) is Outcome.UNCHANGED
    assert store.read("llm") == before


def test_another_spec_keeps_the_identity_and_is_counted(store: Store, tmp_path: Path) -> None:
    before = store.read("llm")
    store.persist("llm", Ledger(incarnation=Incarnation(7)), JobStatus(), before.precondition)
    assert _apply(store, tmp_path, slices=3) is Outcome.CONFIGURED
    after = store.read("llm")
    assert after.metadata.uid == before.metadata.uid
    assert after.metadata.generation == 2
    assert after.metadata.resource_version == before.metadata.resource_version + 2
    assert after.ledger.incarnation == 7


def test_a_spec_changed_in_between_makes_the_controllers_write_a_conflict(
    store: Store,
) -> None:
    before = store.read("llm")
    store.edit("llm", lambda spec: replace(spec, suspend=True))
    ledger = Ledger(incarnation=Incarnation(1))
    assert store.persist("llm", ledger, JobStatus(), before.precondition) is None
    assert store.read("llm").ledger == Ledger()
    assert store.read("llm").spec.suspend


def test_the_precondition_of_a_deleted_job_does_not_fit_its_successor(
    store: Store, tmp_path: Path
) -> None:
    before = store.read("llm")
    store.remove("llm", before.metadata.uid)
    assert _apply(store, tmp_path) is Outcome.CREATED
    assert store.read("llm").metadata.resource_version == before.metadata.resource_version
    assert store.persist("llm", Ledger(), JobStatus(), before.precondition) is None


def test_removing_an_earlier_job_leaves_its_successor_alone(store: Store) -> None:
    store.remove("llm", "uid of the earlier one")
    assert store.read("llm").metadata.name == "llm"


def test_a_job_that_is_being_deleted_is_not_changed_any_more(store: Store, tmp_path: Path) -> None:
    store.mark_deleted("llm", now_s=5.0)
    store.mark_deleted("llm", now_s=9.0)
    assert store.read("llm").metadata.deleted_at == 5.0
    with pytest.raises(Conflict, match="is being deleted"):
        _apply(store, tmp_path, slices=1)
    with pytest.raises(Conflict, match="is being deleted"):
        store.edit("llm", lambda spec: replace(spec, suspend=True))


def test_jobs_of_one_folder_have_addresses_of_their_own(rig: LocalRig, tmp_path: Path) -> None:
    for n in range(20):
        rig.add_job(f"job-{n}", root=tmp_path)
    numbers = [rig.world.store.read(name).metadata.number for name in rig.world.jobs()]
    assert len(set(numbers)) == 21


@pytest.mark.parametrize(
    "garbage",
    [b"", b"{", b"null", b'{"metadata": {"name": "llm"}}', b"\xff\xfe\x00"],
    ids=["empty", "torn", "null", "fields missing", "not text"],
)
def test_a_garbage_record_is_refused_with_its_path_and_left_as_it_is(
    rig: LocalRig, garbage: bytes
) -> None:
    path = rig.folder.job("llm").record
    path.write_bytes(garbage)
    with pytest.raises(RecordCorrupt, match=r"job\.json"):
        Store(rig.folder).read("llm")
    assert path.read_bytes() == garbage


def test_a_controller_goes_on_with_the_last_good_record_and_keeps_the_garbage_for_people(
    rig: LocalRig,
) -> None:
    before = rig.world.observe("llm")
    assert before is not None
    path = rig.folder.job("llm").record
    path.write_bytes(b"{ somebody edited this")
    seen = rig.world.observe("llm")
    assert seen == before
    ledger = Ledger(incarnation=Incarnation(1))
    assert rig.world.persist("llm", ledger, JobStatus(), before.precondition) is not None
    assert Store(rig.folder).read("llm").ledger == ledger
    assert path.with_name("job.json.refused").read_bytes() == b"{ somebody edited this"


def test_a_record_of_another_name_is_refused(rig: LocalRig) -> None:
    source, target = rig.folder.job("llm"), rig.folder.job("copy")
    target.make()
    target.record.write_bytes(source.record.read_bytes())
    with pytest.raises(RecordCorrupt, match="it holds the job 'llm'"):
        rig.world.store.read("copy")


def test_progress_that_a_crash_of_the_machine_tore_is_forgotten(
    rig: LocalRig, store: Store, tmp_path: Path
) -> None:
    rig.add_job(root=tmp_path)
    found = store.read("llm")
    shown = replace(found.status, step=Step(9))
    assert store.note_progress("llm", shown, found.precondition)
    assert store.read("llm").status == shown
    for torn in (b"", b"{", b"\0" * 40):
        rig.folder.job("llm").progress.write_bytes(torn)
        assert store.read("llm") == found
        seen = rig.world.observe("llm")
        assert seen is not None
        assert seen.ledger == found.ledger


def test_an_unknown_job_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound, match=r'multislicejobs.everstep.dev "nobody" not found'):
        store.read("nobody")


# The child does nothing of jax, which another test may have brought up in this process.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_replaced_file_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durable(path, b"old" * 1000)
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            while True:
                write_durable(path, b"new" * 1000)
        for _ in range(20):
            assert path.read_bytes() in (b"old" * 1000, b"new" * 1000)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert path.read_bytes() in (b"old" * 1000, b"new" * 1000)


def test_a_writer_that_is_stuck_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.controller.local.folder.LOCK_PATIENCE_S", 0.05)
    folder = StateFolder(tmp_path)
    with folder.writing(), pytest.raises(FolderBusy) as refused, folder.writing():
        pass
    assert refused.value.pid == os.getpid() == lock_holder_in(folder)


def lock_holder_in(folder: StateFolder) -> int:
    with folder.writing():
        found = lock_holder(folder.write_lock)
    assert found is not None
    return found
