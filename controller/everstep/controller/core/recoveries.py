"""The table of changes: how long each part took, what it cost, where the state came from.

A row is written when an incarnation begins and completed once, when its first step is finished.
What is in between is not written, so a recovery costs two writes here, whatever its size.
"""

from __future__ import annotations

from msgspec.structs import replace

from everstep.controller.api.ids import Step
from everstep.controller.api.reasons import Reason
from everstep.controller.api.status import Recovery
from everstep.controller.api.wire import RestoreFigures
from everstep.controller.core.crashes import forgive
from everstep.controller.core.facts import tell_restore
from everstep.controller.core.health import is_done
from everstep.controller.core.ledger import Stage, Turnover
from everstep.controller.core.transitions import COALESCE_S
from everstep.controller.core.turn import Turn

ROWS_MAX = 64
_STRAGGLER_S = 2.0
"""How long the figures of the other hosts may come after the lead's."""


def close_turnover(turn: Turn) -> Recovery | None:
    """Notice that the present incarnation trains, and return its completed row.

    The turnover is closed in the ledger. None while it is still open.
    """
    ledger, turnover = turn.ledger, turn.ledger.turnover
    if ledger.stage is not Stage.RUN or turnover is None or turnover.started_at_s is None:
        return None
    lead = turn.lead_report()
    if lead is None:
        return None
    figures = [
        report.restore
        for _, _, report in turn.current_reports()
        if report.restore is not None and report.restore.incarnation == ledger.incarnation
    ]
    done = [one for one in figures if one.first_step_at_s is not None]
    is_finished = is_done(turn, lead)
    if not is_finished:
        first_s = [one.first_step_at_s for one in done if one.first_step_at_s is not None]
        lead_done = lead.restore is not None and lead.restore in done
        hosts = sum(len(turn.slices[id_].hosts) for id_ in ledger.members if id_ in turn.slices)
        if not lead_done:
            return None
        if len(done) < hosts and turn.now_s < max(first_s) + _STRAGGLER_S:
            turn.wake_at(max(first_s) + _STRAGGLER_S)
            return None
    row = _complete(turn, turnover, figures)
    restored = max([one.step for one in figures], default=ledger.step_seen)
    tell_restore(turn, row, figures)
    # What was shown until now may be of the lineage that ends here.
    turn.step_published = restored
    turn.change(
        turnover=None,
        lineage=ledger.incarnation,
        step_seen=restored,
        fresh=(),
        trained_since_s=turn.now_s,
    )
    if done:
        forgive(turn, restored)
    return row


def _complete(turn: Turn, turnover: Turnover, figures: list[RestoreFigures]) -> Recovery:
    row = open_row(turn, turnover)
    if not figures:
        return row
    restored = max(one.step for one in figures)
    # The survivors tell of their workers' last steps a little later than of the loss.
    before = max([turnover.step_before, *_older_steps(turn, turnover)])
    if turnover.step_left is not None:
        before = min(before, turnover.step_left)
    firsts = [one.first_step_at_s for one in figures if one.first_step_at_s is not None]
    spans = [one.first_step_s for one in figures if one.first_step_s is not None]
    return replace(
        row,
        step_before=before,
        step_restored=restored,
        lost_steps=max(0, before - restored),
        source=_combine({one.source for one in figures}),
        own_bytes=sum(one.own_bytes for one in figures),
        peer_bytes=sum(one.peer_bytes for one in figures),
        storage_bytes=sum(one.storage_bytes for one in figures),
        local_bytes=sum(one.local_bytes for one in figures),
        join_s=_rounded(max(one.join_s + one.start_s for one in figures)),
        restore_s=_rounded(max(one.restore_s for one in figures)),
        first_step_s=_rounded(max(spans)) if spans else None,
        total_s=_rounded(max(0.0, max(firsts) - turnover.cause_at_s)) if firsts else None,
    )


def _older_steps(turn: Turn, turnover: Turnover) -> list[Step]:
    """Return the last steps of the workers that this change ended, as far as still reported."""
    return [
        report.exit.step
        for _, _, report in turn.member_reports()
        if report.exit is not None
        and report.exit.incarnation < turn.ledger.incarnation
        and report.exit.at_s >= turnover.cause_at_s - COALESCE_S
    ]


def _combine(sources: set[str]) -> str:
    known = sources - {""}
    return known.pop() if len(known) == 1 else "mixed" if known else ""


def open_row(turn: Turn, turnover: Turnover) -> Recovery:
    """Return the row as far as it is known when the incarnation begins."""
    started_s = turn.ledger.incarnation_at_s
    return Recovery(
        incarnation=turn.ledger.incarnation,
        cause=turnover.reason.value,
        slice=turnover.slice,
        at_s=turnover.cause_at_s,
        from_slices=turnover.from_slices,
        to_slices=len(turn.ledger.members),
        step_before=turnover.step_before,
        detect_s=_rounded(max(0.0, turnover.decided_at_s - turnover.cause_at_s)),
        drain_s=None if turnover.drain_s is None else _rounded(turnover.drain_s),
        schedule_s=_rounded(max(0.0, started_s - turnover.halted_at_s)),
    )


def update_rows(
    turn: Turn, rows: tuple[Recovery, ...], completed: Recovery | None
) -> tuple[Recovery, ...]:
    """Return the table after this pass. The first start is no recovery and has no row."""
    ledger, turnover = turn.ledger, turn.ledger.turnover
    if completed is not None and completed.cause != Reason.FIRST_START.value:
        rows = (*(row for row in rows if row.incarnation != completed.incarnation), completed)
    if turnover is not None and turnover.started_at_s is not None:
        known = any(row.incarnation == ledger.incarnation for row in rows)
        if not known and turnover.reason is not Reason.FIRST_START:
            rows = (*rows, open_row(turn, turnover))
    return rows[-ROWS_MAX:]


def _rounded(value_s: float) -> float:
    return round(value_s, 4)
