"""What a host offers of its disk at a join."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
from structlog.testing import CapturingLogger

from agent_values import SETTINGS, host
from everstep.controller.api.ids import Step
from everstep.runtime.agent.supervisor.local_copies import LocalCopies
from everstep.runtime.layout.manifest import Inventory
from local_copies import TREE, files_of, flip, tier_of, write

EMPTY = Inventory(holdings=(), trees={})
JOB = f"uid-1 {SETTINGS.checkpoint_uri}"


@dataclass
class _Options:
    host = host(1)
    job_uid = "uid-1"
    address, port = "10.0.1.0", 7070


@dataclass
class _Agent:
    """The part of an agent that a disk needs for an offer."""

    options: _Options = field(default_factory=_Options)
    log: CapturingLogger = field(default_factory=CapturingLogger)

    def said(self) -> list[str]:
        return [str(call.kwargs["why"]) for call in self.log.calls]


def copies_of(folder: Path, agent: _Agent) -> LocalCopies:
    settings = msgspec.structs.replace(SETTINGS, local_path=str(folder))
    return LocalCopies(cast("Any", agent), str(folder), settings, cast("Any", None))


def offer(copies: LocalCopies) -> Inventory:
    return asyncio.run(copies.offer_beside(EMPTY))


def test_what_the_disk_has_of_this_job_is_offered_as_being_on_a_disk(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, run=JOB, latest=2)
    write(tier, 7)
    write(tier, 8)
    write(tier_of(tmp_path, run="uid-2 /run"), 9)
    write(tier_of(tmp_path, run="uid-1 /elsewhere"), 9)
    agent = _Agent()
    copies = copies_of(tmp_path, agent)
    found = offer(copies)
    assert [(h.step, h.incarnation, h.host, h.is_local) for h in found.holdings] == [
        (8, 3, host(1), True),
        (7, 3, host(1), True),
    ]
    assert found.trees == {TREE.fingerprint: TREE}
    newest = found.holdings[0].id
    assert copies.has(newest)
    assert copies.manifest(newest).step == Step(8)
    assert copies.fd(newest) > 2
    copies.close()
    assert not copies.has(newest)
    assert agent.said() == []


def test_a_damaged_copy_is_not_offered_again_after_an_incarnation_came_to_nothing(
    tmp_path: Path,
) -> None:
    tier = tier_of(tmp_path, run=JOB, latest=2)
    write(tier, 7)
    write(tier, 8)
    newest = max(path for path in files_of(tmp_path) if path.suffix == ".bytes")
    flip(newest, 8 * 4000)
    agent = _Agent()
    copies = copies_of(tmp_path, agent)
    assert [h.step for h in offer(copies).holdings] == [8, 7], "whoever reads it will find out"
    assert [h.step for h in offer(copies).holdings] == [7]
    (words,) = agent.said()
    assert str(newest) in words
    assert "['w']" in words
    copies.close()


def test_a_disk_that_cannot_be_read_is_said_and_offers_nothing(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("a file")
    agent = _Agent()
    copies = copies_of(tmp_path / "disk", agent)
    assert offer(copies) == EMPTY
    (words,) = agent.said()
    assert "a file is where a folder should be" in words
    copies.close()
