"""The join, decided: who is in, who is missing, which step, and what each host is told. Pure.

The lead gathers one `Join` of every member host, then `choose` finds the step and `assign` writes
the answers. Numbered invariants: (R1) one answer for all: every host of an incarnation is told the
same step, roster and coordinator; (R2) the step is one that can be restored whole; (R3) regions of
different incarnations of a step are never mixed, since a step that was run again need not have the
same bits; (R4) a step is never chosen because a source could not be read; (R5) what lies on a
host's disk is never trusted over a commit: not where what is committed cannot be known, not for
another content of a committed step, and not when a later incarnation has committed; (R6) a step
that is set aside is chosen again before the training starts over: it may be what crashed the
worker, and it is all that is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep.controller.api.ids import HostId, Incarnation, Rank, Step
from everstep.controller.api.wire import Directive
from everstep.runtime.agent.coverage import find_gaps, name_region
from everstep.runtime.agent.link import Assignment, Source
from everstep.runtime.agent.wire import Join, Joined
from everstep.runtime.layout.manifest import Holding, Inventory
from everstep.runtime.layout.tree import TreeSpec


def roster(directive: Directive) -> tuple[HostId, ...]:
    """All member hosts in rank order: dense, slice-major."""
    return tuple(
        HostId(member.slice, host.host) for member in directive.members for host in member.hosts
    )


def rank_of(directive: Directive, host: HostId) -> Rank | None:
    """Process id of a host in the directive's incarnation; None when it is not a member."""
    hosts = roster(directive)
    return Rank(hosts.index(host)) if host in hosts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """The lead's state of one join. (1) `joins` only has hosts of the roster."""

    directive: Directive
    joins: Mapping[HostId, Join] = field(default_factory=dict[HostId, Join])

    @property
    def missing(self) -> tuple[HostId, ...]:
        return tuple(host for host in roster(self.directive) if host not in self.joins)

    @property
    def is_complete(self) -> bool:
        return not self.missing


def receive(gathering: Gathering, join: Join) -> Gathering | str:
    """Take in one host's join; a later join of the same host replaces the earlier.

    Returns:
        The new gathering, or why the host is refused, in words.
    """
    if join.incarnation != gathering.directive.incarnation:
        return f"this join is of incarnation {gathering.directive.incarnation}"
    if join.host not in roster(gathering.directive):
        return f"host {join.host} is not a member of incarnation {join.incarnation}"
    return replace(gathering, joins={**gathering.joins, join.host: join})


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A committed checkpoint as the ledger tells it."""

    step: Step
    held_in: Incarnation | None
    """Incarnation whose snapshot was written; None when unknown: it is then mixed with nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where an incarnation starts. `step` is None for a fresh start."""

    step: Step | None
    fingerprint: str | None = None
    holdings: tuple[Holding, ...] = ()
    is_in_storage: bool = False
    is_set_aside: bool = False
    """It crashed the worker before, and there is no other one (R6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoChoice:
    """No step can be restored although some should be there; `why` says what was tried."""

    why: str


_Group = tuple[Step, Incarnation, str]


def choose(
    inventories: Sequence[Inventory],
    commits: Sequence[Committed] | str,
    set_aside: Sequence[Step] = (),
    *,
    step_committed: Step | None = None,
) -> Choice | NoChoice:
    """Find the newest step that can be restored whole; at equal step, memory is preferred.

    Args:
        inventories: one a host.
        commits: of the run's ledger, any order; or, in words, why they cannot be read.
        set_aside: steps that crashed the worker right after their restore; chosen only where there
            is no other one (R6).
        step_committed: known to be committed, should storage not answer: memory that is older is
            then not gone back to.
    """
    choice = _choose(inventories, commits, set_aside, step_committed=step_committed)
    if isinstance(choice, NoChoice) or choice.step is not None or not set_aside:
        return choice
    choice = _choose(inventories, commits, (), step_committed=step_committed)
    if isinstance(choice, NoChoice) or choice.step is None:
        return choice
    return replace(choice, is_set_aside=True)


def _choose(
    inventories: Sequence[Inventory],
    commits: Sequence[Committed] | str,
    set_aside: Sequence[Step],
    *,
    step_committed: Step | None,
) -> Choice | NoChoice:
    groups, trees = _group(inventories, commits, set_aside)
    stored = (
        {c.step: c for c in commits if c.step not in set_aside}
        if not isinstance(commits, str)
        else {}
    )
    open_regions: list[str] = []
    least = step_committed if isinstance(commits, str) and step_committed is not None else 0
    for step in sorted({group[0] for group in groups} | set(stored), reverse=True):
        if step < least:
            break
        # Newest incarnation first: at an equal step it is the one that was continued last.
        at_step = sorted((g for g in groups if g[0] == step), key=lambda g: -g[1])
        for group in at_step:
            _, incarnation, fingerprint = group
            gaps = find_gaps(trees[fingerprint], groups[group])
            is_same_content = step in stored and stored[step].held_in == incarnation
            if not gaps or is_same_content:
                return Choice(
                    step=step,
                    fingerprint=fingerprint,
                    holdings=tuple(groups[group]),
                    is_in_storage=is_same_content,
                )
            first = name_region(trees[fingerprint], gaps[0])
            open_regions.append(f"step {step}: nobody holds {first}")
        if step in stored:
            return Choice(step=step, is_in_storage=True)
    return _find_none(commits, open_regions)


def _group(
    inventories: Sequence[Inventory],
    commits: Sequence[Committed] | str,
    set_aside: Sequence[Step],
) -> tuple[dict[_Group, list[Holding]], dict[str, TreeSpec]]:
    groups: defaultdict[_Group, list[Holding]] = defaultdict(list)
    trees: dict[str, TreeSpec] = {}
    for inventory in inventories:
        trees.update(inventory.trees)
        for holding in inventory.holdings:
            if holding.is_local and not _is_trusted(holding, commits):
                continue
            if holding.step not in set_aside and holding.fingerprint in inventory.trees:
                group = (holding.step, holding.incarnation, holding.fingerprint)
                groups[group].append(holding)
    ordered = {
        group: sorted(holdings, key=lambda h: (h.host, h.id)) for group, holdings in groups.items()
    }
    return ordered, trees


def _is_trusted(holding: Holding, commits: Sequence[Committed] | str) -> bool:
    """Whether what is on a disk may stand for its step (R5)."""
    if isinstance(commits, str):
        return False
    return all(
        (c.step != holding.step or c.held_in == holding.incarnation)
        and (c.held_in is None or c.held_in <= holding.incarnation)
        for c in commits
    )


def _find_none(
    commits: Sequence[Committed] | str, open_regions: Sequence[str]
) -> Choice | NoChoice:
    if isinstance(commits, str):
        # R4: there may be a checkpoint behind the error.
        tried = "; ".join(open_regions[:3])
        return NoChoice(why=f"storage cannot be read: {commits}" + (f"; {tried}" if tried else ""))
    return Choice(step=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the lead adds of its own: where the coordination service listens, where the run lies."""

    coordinator_address: str
    """Empty when there is one process alone."""
    uri: str


def assign(gathering: Gathering, choice: Choice, place: Place) -> dict[HostId, Assignment]:
    """Write the answer to every host of a complete gathering."""
    directive = gathering.directive
    hosts = roster(directive)
    step_before = max((join.step_before for join in gathering.joins.values()), default=Step(0))
    storage = (
        Source(uri=place.uri, step=choice.step)
        if choice.is_in_storage and choice.step is not None
        else None
    )
    answers: dict[HostId, Assignment] = {}
    for rank, host in enumerate(hosts):
        own = tuple(h for h in choice.holdings if h.host == host)
        answers[host] = Assignment(
            job=directive.job,
            job_uid=directive.job_uid,
            host=host,
            incarnation=directive.incarnation,
            rank=Rank(rank),
            process_count=len(hosts),
            members=directive.members,
            coordinator_address=place.coordinator_address,
            local_address=gathering.joins[host].address,
            token=directive.token,
            settings=directive.settings,
            restore_step=choice.step,
            holdings=own + tuple(h for h in choice.holdings if h.host != host),
            fingerprint=choice.fingerprint,
            storage=storage,
            step_before=step_before,
            own_slots=tuple(h.id for h in own if not h.is_local),
        )
    return answers


def answer(gathering: Gathering, choice: Choice | NoChoice, place: Place) -> dict[HostId, Joined]:
    """The lead's answer to each host of a complete gathering (R1)."""
    if isinstance(choice, NoChoice):
        return {host: Joined(failed=choice.why) for host in gathering.joins}
    assignments = assign(gathering, choice, place)
    return {host: Joined(assignment=assignment) for host, assignment in assignments.items()}
