"""The automatic cadence: the lead measures copies and steps, and tells all members the interval."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from everstep.controller.api.ids import HostId, Step
from everstep.runtime.agent.supervisor.scope import Scope
from everstep.runtime.agent.wire import Cadence
from everstep.runtime.errors import PeerUnavailable
from everstep.runtime.snapshot.cadence import choose_every_steps

if TYPE_CHECKING:
    from everstep.runtime.agent.supervisor.host import Host

MEASURED_SNAPSHOTS_MIN = 2
CHANGE_MIN = 1.25
"""A new interval is told when it differs from the present one by this factor."""


async def tune_cadence(host: Host, scope: Scope) -> None:
    """Keep the snapshot interval near its best, for as long as the incarnation lives."""
    snapshots = host.snapshots
    if snapshots is None:
        return
    # Hosts that are new start with the default; all members must take their snapshots together.
    await _tell(scope, host.every_steps)
    seen: Step | None = None
    count = 0
    while True:
        seen = await snapshots.wait_newer(seen)
        count += 1
        following = host.following
        rate = following.pace.steps_per_s if following is not None else None
        if count < MEASURED_SNAPSHOTS_MIN or not rate or snapshots.copy_s is None:
            continue
        every = choose_every_steps(
            snapshots.copy_s, 1.0 / rate, complete_s=snapshots.complete_s or 0.0
        )
        limit = scope.directive.settings.checkpoint_every_steps
        every = every if limit is None else min(every, limit)
        if max(every, host.every_steps) >= CHANGE_MIN * min(every, host.every_steps):
            host.log.info(
                "snapshot cadence",
                every_steps=every,
                copy_s=round(snapshots.copy_s, 4),
                step_s=round(1.0 / rate, 4),
            )
            await _tell(scope, every)


async def _tell(scope: Scope, every_steps: int) -> None:
    cadence = Cadence(every_steps=every_steps)

    async def tell(member: HostId) -> None:
        try:
            await scope.members.cadence(member, cadence)
        except PeerUnavailable:
            return  # It is told again with the next change, or is gone.

    await asyncio.gather(*(tell(member) for member in scope.members.hosts))
