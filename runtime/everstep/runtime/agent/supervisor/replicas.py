"""Replicas: after each snapshot, what only one slice holds is copied to a partner slice as well.

For states that are sharded across slices; one that is replicated across them needs none, and none
is moved.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from everstep.controller.api.ids import HostId, Step
from everstep.runtime.agent.evacuation import plan_evacuation
from everstep.runtime.agent.supervisor.scope import Scope
from everstep.runtime.agent.wire import Take
from everstep.runtime.errors import EverstepError, Fenced
from everstep.runtime.layout.manifest import Holding

if TYPE_CHECKING:
    from everstep.runtime.agent.supervisor.host import Host

TAKE_S_MAX = 120.0
HELD_WAIT_S = 10.0


async def keep_replicas(host: Host, scope: Scope) -> None:
    """Take this host's share of every snapshot, for as long as the incarnation lives."""
    snapshots = host.snapshots
    if snapshots is None:
        return
    seen: Step | None = None
    while True:
        seen = await snapshots.wait_newer(seen)
        try:
            if await _replicate(host, scope, seen):
                host.parcels.step_replicated = seen
        except Fenced:
            raise
        except EverstepError as error:
            host.log.warning("no replica", step=seen, why=str(error))


async def _replicate(host: Host, scope: Scope, step: Step) -> bool:
    """Whether this host holds its share of what the partners hold of a step."""
    members = scope.members
    slices = [member.slice for member in scope.directive.members]
    own = host.options.host
    takers = tuple(h for h in members.hosts if h.slice == own.slice)
    at = slices.index(own.slice)
    count = min(scope.directive.settings.snapshot_replicas, len(slices) - 1)
    partners = [slices[(at + distance) % len(slices)] for distance in range(1, count + 1)]

    async def ask(member: HostId) -> tuple[Holding, ...]:
        await members.wait_held(member, step, HELD_WAIT_S)
        return (await members.holdings(member, step)).holdings

    found = await asyncio.gather(*(ask(member) for member in members.hosts))
    snapshots = host.snapshots
    if snapshots is None:
        return False
    inventory = await members.holdings(own, step)
    if not inventory.trees:
        return False  # Overwritten meanwhile: the next one is on its way.
    fingerprint, tree = next(iter(inventory.trees.items()))
    # Parcels are left out: what a partner keeps for others is not its own.
    originals = [
        holding
        for holdings in found
        for holding in holdings[:1]
        if (holding.fingerprint, holding.incarnation) == (fingerprint, scope.incarnation)
    ]
    if {holding.host for holding in originals} != set(members.hosts):
        return False  # Somebody has gone on to a newer step.
    for partner in partners:
        plan = plan_evacuation(tree, originals, doomed={partner}, takers=takers)
        parts = plan.takes.get(own)
        if parts is None:
            continue
        deadline_s = host.clock.unix_s() + TAKE_S_MAX
        take = Take(step=step, fingerprint=fingerprint, parts=parts, deadline_s=deadline_s)
        taken = await host.parcels.take(take)
        if taken.holding is None:
            host.log.warning("no replica", step=step, partner=partner, why=taken.message)
            return False
    return True
