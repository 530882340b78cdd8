from __future__ import annotations

import pytest

from everstep.controller.api.ids import HostId, Incarnation, Rank, SliceId, Step
from everstep.controller.api.wire import Member, MemberHost
from everstep.runtime.agent.link import Assignment
from everstep.runtime.loop.environment import backend_flags, identity_variables
from everstep.runtime.testing.local_slices import default_settings


def assignment(slices: tuple[int, ...], own: int) -> Assignment:
    members = tuple(
        Member(
            slice=SliceId(s),
            rank=Rank(rank),
            hosts=tuple(MemberHost(host=h, address=f"10.0.{s}.{h}", port=1) for h in (0, 1)),
        )
        for rank, s in enumerate(slices)
    )
    return Assignment(
        job="job",
        job_uid="uid",
        host=HostId(SliceId(own), 1),
        incarnation=Incarnation(5),
        rank=Rank(2 * slices.index(own) + 1),
        process_count=2 * len(slices),
        members=members,
        coordinator_address="10.0.0.0:1",
        local_address=f"10.0.{own}.1",
        token="",
        settings=default_settings(),
        restore_step=Step(3),
    )


STALE = {
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "gone:8080",
    "TPU_WORKER_HOSTNAMES": "gone-0,gone-1",
    "TPU_PROCESS_ADDRESSES": "gone-0:1",
    "JAX_COORDINATOR_ADDRESS": "gone:1",
}


def test_the_assignment_wins_over_a_stale_environment() -> None:
    changes = identity_variables(assignment((0, 2), own=2), STALE)
    assert changes == {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.0:8080",
        "TPU_WORKER_HOSTNAMES": "10.0.2.0,10.0.2.1",
        "TPU_WORKER_ID": "1",
        "TPU_PROCESS_ADDRESSES": None,
        "JAX_COORDINATOR_ADDRESS": None,
    }


def test_one_slice_alone_is_no_multi_slice_job() -> None:
    changes = identity_variables(assignment((1,), own=1), STALE)
    assert changes["MEGASCALE_NUM_SLICES"] is None
    assert changes["MEGASCALE_SLICE_ID"] is None


def test_where_nobody_speaks_of_tpus_nothing_is_set() -> None:
    assert identity_variables(assignment((0, 1), own=0), {"PATH": "/bin"}) == {}


def test_kinds_of_hardware_are_left_as_they_are() -> None:
    found = {**STALE, "TPU_ACCELERATOR_TYPE": "v5e-8", "TPU_LIBRARY_PATH": "/lib"}
    assert not identity_variables(assignment((0,), own=0), found).keys() & {
        "TPU_ACCELERATOR_TYPE",
        "TPU_LIBRARY_PATH",
    }


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        pytest.param("", [], id="nothing"),
        pytest.param("--xla_dump_to=/x", ["--xla_dump_to=/x"], id="another flag"),
        pytest.param(
            "--xla_cpu_collective_timeout_seconds=7",
            ["--xla_cpu_collective_timeout_seconds=7"],
            id="the user's own",
        ),
    ],
)
def test_flags_of_the_user_stay_and_ours_are_added_once(found: str, kept: list[str]) -> None:
    flags = backend_flags(found, patience_s=600).split()
    assert flags[: len(kept)] == kept
    names = [flag.split("=")[0] for flag in flags]
    assert len(names) == len(set(names))
    assert "--xla_cpu_collective_timeout_seconds" in names
    again = backend_flags(" ".join(flags), patience_s=5)
    assert again.split() == flags
