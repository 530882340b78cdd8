"""What ought to happen to a running job, if nothing breaks: what spec and notices demand of it.

Only the strongest demand counts. What becomes of it is for `incidents`.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.controller.api.ids import SliceId
from everstep.controller.api.spec import OnLoss, PlannedAction
from everstep.controller.core.deadlines import active_until_s, drain_until_s
from everstep.controller.core.ledger import IncidentKind
from everstep.controller.core.model import Notice, NoticeClass
from everstep.controller.core.policy import is_growth_ready, largest_allowed
from everstep.controller.core.turn import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What ought to happen to a running job, if nothing breaks."""

    kind: IncidentKind
    cause_at_s: float
    deadline_s: float
    doomed: tuple[SliceId, ...] = ()
    durable: bool = False
    slice: SliceId | None = None
    notices: tuple[str, ...] = ()


def find_demand(turn: Turn) -> Demand | None:
    """Return the strongest demand on a running job."""
    spec, ledger, now_s = turn.spec, turn.ledger, turn.now_s
    budget_s = spec.checkpoint.emergency.budget_seconds
    patience_s = spec.runtime.timeouts.join_seconds + budget_s
    if turn.view.is_deleting:
        kind = IncidentKind.DELETE
        return Demand(kind=kind, cause_at_s=now_s, deadline_s=now_s + budget_s, durable=True)
    ends_s = active_until_s(turn)
    if ends_s is not None and now_s >= ends_s:
        kind = IncidentKind.DEADLINE
        return Demand(kind=kind, cause_at_s=ends_s, deadline_s=now_s + budget_s, durable=True)
    if ends_s is not None:
        turn.wake_at(ends_s)
    if spec.suspend:
        kind = IncidentKind.SUSPEND
        return Demand(kind=kind, cause_at_s=now_s, deadline_s=now_s + patience_s, durable=True)
    announced = [turn.notices[id_] for id_ in ledger.members if turn.is_doomed(id_)]
    if announced:
        return _answer_notices(turn, announced)
    target = largest_allowed(spec.slices, len(ledger.members))
    if target is not None and target < len(ledger.members):
        return Demand(
            kind=IncidentKind.SCALE_DOWN,
            cause_at_s=now_s,
            deadline_s=now_s + patience_s,
            doomed=ledger.members[target:],
        )
    if ledger.incident is None and is_growth_ready(turn):
        kind = IncidentKind.SCALE_UP
        return Demand(kind=kind, cause_at_s=now_s, deadline_s=now_s + patience_s)
    return _find_checkpoint(turn)


def _answer_notices(turn: Turn, announced: list[Notice]) -> Demand:
    members = turn.ledger.members
    doomed = {notice.slice for notice in announced}
    staying = [id_ for id_ in members if id_ not in doomed]
    count = largest_allowed(turn.spec.slices, len(staying))
    # Where the survivors are not an allowed count, some of them have to go too, and what only
    # they hold has to move as well.
    leaving = doomed if count is None else {*doomed, *staying[count:]}
    first = min(announced, key=lambda notice: (notice.first_seen_s, notice.slice))
    return Demand(
        kind=IncidentKind.NOTICE,
        cause_at_s=first.first_seen_s,
        deadline_s=min(drain_until_s(turn, notice) for notice in announced),
        doomed=tuple(id_ for id_ in members if id_ in leaving),
        durable=count is None or turn.spec.elasticity.on_loss is OnLoss.FAIL,
        slice=first.slice,
        notices=tuple(sorted(notice.id for notice in announced)),
    )


def _find_checkpoint(turn: Turn) -> Demand | None:
    if turn.spec.disruption.planned_action is not PlannedAction.CHECKPOINT_ONLY:
        return None
    open_ = [
        notice
        for id_ in turn.ledger.members
        if (notice := turn.notices.get(id_)) is not None
        and notice.notice_class is NoticeClass.PLANNED
        and notice.id not in turn.ledger.notices_served
    ]
    if not open_:
        return None
    first = min(open_, key=lambda notice: (notice.first_seen_s, notice.slice))
    return Demand(
        kind=IncidentKind.CHECKPOINT,
        cause_at_s=first.first_seen_s,
        deadline_s=min(drain_until_s(turn, notice) for notice in open_),
        durable=True,
        slice=first.slice,
        notices=tuple(sorted(notice.id for notice in open_)),
    )
