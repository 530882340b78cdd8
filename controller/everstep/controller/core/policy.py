"""What the spec says about how many slices, when, and at what price.

Nothing here changes anything: each function answers one question about the turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.controller.api.ids import SliceId
from everstep.controller.api.reasons import Reason
from everstep.controller.api.spec import OnLoss, ScaleUpMode, Slices
from everstep.controller.core.health import StandbyState, is_alive, judge_standby
from everstep.controller.core.ledger import Budgets, Stage, Turnover
from everstep.controller.core.model import Capacity, ProcessState
from everstep.controller.core.saving import save_doomed_until_s
from everstep.controller.core.turn import Turn

HOUR_S = 3600.0
DRAIN_LATER_S_MIN = 5.0
"""A member whose notice leaves less than this is not taken into another incarnation."""

_RETRIED_AT_ONCE = frozenset(
    {
        Reason.WORKER_KILLED,
        Reason.WORKER_HUNG,
        Reason.COLLECTIVE_ERROR,
        Reason.JOIN_TIMED_OUT,
    }
)
"""Failures that say nothing about the user's program. The first one costs no backoff: a killed
worker is training again before anybody has looked."""


_NEVER_SHRINKING = (OnLoss.WAIT_FOR_REPLACEMENT, OnLoss.FAIL)


def largest_allowed(slices: Slices, at_most: int) -> int | None:
    """Return the largest count that the job may run on, not above `at_most` or `desired`."""
    top = min(at_most, slices.desired)
    return next((count for count in range(top, 0, -1) if slices.allows(count)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    members: tuple[SliceId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    reason: Reason
    until_s: float | None = None


def choose_members(turn: Turn, turnover: Turnover) -> Go | Stay:
    """Decide whether to go on now, and with which slices, by `elasticity.onLoss`.

    Survivors come first, because they hold the newest step, then slices whose agents are up. Only
    where nobody survived, slices are counted that are granted but not started: then there is
    nobody whom waiting for them would hold up. In a storm only survivors count (invariant 9): they
    go on if they may without others, else the job pauses until the storm is over.
    """
    if turn.now_s < turnover.not_before_s:
        return Stay(reason=Reason.BACKING_OFF, until_s=turnover.not_before_s)
    survivors = [
        id_ for id_ in turn.ledger.members if turn.is_usable(id_) or _is_drained_later(turn, id_)
    ]
    saved_s = save_doomed_until_s(turn)
    if saved_s is not None and not any(turn.is_doomed(id_) for id_ in survivors):
        return Stay(reason=Reason.PREEMPTION_NOTICE, until_s=saved_s)
    ready = [id_ for id_ in ready_standby(turn) if id_ not in survivors]
    pool = survivors + ready
    calm_s = storm_until_s(turn)
    if not survivors or calm_s is not None:
        pool += [id_ for id_ in granted(turn) if id_ not in ready]
    slices, elasticity = turn.spec.slices, turn.spec.elasticity
    count = largest_allowed(slices, len(pool))
    is_first = turn.ledger.incarnation == 0
    if count is None:
        waits = Reason.NOT_SCHEDULED if is_first else Reason.BELOW_MINIMUM_SLICES
        return Stay(reason=waits)
    wanted = largest_allowed(slices, turnover.count_wanted) or slices.desired
    if calm_s is not None:
        count = largest_allowed(slices, len(survivors))
        is_short = count is not None and count < wanted and turnover.lost
        if count is None or (is_short and elasticity.on_loss in _NEVER_SHRINKING):
            return Stay(reason=Reason.DISRUPTION_STORM, until_s=calm_s)
        # Nobody waits for a replacement that is not started.
        return Go(members=tuple(sorted(survivors[:count])))
    go = Go(members=tuple(sorted(pool[:count])))
    if count >= wanted or not turnover.lost:
        return go
    waits = Reason.NOT_SCHEDULED if is_first else Reason.WAITING_FOR_REPLACEMENT
    match elasticity.on_loss:
        case OnLoss.SHRINK_IMMEDIATELY:
            return go
        case OnLoss.WAIT_THEN_SHRINK:
            until_s = turnover.wait_until_s
            if until_s is not None and turn.now_s >= until_s:
                return go
            return Stay(reason=waits, until_s=until_s)
        case OnLoss.WAIT_FOR_REPLACEMENT | OnLoss.FAIL:
            # A loss under `Fail` ended the job before; here it waits for its first slices.
            return Stay(reason=waits)


def _is_drained_later(turn: Turn, id_: SliceId) -> bool:
    """Whether a member goes on although it is announced to go, to be drained as one that trains.

    That is so where its notice is seen in the pass in which the members had to stop for something
    else: of a state that is sharded across slices it may hold what nobody else does. One that was
    seen to be doomed while the job waited has given what it holds to storage.
    """
    turnover, notice, one = turn.ledger.turnover, turn.notices.get(id_), turn.slices.get(id_)
    if turnover is None or turnover.halted_at_s != turn.now_s or notice is None or one is None:
        return False
    is_new = turnover.reason is not Reason.PREEMPTION_NOTICE and turn.is_doomed(id_)
    lives = one.capacity is Capacity.AVAILABLE and all(
        host.process is ProcessState.ALIVE for host in one.hosts
    )
    return is_new and lives and notice.deadline_s - turn.now_s >= DRAIN_LATER_S_MIN


def _startable(turn: Turn, present: list[SliceId]) -> list[SliceId]:
    """Return the granted slices that may be started beside the members.

    One of which a process still lives is stopped first: a slice is replaced as a unit, and the
    rest of a lost one is not mixed with what replaces it (invariant 2).
    """
    return [id_ for id_ in granted(turn) if id_ not in present and not is_alive(turn.slices[id_])]


def granted(turn: Turn) -> list[SliceId]:
    """Return the slices that are not members and could be started, lowest id first."""
    resting = {entry.id for entry in turn.ledger.standby if entry.since_s > turn.now_s}
    members = set(turn.ledger.members)
    return [
        one.id
        for one in turn.view.slices
        if one.id not in members and one.id not in resting and turn.is_usable(one.id)
    ]


def ready_standby(turn: Turn) -> list[SliceId]:
    """Return the usable slices whose agents are up and wait, lowest id first."""
    return sorted(
        entry.id
        for entry in turn.ledger.standby
        if turn.is_usable(entry.id) and judge_standby(turn, entry) is StandbyState.READY
    )


def storm_until_s(turn: Turn) -> float | None:
    """Return when the storm guard lets go, or None when it does not hold.

    It holds while so many disruptions fell into the last hour that whatever is started would only
    be lost as well.
    """
    recent = [at for at in turn.ledger.budgets.disrupted_at_s if at > turn.now_s - HOUR_S]
    limit = turn.spec.restart.max_disruptions_per_hour
    if len(recent) < limit:
        return None
    until_s = recent[len(recent) - limit] + HOUR_S
    turn.wake_at(until_s)
    return until_s


def may_grow(turn: Turn) -> bool:
    """Whether the times allow to begin a growth now: uptime, cooldown, storm guard.

    Somebody who raises `desired` need not wait for the times, but a storm stops him too.
    """
    ledger, scale_up = turn.ledger, turn.spec.elasticity.scale_up
    if ledger.turnover is not None or ledger.trained_since_s is None or storm_until_s(turn):
        return False
    if ledger.grow_asked:
        return True
    if scale_up.mode is not ScaleUpMode.AUTOMATIC:
        return False
    gates = [ledger.trained_since_s + scale_up.min_uptime_seconds]
    if ledger.disturbed_at_s is not None:
        gates.append(ledger.disturbed_at_s + scale_up.cooldown_seconds)
    turn.wake_at(max(gates))
    return turn.now_s >= max(gates)


def _ripe(turn: Turn, ids: list[SliceId]) -> list[SliceId]:
    """Return the slices whose capacity has been back for the stabilization time.

    Capacity often comes back piece by piece, and each growth costs a change. So while others are
    still ripening the ripe ones wait for them, for one more stabilization time at most.
    """
    wait_s = turn.spec.elasticity.scale_up.stabilization_seconds
    if turn.ledger.grow_asked:
        return ids
    ripe_s = {id_: (turn.slices[id_].available_since_s or 0.0) + wait_s for id_ in ids}
    ripe = [id_ for id_ in ids if ripe_s[id_] <= turn.now_s]
    for id_ in ids:
        turn.wake_at(ripe_s[id_])
    if ripe and len(ripe) < len(ids):
        patient_until_s = min(ripe_s[id_] for id_ in ripe) + wait_s
        turn.wake_at(patient_until_s)
        return ripe if turn.now_s >= patient_until_s else []
    return ripe


def choose_standby(turn: Turn) -> tuple[SliceId, ...]:
    """Return the slices whose agents should be up although they are not members.

    While the job waits: as many as it lacks. While it runs: as many as the next larger allowed
    count lacks, begun only when growing is allowed, kept when it is not.
    """
    ledger, slices = turn.ledger, turn.spec.slices
    entries = sorted(ledger.standby, key=lambda entry: (entry.since_s > turn.now_s, entry.id))
    present = [entry.id for entry in entries if turn.is_usable(entry.id)]
    if turn.spec.suspend or turn.view.is_deleting or ledger.incarnation == 0:
        return ()
    if ledger.stage is Stage.WAIT:
        survivors = [id_ for id_ in ledger.members if turn.is_usable(id_)]
        fresh = _startable(turn, present) if survivors and not storm_until_s(turn) else []
        return tuple((present + fresh)[: max(0, slices.desired - len(survivors))])
    fresh = []
    if ledger.incident is None and may_grow(turn):
        fresh = _ripe(turn, _startable(turn, present))
    have = len(ledger.members)
    target = largest_allowed(slices, have + len(present) + len(fresh)) or have
    return tuple((present + fresh)[: max(0, target - have)])


def is_growth_ready(turn: Turn) -> bool:
    """Whether every agent that a larger count needs is up.

    One slice that does not come up does not hold back the others for longer than the join timeout.
    """
    ledger = turn.ledger
    ready = ready_standby(turn)
    target = largest_allowed(turn.spec.slices, len(ledger.members) + len(ready))
    if target is None or target <= len(ledger.members) or not may_grow(turn):
        return False
    if len(ready) == len(ledger.standby):
        return True
    oldest_s = min(entry.since_s for entry in ledger.standby)
    patience_s = turn.spec.runtime.timeouts.join_seconds
    turn.wake_at(oldest_s + patience_s)
    return turn.now_s >= oldest_s + patience_s or any(entry.attempts for entry in ledger.standby)


def count_failure(turn: Turn, budgets: Budgets, reason: Reason) -> tuple[int, float]:
    """Return how many failures in a row this is (0 is the first), and the backoff it costs, in s.

    Progress since the last failure, or a long time without one, begins a new row.
    """
    backoff = turn.spec.restart.backoff
    last_s = budgets.failed_at_s[-1] if budgets.failed_at_s else None
    is_new = (
        last_s is None
        or turn.now_s - last_s > backoff.reset_after_seconds
        or turn.newest_step() > budgets.step_at_failure
    )
    row = 0 if is_new else budgets.failures_in_a_row + 1
    power = row - 1 if reason in _RETRIED_AT_ONCE else row
    if power < 0:
        return row, 0.0
    # Bounded before it is computed: 2**5000 is a number, but not one that helps.
    return row, min(backoff.max_seconds, backoff.initial_seconds * 2 ** min(power, 32))


def failures_in_window(turn: Turn, budgets: Budgets) -> tuple[float, ...]:
    since_s = turn.now_s - turn.spec.restart.window_seconds
    return tuple(at for at in budgets.failed_at_s if at > since_s)


def needs_start(turn: Turn, id_: SliceId) -> bool:
    """Whether a slice that becomes a member has to be started, as a unit."""
    if id_ in turn.ledger.members:
        return False
    begun = {entry.id for entry in turn.ledger.standby if entry.since_s <= turn.now_s}
    hosts = turn.slices[id_].hosts
    return id_ not in begun or any(host.process is not ProcessState.ALIVE for host in hosts)
