"""The one door of the core: `plan`."""

from __future__ import annotations

from msgspec.structs import replace

from everstep.controller.api.ids import Step
from everstep.controller.api.reasons import TABLE, Reason
from everstep.controller.api.status import JobStatus
from everstep.controller.api.wire import ExitCause, HostPhase
from everstep.controller.core.actions import derive_actions
from everstep.controller.core.deadlines import active_until_s, deadline_text
from everstep.controller.core.facts import tell_facts
from everstep.controller.core.health import StandbyState, is_done, judge_standby
from everstep.controller.core.incidents import advance_incident, call_back, let_go
from everstep.controller.core.ledger import Ledger, Stage, Standby, Turnover
from everstep.controller.core.losses import handle_losses, refuse
from everstep.controller.core.model import Plan, View
from everstep.controller.core.policy import Go, choose_members, choose_standby
from everstep.controller.core.recoveries import close_turnover, update_rows
from everstep.controller.core.saving import save_all_until_s
from everstep.controller.core.standing import describe_job, without_figures
from everstep.controller.core.transitions import finish, go, rest_standby
from everstep.controller.core.turn import Turn

_REQUEUE_S_MIN = 0.02
_DONE_GRACE_S = 5.0
"""How long the other hosts may take to end after the lead said that all is done and durable."""


def plan(view: View, ledger: Ledger, status: JobStatus, now_s: float, *, fresh_token: str) -> Plan:
    """Decide what becomes of one job. Pure: equal arguments give equal plans.

    The caller persists `Plan.ledger` and `Plan.status` if `Plan.must_persist`, under the
    precondition of the view; on conflict it drops the whole plan; only then it performs the
    actions, in order.

    Args:
        view: What is seen, looked at anew.
        ledger: What was persisted last.
        status: What was persisted with it.
        now_s: Unix seconds.
        fresh_token: A secret that nobody has seen. It becomes the token of the peer servers if
            this pass writes the first directive of an incarnation, and is unused otherwise.
    """
    step = max(ledger.step_seen, status.step)
    turn = Turn(view=view, ledger=ledger, now_s=now_s, step_published=Step(step))
    completed = None
    if ledger.stage is not Stage.FINISHED:
        _heed_spec(turn)
        completed = close_turnover(turn)
        tell_facts(turn)
        _decide(turn)
    rows = update_rows(turn, status.recoveries, completed)
    described = describe_job(turn, status, rows)
    actions = derive_actions(turn, fresh_token)
    wakes = [at_s - now_s for at_s in turn.wakes if at_s > now_s]
    return Plan(
        ledger=turn.ledger,
        status=described,
        actions=(*actions, *turn.events),
        requeue_after_s=max(_REQUEUE_S_MIN, min(wakes)) if wakes else None,
        must_persist=(
            turn.ledger != ledger or without_figures(described) != without_figures(status)
        ),
    )


def _decide(turn: Turn) -> None:
    """Let the job make its moves, the most final ones first."""
    if turn.ledger.stage is Stage.RUN:
        if _is_done(turn):
            text = TABLE[Reason.COMPLETED].sentence
            finish(turn, Reason.COMPLETED, text, succeeded=True)
            return
        if refuse(turn):
            return
    handle_losses(turn)
    # An outage says nothing about what people ask for.
    is_heard = turn.ledger.outage_since_s is None or turn.view.is_deleting or turn.spec.suspend
    if turn.ledger.stage is Stage.RUN and is_heard and not call_back(turn):
        advance_incident(turn)
    _tend_standby(turn)
    _leave_wait(turn)


def _heed_spec(turn: Turn) -> None:
    """Take note of a raised or lowered `desired`."""
    ledger, desired = turn.ledger, turn.spec.slices.desired
    if ledger.desired == desired:
        return
    raised = ledger.desired > 0 and desired > ledger.desired
    asked = raised and len(ledger.members) < desired
    turn.change(desired=desired, grow_asked=asked)


def _is_done(turn: Turn) -> bool:
    """Whether training is over: the lead says so and nobody is still busy with it.

    The lead says so after the final commit. Whoever ends after that, in whatever way, ends nothing
    that matters.
    """
    current = [report for _, _, report in turn.current_reports()]
    if not current:
        return False
    lead = turn.lead_report()
    finished = [report for report in current if is_done(turn, report)]
    hosts = sum(len(turn.slices[id_].hosts) for id_ in turn.ledger.members if id_ in turn.slices)
    if len(finished) == hosts:
        return True
    if lead is None or not is_done(turn, lead):
        return False
    busy = [
        report
        for report in current
        if not is_done(turn, report)
        and report.phase is not HostPhase.ENDED
        and not (report.exit is not None and report.exit.cause is ExitCause.DONE)
    ]
    due_s = lead.phase_since_s + _DONE_GRACE_S
    if busy:
        turn.wake_at(due_s)
    return not busy or turn.now_s >= due_s


def _leave_wait(turn: Turn) -> None:
    """Begin the next incarnation as soon as the policy allows."""
    ledger, now_s = turn.ledger, turn.now_s
    if ledger.stage is not Stage.WAIT:
        return
    if turn.view.is_deleting:
        finish(turn, Reason.DELETED, "The job was deleted.")
        return
    ends_s = active_until_s(turn)
    if ends_s is not None and now_s >= ends_s:
        finish(turn, Reason.DEADLINE_EXCEEDED, deadline_text(turn))
        return
    if ends_s is not None:
        turn.wake_at(ends_s)
    if turn.spec.suspend:
        _suspend(turn)
        return
    turnover = ledger.turnover
    if turnover is None or turnover.reason is Reason.SUSPENDED:
        is_new = ledger.incarnation == 0
        turnover = Turnover(
            reason=Reason.FIRST_START if is_new else Reason.RESUMED,
            cause_at_s=now_s,
            decided_at_s=now_s,
            halted_at_s=now_s,
            count_wanted=turn.spec.slices.desired,
            lost=True,
            wait_until_s=now_s + turn.spec.elasticity.wait_for_replacement_seconds,
            step_before=turn.newest_step(),
        )
        turn.change(turnover=turnover)
    decision = choose_members(turn, turnover)
    if isinstance(decision, Go):
        staying = decision.members
        leaving = [id_ for id_ in ledger.members if turn.is_doomed(id_) and id_ not in staying]
        if leaving:
            let_go(turn, leaving)
            if turn.ledger.stage is Stage.FINISHED:
                return
            # What was counted for them may be what makes it a storm.
            decision = choose_members(turn, turnover)
    if isinstance(decision, Go):
        go(turn, decision.members)
    elif decision.until_s is not None:
        turn.wake_at(decision.until_s)


def _suspend(turn: Turn) -> None:
    """Keep nobody's memory: a suspended job holds no capacity, once its newest step is durable."""
    ledger = turn.ledger
    if ledger.standby:
        turn.change(standby=())
    if ledger.members and save_all_until_s(turn) is None:
        turn.change(members=())
    if ledger.turnover is not None and ledger.turnover.reason is not Reason.SUSPENDED:
        turnover = replace(ledger.turnover, reason=Reason.SUSPENDED, lost=False, not_before_s=0.0)
        turn.change(turnover=turnover)


def _tend_standby(turn: Turn) -> None:
    """Bring the set of slices that are up without being members to what is wanted."""
    wanted = choose_standby(turn) if turn.ledger.stage is not Stage.FINISHED else ()
    known = {entry.id: entry for entry in turn.ledger.standby}
    kept: list[Standby] = []
    for id_ in sorted(wanted):
        entry = known.get(id_, Standby(id=id_, since_s=turn.now_s))
        if judge_standby(turn, entry) is StandbyState.FAILED:
            entry = rest_standby(turn, entry)
            turn.wake_at(entry.since_s)
        kept.append(entry)
    if tuple(kept) != turn.ledger.standby:
        turn.change(standby=tuple(kept))
