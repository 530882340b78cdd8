"""Seeded histories of several agents: what is promised holds whatever dies, freezes or is late."""

from __future__ import annotations

import pytest

from agent_simulation import SNAPSHOT_EVERY, World
from agent_values import host
from everstep.controller.api.wire import HostPhase

FAULTS_UNTIL_S = 120.0
QUIET_S = 260.0


def trouble(world: World) -> None:
    """Let one thing go wrong, and plan the next."""
    chance = world.chance
    if world.now_s > FAULTS_UNTIL_S:
        return
    world.at(chance.expovariate(1 / 6.0), lambda: trouble(world))
    slice_id = chance.randrange(world.slices)
    kind = chance.choice(["worker", "host", "freeze", "notice", "withdrawn", "controller"])
    world.faults.append(f"{world.now_s:.1f} {kind} {slice_id}")
    match kind:
        case "worker":
            world.kill_worker(slice_id)
        case "host":
            world.kill(slice_id)
            world.at(chance.uniform(1, 10), lambda: revive(world, slice_id))
        case "freeze":
            freeze(world, slice_id, chance.uniform(0.5, 30))
        case "notice":
            notice(world, slice_id, chance.uniform(2, 15))
        case "withdrawn":
            world.notices[slice_id] = world.now_s + 15
            world.at(chance.uniform(0.1, 3), lambda: withdraw(world, slice_id))
        case _:
            world.is_controller_down = True
            world.at(chance.uniform(1, 10), lambda: wake_controller(world))


def revive(world: World, slice_id: int) -> None:
    if host(slice_id) not in world.hosts:
        world.boot(slice_id)


def freeze(world: World, slice_id: int, for_s: float) -> None:
    one = world.hosts.get(host(slice_id))
    if one is None or one.is_frozen:
        return
    one.is_frozen = True

    def thaw() -> None:
        one.is_frozen = False
        deferred, one.deferred = one.deferred, []
        for act in deferred:
            act()

    world.at(for_s, thaw)


def notice(world: World, slice_id: int, lead_time_s: float) -> None:
    if host(slice_id) not in world.hosts or slice_id in world.notices:
        return
    world.notices[slice_id] = world.now_s + lead_time_s

    def vanish() -> None:
        world.kill(slice_id)
        world.notices.pop(slice_id, None)
        world.at(5.0, lambda: revive(world, slice_id))

    world.at(lead_time_s, vanish)


def withdraw(world: World, slice_id: int) -> None:
    world.notices.pop(slice_id, None)


def wake_controller(world: World) -> None:
    world.is_controller_down = False


@pytest.mark.parametrize("seed", range(40))
def test_after_any_troubles_the_job_trains_on_and_nothing_waited_too_long(seed: int) -> None:
    world = World(seed, slices=3)
    world.control()
    world.at(5.0, lambda: trouble(world))
    world.run(QUIET_S)
    story = f"seed {seed}\n" + "\n".join(world.faults)
    # G7: every request was acknowledged by its deadline.
    for request, (at_s, deadline_s) in world.served.items():
        assert at_s <= deadline_s + 0.001, f"{request}: {story}"
    # Liveness: all three are members again, and steps are being finished.
    assert world.members == (0, 1, 2), story
    assert all(h.session.phase is HostPhase.RUNNING for h in world.hosts.values()), story
    before = world.step_finished
    world.run(QUIET_S + 10)
    assert world.step_finished > before + 50, story


@pytest.mark.parametrize("seed", range(40))
def test_a_notice_with_time_to_act_on_costs_no_step(seed: int) -> None:  # G2
    world = World(seed, slices=3)
    world.control()
    world.run(8 + world.chance.uniform(0, 2))
    assert world.step_finished > 0
    notice(world, seed % 3, 5.0)
    world.run(world.now_s + 4.5)
    restart = world.restarts[-1]
    assert restart.cause == "notice", world.restarts
    assert restart.step == restart.step_before, f"seed {seed}: {restart}"
    assert world.members == tuple(s for s in range(3) if s != seed % 3)


@pytest.mark.parametrize("seed", range(40))
def test_a_loss_without_notice_costs_no_more_than_a_snapshot_interval(seed: int) -> None:  # G3
    world = World(seed, slices=3)
    world.control()
    world.run(8 + world.chance.uniform(0, 2))
    world.kill(seed % 3)
    world.run(world.now_s + 3)
    restart = world.restarts[-1]
    assert restart.cause == "loss"
    assert restart.step_before - restart.step <= SNAPSHOT_EVERY, f"seed {seed}: {restart}"


def test_an_agent_that_slept_through_two_incarnations_commits_nothing() -> None:  # G6
    world = World(7, slices=2)
    world.control()
    world.run(10)
    lead = world.hosts[host(0)]
    freeze(world, 0, 30.0)
    world.notices[0] = world.now_s + 1.0
    world.run(20)
    # The controller dropped the frozen slice after its deadline without its help.
    world.members, world.notices = (1,), {}
    world._next((1,), "loss")  # pyright: ignore[reportPrivateUsage]
    world.run(35)
    claimed = world.claimed
    commits = [c for c in world.commits if c[1] < claimed]
    world.run(60)
    assert [c for c in world.commits if c[1] < claimed and c not in commits] == []
    assert lead.session.incarnation == world.incarnation
