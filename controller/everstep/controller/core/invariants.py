"""What must hold of every plan, whatever was seen. Judges the planner; the planner does not use it.

The numbers are those of the state machine's invariants (docs/internals/protocol.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep.controller.api.reasons import TABLE, Budget
from everstep.controller.api.wire import Command, Directive
from everstep.controller.core.ledger import Ledger, Stage
from everstep.controller.core.model import (
    Capacity,
    EmitEvent,
    Plan,
    ProcessState,
    RemoveJob,
    StartSlice,
    StopSlice,
    View,
    WriteDirective,
)


def find_violations(view: View, before: Ledger, plan: Plan) -> tuple[str, ...]:
    """Return every broken rule in words. Empty means that the plan may be carried out."""
    return (
        *_judge_ledger(plan.ledger),
        *_judge_change(view, before, plan),
        *_judge_actions(view, plan),
    )


def _judge_ledger(ledger: Ledger) -> Iterator[str]:
    if list(ledger.members) != sorted(set(ledger.members)):
        yield f"members are not sorted and distinct: {ledger.members}"
    if not set(ledger.fresh) <= set(ledger.members):
        yield f"fresh slices {ledger.fresh} are not all members {ledger.members}"
    if ledger.incident is not None and ledger.stage is not Stage.RUN:
        yield f"an incident is open in stage {ledger.stage.value}"
    if (ledger.stage is Stage.FINISHED) != (ledger.finish is not None):
        yield "finished and not finished at once"
    if ledger.stage is Stage.RUN and (not ledger.members or ledger.incarnation == 0):
        yield "a job runs without members or incarnation"
    if {entry.id for entry in ledger.standby} & set(ledger.members):
        yield "a slice is a member and stands by"
    budgets = ledger.budgets
    if budgets.failures < 0 or len(budgets.failed_at_s) > budgets.failures:
        yield f"more failures in the window than in all: {budgets}"


def _judge_change(view: View, before: Ledger, plan: Plan) -> Iterator[str]:
    after = plan.ledger
    if after.incarnation < before.incarnation:
        yield f"(1) the incarnation fell from {before.incarnation} to {after.incarnation}"
    if after != before and not plan.must_persist:
        yield "(1) a changed ledger is not persisted"
    if before.stage is Stage.FINISHED and after != before:
        yield "(8) a finished job changed"
    if after.incarnation > before.incarnation:
        if after.stage is Stage.RUN:
            count = len(after.members)
            if not view.spec.slices.allows(count) or count > view.spec.slices.desired:
                yield f"an incarnation begins on {count} slices, which is not allowed"
            yield from _judge_storm(view, before, after)
            granted = {one.id for one in view.slices if one.capacity is Capacity.AVAILABLE}
            if not set(after.members) <= granted:
                yield f"an incarnation begins on slices {after.members}, granted are {granted}"
    elif after.stage is Stage.RUN:
        if before.stage is not Stage.RUN or after.members != before.members:
            yield "(1) members changed without a new incarnation"
    failed = after.budgets.failures > before.budgets.failures
    reason = after.budgets.charge.reason if after.budgets.charge is not None else None
    if failed and (reason is None or TABLE[reason].budget is not Budget.FAILURE):
        yield f"(4) {reason} was counted as a failure"


def _judge_storm(view: View, before: Ledger, after: Ledger) -> Iterator[str]:
    """(9): in a storm an incarnation begins on survivors alone."""
    since_s = after.incarnation_at_s - 3600.0
    recent = [at_s for at_s in after.budgets.disrupted_at_s if at_s > since_s]
    if len(recent) < view.spec.restart.max_disruptions_per_hour:
        return
    started = {*after.fresh, *after.members} - (set(before.members) - set(after.fresh))
    if started:
        yield f"(9) slices {sorted(started)} are started in a storm"


def _judge_actions(view: View, plan: Plan) -> Iterator[str]:
    ledger = plan.ledger
    stopped: set[int] = set()
    slices = {one.id: one for one in view.slices}
    for action in plan.actions:
        match action:
            case StartSlice():
                wanted = {*ledger.members, *(entry.id for entry in ledger.standby)}
                if action.incarnation != ledger.incarnation or action.slice not in wanted:
                    yield f"(1) {action.key} is not what the ledger says"
                if ledger.stage is Stage.FINISHED:
                    yield f"(8) {action.key} for a finished job"
                alive = [
                    host
                    for host in slices[action.slice].hosts
                    if host.process is ProcessState.ALIVE
                    and host.started_for is not None
                    and host.started_for < ledger.incarnation
                    and action.slice in ledger.fresh
                ]
                if alive and action.slice not in stopped:
                    yield f"(2) {action.key} beside agents that still live"
            case StopSlice():
                stopped.add(action.slice)
                if action.slice in ledger.members and ledger.stage is not Stage.FINISHED:
                    if action.incarnation >= ledger.incarnation:
                        yield f"{action.key} would end a member"
            case WriteDirective():
                yield from _judge_directive(view, ledger, action.directive)
            case RemoveJob():
                if any(
                    host.process is ProcessState.ALIVE for one in view.slices for host in one.hosts
                ):
                    yield "the job is removed while processes live"
            case EmitEvent():
                pass


_COMMANDS = {Stage.RUN: Command.RUN, Stage.WAIT: Command.WAIT, Stage.FINISHED: Command.STOP}


def _judge_directive(view: View, ledger: Ledger, directive: Directive) -> Iterator[str]:
    if directive.incarnation != ledger.incarnation:
        yield f"(1) a directive of incarnation {directive.incarnation}, not {ledger.incarnation}"
    if directive.command is not _COMMANDS[ledger.stage]:
        yield f"the directive says {directive.command.value} in stage {ledger.stage.value}"
    if view.directive is not None and directive.sequence <= view.directive.sequence:
        yield f"the sequence does not grow: {directive.sequence}"
    present = tuple(id_ for id_ in ledger.members if id_ in {one.id for one in view.slices})
    if tuple(member.slice for member in directive.members) != present:
        yield "the directive names other members than the ledger"
    if [member.rank for member in directive.members] != list(range(len(directive.members))):
        yield "ranks are not dense"
    lead = directive.lead
    if directive.members and (lead is None or lead.slice != directive.members[0].slice):
        yield "the lead is not host 0 of rank 0"
    if directive.request is not None and directive.command is not Command.RUN:
        yield "a request is made of members that do not run"
