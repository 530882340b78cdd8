"""No worker runs: what only memory holds is brought to storage before it can be lost.

A job that has failed, is deleted, is suspended, or waits for capacity may never run again on the
hosts that hold its newest step. Nobody waits for these writes, so they cost nothing but the disk's
time.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from everstep.controller.api.ids import HostId, Step
from everstep.runtime.agent import rendezvous
from everstep.runtime.agent.events import HeldSaved, SaveHeld
from everstep.runtime.agent.supervisor.holding import gather_inventories
from everstep.runtime.agent.supervisor.scope import Scope
from everstep.runtime.errors import EverstepError, Fenced, PeerUnavailable

if TYPE_CHECKING:
    from everstep.runtime.agent.supervisor.host import Host

SETTLE_S = 1.0
"""A job that waits is often going on within this: then nothing is begun."""
LEAD_POLL_S = 0.1
WAITING_WRITE_S_MAX = 3600.0


async def save_held(host: Host, scope: Scope, order: SaveHeld) -> None:
    """Save what the members hold, and report `HeldSaved`, whatever came of it.

    Blocking: where the agent leaves afterwards, for its own grace at most.
    """
    limit_s = host.options.grace_s if order.is_leaving else WAITING_WRITE_S_MAX
    by_s = host.clock.unix_s() + limit_s
    try:
        async with asyncio.timeout(limit_s):
            if not order.is_leaving:
                await asyncio.sleep(SETTLE_S)
            if not _holds_more(host):
                pass
            elif scope.directive.lead == host.options.host:
                await _save(host, scope, by_s)
            else:
                await _await_lead(host, scope)
    except TimeoutError:
        host.log.error("held steps not saved", why=f"not within {limit_s:g} s")
    except Fenced as error:
        # A newer incarnation has the run, so what is held here is past.
        host.log.info("held steps not saved", why=str(error))
    except EverstepError as error:
        host.log.error("held steps not saved", why=str(error))
    host.feed(HeldSaved(sequence=scope.directive.sequence, at_s=host.clock.unix_s()))


def _holds_more(host: Host) -> bool:
    """Whether this host holds a step that is newer than what it knows to be on storage."""
    held = None if host.snapshots is None else host.snapshots.newest_step
    committed = host.session.step_committed
    return held is not None and held > Step(0) and (committed is None or held > committed)


async def _save(host: Host, scope: Scope, by_s: float) -> None:
    if host.snapshots is not None:
        await host.snapshots.settle()
    inventories = await gather_inventories(scope.members, scope.members.hosts, None)
    commits = await host.checkpoints.claim(scope.directive)
    choice = rendezvous.choose(inventories, commits, scope.directive.restore_set_aside)
    if isinstance(choice, rendezvous.NoChoice):
        raise PeerUnavailable(choice.why)
    if choice.step is None or choice.is_in_storage:
        return
    host.log.info("saving what is held", step=choice.step)
    await host.checkpoints.commit_now(scope, choice.step, by_s=by_s)


async def _await_lead(host: Host, scope: Scope) -> None:
    """Serve the lead until it has what it needs: it says so, or it is gone."""
    lead: HostId | None = scope.directive.lead
    if lead is None or lead not in scope.members.peers:
        return
    while _holds_more(host):
        try:
            await scope.members.progress(lead)
        except PeerUnavailable:
            return
        await asyncio.sleep(LEAD_POLL_S)
