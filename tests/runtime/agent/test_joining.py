"""The lead's join when storage refuses: final for a job that never began, else tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import structlog

from agent_values import directive, holding, host, inventory
from everstep.controller.api.ids import Step
from everstep.runtime.agent.rendezvous import Committed
from everstep.runtime.agent.supervisor.joining import LeadJoin, Preparations
from everstep.runtime.agent.wire import Join, Joined
from everstep.runtime.clock import SystemClock
from everstep.runtime.errors import EverstepError, StorageRefused, StorageUnavailable

REFUSED = StorageRefused("/etc/hostname", "a file", "a folder, or nothing yet")
AWAY = StorageUnavailable("/mnt/run: stale file handle (ESTALE)")


def joined(incarnation: int, error: EverstepError, *, is_held: bool = False) -> list[Joined]:
    """What two members are told when the claim of the run fails."""

    async def claim() -> Sequence[Committed]:
        raise error

    async def start_service() -> str:
        return "10.0.0.0:1"

    async def play() -> list[Joined]:
        clock = SystemClock()
        one = directive(incarnation, [0, 1])
        lead = LeadJoin(
            one,
            by_s=clock.unix_s() + 30,
            prepare=Preparations(claim=claim, start_service=start_service, step_committed=None),
            clock=clock,
            log=structlog.get_logger(),
        )
        joins = [
            Join(
                incarnation=one.incarnation,
                host=host(number),
                address=f"10.0.{number}.0",
                port=7070,
                inventory=inventory(*([holding(host(number), 4)] if is_held else [])),
                step_before=Step(0),
            )
            for number in (0, 1)
        ]
        answers = [asyncio.ensure_future(lead.receive(one)) for one in joins]
        await lead.run()
        return list(await asyncio.gather(*answers))

    return asyncio.run(play())


def test_storage_that_refuses_a_job_at_its_first_start_ends_it_with_the_field() -> None:
    for answer in joined(1, REFUSED):
        assert answer.is_final
        assert answer.failed == (
            "spec.checkpoint.uri is refused: /etc/hostname: found 'a file', expected a folder, or "
            "nothing yet"
        )


@pytest.mark.parametrize(("incarnation", "error"), [(1, AWAY), (2, REFUSED), (2, AWAY)])
def test_storage_that_may_come_back_is_tried_again(incarnation: int, error: EverstepError) -> None:
    for answer in joined(incarnation, error):
        assert answer.failed is not None
        assert str(error) in answer.failed
        assert not answer.is_final


def test_memory_goes_on_without_storage() -> None:
    answers = joined(2, REFUSED, is_held=True)
    assert [one.assignment is not None for one in answers] == [True, True]
