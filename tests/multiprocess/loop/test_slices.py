"""Real workers on one to three slices, with real collectives and no agents."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.runtime.agent.link import EXIT_CODES, EndKind
from everstep.runtime.testing.local_slices import LocalHost, LocalSlices

pytestmark = [pytest.mark.processes, pytest.mark.slow]
TIMEOUT_S = 200.0
TINY = [sys.executable, "-m", "everstep.runtime.examples.tiny"]
STEPS = "12"

World = Callable[..., LocalSlices]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def world(compiled: Path, tmp_path: Path) -> Iterator[World]:
    stderr = (tmp_path / "stderr").open("wb")

    def make(slices: list[int], **environment: str) -> LocalSlices:
        return LocalSlices(
            TINY,
            slices=slices,
            environment={
                "STEPS": STEPS,
                "JAX_COMPILATION_CACHE_DIR": str(compiled),
                **environment,
            },
            stderr=stderr,
        )

    with stderr:
        yield make


def bits(one: LocalHost) -> dict[str, bytes]:
    """Every region of the newest snapshot that this host holds."""
    newest = one.newest()
    assert newest is not None
    memory = one.shelf.view(one.shelf.manifests()[-1][0])
    return {
        f"{newest.plot.tree.leaves[s.leaf].name} {s.box}": bytes(
            memory[s.offset : s.offset + s.size_bytes]
        )
        for s in newest.plot.shards
    }


def finish(world: LocalSlices) -> tuple[dict[str, bytes], dict[int, dict[str, float]]]:
    """Run to the end; the bits of all hosts together, and the metrics."""
    with world:
        world.wait_until_ended(timeout_s=TIMEOUT_S)
        ends = [one.ending and one.ending.kind for one in world.hosts]
        assert ends == [EndKind.DONE] * len(world.hosts)
        metrics = [one.metrics() for one in world.hosts]
        assert all(m == metrics[0] for m in metrics)
        found: dict[str, bytes] = {}
        for one in world.hosts:
            for name, data in bits(one).items():
                assert found.setdefault(name, data) == data, f"replicas of {name} differ"
        return found, metrics[0]


@pytest.fixture(scope="module")
def one_slice(compiled: Path) -> tuple[dict[str, bytes], dict[int, dict[str, float]]]:
    environment = {"STEPS": STEPS, "JAX_COMPILATION_CACHE_DIR": str(compiled)}
    return finish(LocalSlices(TINY, slices=[0], environment=environment))


@pytest.mark.parametrize("slices", [[0, 2], [2, 0, 1]], ids=["two slices", "three in other order"])
def test_more_slices_give_the_same_losses_and_the_same_bits(  # G5
    slices: list[int],
    world: World,
    one_slice: tuple[dict[str, bytes], dict[int, dict[str, float]]],
) -> None:
    found, metrics = finish(world(slices))
    assert metrics == one_slice[1]
    assert found == one_slice[0]
    assert sorted(metrics) == list(range(1, int(STEPS) + 1))


def test_another_mesh_within_the_slices_changes_nothing(
    world: World, one_slice: tuple[dict[str, bytes], dict[int, dict[str, float]]]
) -> None:
    found, metrics = finish(world([0, 1], FSDP="2"))
    assert metrics == one_slice[1]
    whole = {name: data for name, data in one_slice[0].items() if name in found}
    assert whole, "unsharded leaves can be compared directly"
    assert whole == {name: found[name] for name in whole}


def test_a_step_held_to_leave_is_in_every_slot_and_all_workers_leave(world: World) -> None:
    with world([0, 1], STEPS="100000", STEP_S="0.05") as two:
        two.wait_for_step(2, timeout_s=TIMEOUT_S)
        agreed = max(one.step for one in two.hosts) + 4
        two.hold(agreed, leave=True)
        two.wait_until_ended(timeout_s=TIMEOUT_S)
        for one in two.hosts:
            newest = one.newest()
            assert newest is not None
            assert newest.step == agreed
            assert one.ending is not None
            assert (one.ending.kind, one.ending.step) == (EndKind.LEFT, agreed)
            assert one.process.returncode == EXIT_CODES[EndKind.LEFT]


def test_a_users_exception_is_shown_once_with_its_rank_and_the_others_say_a_line(
    world: World, tmp_path: Path
) -> None:
    with world([0, 1], FAULT="raise", FAULT_STEP="5", FAULT_RANK="1") as two:
        two.wait_until_ended(timeout_s=TIMEOUT_S)
        first, second = two.hosts
        assert second.ending is not None
        assert second.ending.kind is EndKind.USER_ERROR
        assert second.ending.step == 5
        assert "told to raise in step 5" in second.ending.message
        # The other one was in a collective with it. That is no cause, and no traceback.
        assert first.ending is None or first.ending.kind is EndKind.COLLECTIVE_ERROR
    said = (tmp_path / "stderr").read_text()
    assert said.count("Traceback (most recent call last)") == 1
    assert re.search(r"rank 1 \(slice 1, host 0\), incarnation 1, after step 5", said)


def test_the_same_exception_on_every_rank_is_shown_whole_on_one(
    world: World, tmp_path: Path
) -> None:
    with world([0, 1], FAULT="raise", FAULT_STEP="5", FAULT_RANK="-1") as two:
        two.wait_until_ended(timeout_s=TIMEOUT_S)
        kinds = {one.ending.kind for one in two.hosts if one.ending is not None}
        assert EndKind.USER_ERROR in kinds
    said = (tmp_path / "stderr").read_text()
    assert said.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("exit", EndKind.EXITED_EARLY),
        ("return", EndKind.EXITED_EARLY),
        ("grow-state", EndKind.STATE_REFUSED),
    ],
)
def test_a_program_that_ends_otherwise_is_told_apart(
    fault: str, kind: EndKind, world: World
) -> None:
    with world([0], FAULT=fault, FAULT_STEP="4") as one:
        one.wait_until_ended(timeout_s=TIMEOUT_S)
        (host,) = one.hosts
        assert host.ending is not None
        assert host.ending.kind is kind
        assert host.process.returncode == EXIT_CODES[kind]
        if kind is EndKind.STATE_REFUSED:
            assert "extra" in host.ending.message


def test_a_device_used_at_import_is_refused_in_words_of_the_users(world: World) -> None:
    with world([0, 1], FAULT="device-at-import") as two:
        two.wait_until_ended(timeout_s=TIMEOUT_S)
        for one in two.hosts:
            assert one.ending is not None
            assert one.ending.kind is EndKind.USER_ERROR
            assert "used a jax device before es.main" in one.ending.message


def test_a_thread_that_the_program_leaves_does_not_keep_the_worker(world: World) -> None:
    with world([0], FAULT="thread", FAULT_STEP="4") as one:
        one.wait_until_ended(timeout_s=TIMEOUT_S)
        assert one.hosts[0].process.returncode == 0


def test_a_stale_environment_does_not_make_the_workers_wait(world: World) -> None:
    stale = {
        "MEGASCALE_NUM_SLICES": "3",
        "MEGASCALE_SLICE_ID": "2",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1",
    }
    with world([0, 1], **stale) as two:
        two.wait_until_ended(timeout_s=TIMEOUT_S)
        assert [one.process.returncode for one in two.hosts] == [0, 0]


def test_state_that_is_sharded_across_slices_is_held_in_parts(
    world: World, one_slice: tuple[dict[str, bytes], dict[int, dict[str, float]]]
) -> None:
    spread = world([0, 1], SPREAD="1")
    found, metrics = finish(spread)
    assert metrics == one_slice[1]
    boxes = {name.partition(" ")[0] for name in found}
    assert len(found) > len(boxes), "some leaf is held in more than one part"
