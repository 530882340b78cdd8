"""Asking the members of one incarnation, this host among them without a detour over the network."""

from __future__ import annotations

from everstep.controller.api.ids import HostId, Step
from everstep.controller.api.wire import Directive
from everstep.runtime.agent.peers import Peer, PeerClient, peers_of
from everstep.runtime.agent.server import Answers
from everstep.runtime.agent.wire import (
    Cadence,
    CommittedStep,
    Hold,
    HoldAnswer,
    Part,
    Progress,
    Take,
    Taken,
    WriteOrder,
)
from everstep.runtime.layout.manifest import Inventory

REPLY_TIMEOUT_S = 2.0
"""A member that lives answers in milliseconds; one that does not in this time is silent."""


class Members:
    """Every method raises `PeerUnavailable` after its time-out and `Fenced` when superseded."""

    def __init__(
        self, own: HostId, directive: Directive, client: PeerClient, answers: Answers
    ) -> None:
        self.own = own
        self.directive = directive
        self.peers: dict[HostId, Peer] = peers_of(directive)
        self._client = client
        self._answers = answers

    @property
    def hosts(self) -> tuple[HostId, ...]:
        return tuple(self.peers)

    async def progress(self, host: HostId) -> Progress:
        if host == self.own:
            return await self._answers.progress(None, 0.0)
        return await self._client.get(
            self.peers[host], "/v1/progress", Progress, timeout_s=REPLY_TIMEOUT_S
        )

    async def wait_held(self, host: HostId, step: Step, wait_s: float) -> Progress:
        """The member's progress as soon as it holds the step, or after `wait_s`."""
        if host == self.own:
            return await self._answers.progress(step, wait_s)
        path = f"/v1/progress?held={step}&wait_s={max(1, round(wait_s))}"
        return await self._client.get(
            self.peers[host], path, Progress, timeout_s=wait_s + REPLY_TIMEOUT_S
        )

    async def hold(self, host: HostId, hold: Hold) -> HoldAnswer:
        if host == self.own:
            return await self._answers.hold(hold)
        return await self._client.post(
            self.peers[host], "/v1/hold", hold, HoldAnswer, timeout_s=REPLY_TIMEOUT_S
        )

    async def holdings(self, host: HostId, step: Step | None) -> Inventory:
        if host == self.own:
            return await self._answers.holdings(step)
        path = "/v1/holdings" if step is None else f"/v1/holdings?step={step}"
        return await self._client.get(self.peers[host], path, Inventory, timeout_s=REPLY_TIMEOUT_S)

    async def take(self, host: HostId, take: Take, timeout_s: float) -> Taken:
        if host == self.own:
            return await self._answers.take(take)
        return await self._client.post(
            self.peers[host], "/v1/take", take, Taken, timeout_s=timeout_s
        )

    async def write(self, host: HostId, order: WriteOrder, timeout_s: float) -> Part:
        if host == self.own:
            return await self._answers.write(order)
        return await self._client.post(
            self.peers[host], "/v1/write", order, Part, timeout_s=timeout_s
        )

    async def cadence(self, host: HostId, cadence: Cadence) -> None:
        if host == self.own:
            await self._answers.cadence(cadence)
        else:
            await self._client.tell(
                self.peers[host], "/v1/cadence", cadence, timeout_s=REPLY_TIMEOUT_S
            )

    async def committed(self, host: HostId, committed: CommittedStep) -> None:
        if host == self.own:
            await self._answers.committed(committed)
        else:
            await self._client.tell(
                self.peers[host], "/v1/committed", committed, timeout_s=REPLY_TIMEOUT_S
            )
