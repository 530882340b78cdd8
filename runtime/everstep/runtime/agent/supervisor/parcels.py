"""Copying regions out of other hosts' memory into this host's own: evacuation and replicas."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from everstep.controller.api.ids import HostId, Step
from everstep.runtime.agent.supervisor.scope import Scope
from everstep.runtime.agent.wire import Take, Taken
from everstep.runtime.errors import EverstepError
from everstep.runtime.layout.dtypes import numpy_dtype
from everstep.runtime.layout.manifest import Holding, Region
from everstep.runtime.layout.tree import TreeSpec
from everstep.runtime.restore.fetch import Fetch
from everstep.runtime.restore.outcome import Target
from everstep.runtime.restore.peers import PeerMemory
from everstep.runtime.restore.reshard import SourceHolding, SourceKind, plan_reads
from everstep.runtime.snapshot.shelf import Shelf

if TYPE_CHECKING:
    from everstep.runtime.agent.supervisor.host import Host

IN_FLIGHT_BYTES = 64 << 20


class Parcels:
    """Takes regions from peers, verified, into the shelf."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.step_replicated: Step | None = None
        """See `Report.step_replicated`."""

    async def take(self, take: Take) -> Taken:
        """Carry a lead's order out. What fails is said in the answer.

        Blocking: until the order's deadline at most; the copy itself is in a thread.
        """
        snapshots, directive = self._host.snapshots, self._host.session.directive
        if snapshots is None or directive is None or not take.parts:
            return Taken(holding=None, bytes_moved=0, message="there is no snapshot memory here")
        sources = [
            PeerMemory(
                part.source,
                kind=SourceKind.PEER,
                token=directive.token,
                incarnation=directive.incarnation,
            )
            for part in take.parts
        ]
        left_s = max(0.1, take.deadline_s - self._host.clock.unix_s())
        try:
            async with asyncio.timeout(left_s):
                id_, moved = await asyncio.to_thread(_copy, snapshots.shelf, take, sources)
        except (EverstepError, KeyError) as error:
            return Taken(holding=None, bytes_moved=0, message=str(error))
        except TimeoutError:
            return Taken(holding=None, bytes_moved=0, message="the deadline is over")
        finally:
            for source in sources:
                source.close()
        holding = self._holding(id_)
        return Taken(holding=holding, bytes_moved=moved)

    def _holding(self, id_: str) -> Holding | None:
        snapshots, options = self._host.snapshots, self._host.options
        if snapshots is None:
            return None
        found = snapshots.inventory(options.address, options.port, None).holdings
        return next((h for h in found if h.id == id_), None)

    def begin(self, scope: Scope) -> None:
        """Start keeping replicas of a partner slice, where the job asks for them."""
        self.step_replicated = None
        if scope.directive.settings.snapshot_replicas > 0 and len(scope.directive.members) > 1:
            scope.spawn(self._keep_replicas(scope), "replicas")

    async def _keep_replicas(self, scope: Scope) -> None:
        from everstep.runtime.agent.supervisor.replicas import keep_replicas

        await keep_replicas(self._host, scope)

    @property
    def own(self) -> HostId:
        return self._host.options.host


def _copy(shelf: Shelf, take: Take, sources: list[PeerMemory]) -> tuple[str, int]:
    """Fetch all parts straight into a new parcel; runs in a thread."""
    manifest = sources[0].manifest()
    tree = manifest.plot.tree
    regions = [region for part in take.parts for region in part.regions if region.box.size]
    parcel = shelf.open_parcel(take.step, manifest.incarnation, tree, regions, manifest.extra)
    try:
        targets = [
            _target(tree, region, parcel.buffer(index)) for index, region in enumerate(regions)
        ]
        holdings = [
            SourceHolding(index=index, kind=SourceKind.PEER, shards=part.source.shards)
            for index, part in enumerate(take.parts)
        ]
        plan = plan_reads(regions, holdings, tree)
        memories = dict(enumerate(sources))
        outcome = Fetch(tree, targets, memories, {}, memory_bytes=IN_FLIGHT_BYTES).execute(
            plan.reads
        )
        if outcome.missing:
            raise EverstepError("; ".join(outcome.rejected) or "regions could not be read")
        moved = sum(target.array.nbytes for target in targets)
        return parcel.finish(), moved
    except BaseException:
        parcel.abandon()
        raise


def _target(tree: TreeSpec, region: Region, buffer: memoryview) -> Target:
    dtype = numpy_dtype(tree.leaves[region.leaf].dtype)
    array = np.frombuffer(buffer, dtype=np.uint8).view(dtype).reshape(region.box.shape)
    return Target(region=region, array=array)
