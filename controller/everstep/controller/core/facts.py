"""What reports tell beside progress, made into events: each once, not in every pass.

What was told is in the ledger where it cannot be seen from the status; so a job that simply trains
tells nothing and costs no write (invariant 7).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from everstep.controller.api.ids import Step
from everstep.controller.api.reasons import TABLE, Reason
from everstep.controller.api.status import LastCommitted, Recovery
from everstep.controller.api.wire import Report, RestoreFigures
from everstep.controller.core.ledger import Trouble
from everstep.controller.core.turn import Turn

_SOURCES_MAX = 4
"""So many bad sources are named in one event."""


def tell_facts(turn: Turn) -> None:
    """Tell what the members report of forks and storage, if it was not told before."""
    reports = [report for _, _, report in turn.current_reports()]
    refused = [one for one in reports if one.fork_refused is not None]
    if refused and not turn.ledger.fork_told:
        turn.change(fork_told=True)
        text = f"Host {refused[0].host}: {refused[0].fork_refused}"
        turn.tell("fork-refused", Reason.FORK_REFUSED, text)
    _tell_storage(turn, reports)


def newest_commit(reports: Sequence[Report]) -> LastCommitted | None:
    """Return the newest commit that any of these reports knows of."""
    commits = [
        LastCommitted(step=one.step_committed, completed_at_s=one.committed_at_s)
        for one in reports
        if one.step_committed is not None
    ]
    return max(commits, key=lambda one: one.step, default=None)


def _tell_storage(turn: Turn, reports: list[Report]) -> None:
    ledger, trouble = turn.ledger, turn.ledger.trouble
    commit = newest_commit(reports)
    at_s = None if commit is None else commit.completed_at_s
    failing = [one for one in reports if one.storage_error is not None]
    if failing:
        _tell_failed_write(turn, failing)
        return
    if commit is None or at_s is None:
        return
    if trouble is not None:
        # An error that is not repeated proves nothing; a later commit does.
        if trouble.committed_at_s is None or at_s > trouble.committed_at_s:
            turn.change(trouble=None, commit_told=ledger.incarnation)
            text = f"Step {commit.step} was committed: storage takes writes again."
            turn.tell(f"committed-after-{trouble.since_s:.3f}", Reason.STEP_COMMITTED, text)
    elif ledger.commit_told < ledger.incarnation and at_s >= ledger.incarnation_at_s:
        turn.change(commit_told=ledger.incarnation)
        text = f"Step {commit.step} was committed, the first in incarnation {ledger.incarnation}."
        turn.tell(f"committed-{ledger.incarnation}", Reason.STEP_COMMITTED, text)


def _tell_failed_write(turn: Turn, failing: Sequence[Report]) -> None:
    """Tell each step that failed once, however often it is tried, and show the newest words."""
    trouble = turn.ledger.trouble
    text = "; ".join(sorted({one.storage_error or "" for one in failing}))
    steps = [one.storage_error_step for one in failing if one.storage_error_step is not None]
    step = max(steps, default=None)
    if trouble is None or trouble.reason is not Reason.STORAGE_WRITE_FAILED:
        note_trouble(turn, Reason.STORAGE_WRITE_FAILED, text, step)
    elif step is not None and (trouble.step is None or step > trouble.step):
        turn.change(trouble=replace(trouble, message=text, step=step))
    else:
        if trouble.message != text:
            turn.change(trouble=replace(trouble, message=text))
        return
    key = f"write-failed-{turn.now_s:.3f}"
    sentence = TABLE[Reason.STORAGE_WRITE_FAILED].sentence
    turn.tell(key, Reason.STORAGE_WRITE_FAILED, f"{sentence} {text}")


def note_trouble(turn: Turn, reason: Reason, message: str, step: Step | None = None) -> None:
    """Remember that what ought to be on storage is not, until a later commit proves otherwise."""
    commit = newest_commit([report for _, _, report in turn.current_reports()])
    turn.change(
        trouble=Trouble(
            reason=reason,
            message=message,
            step=step,
            since_s=turn.now_s,
            committed_at_s=None if commit is None else commit.completed_at_s,
        )
    )


def tell_restore(turn: Turn, row: Recovery, figures: Sequence[RestoreFigures]) -> None:
    """Tell where the state of the present incarnation came from, and which sources were bad."""
    n, step = turn.ledger.incarnation, row.step_restored
    if row.storage_bytes or row.source == "storage":
        text = f"{row.storage_bytes} bytes of step {step} were in no host's memory any more."
        turn.tell(f"restored-{n}", Reason.RESTORED_FROM_STORAGE, text)
    elif row.local_bytes:
        text = f"{row.local_bytes} bytes of step {step} came from disks of hosts."
        turn.tell(f"restored-{n}", Reason.RESTORED_FROM_DISKS, text)
    elif row.source == "memory":
        text = f"Step {step}: {row.own_bytes} bytes from own memory, {row.peer_bytes} from peers."
        turn.tell(f"restored-{n}", Reason.RESTORED_FROM_MEMORY, text)
    rejected = sorted({words for one in figures for words in one.rejected})
    if rejected:
        text = "; ".join(rejected[:_SOURCES_MAX])
        more = len(rejected) - _SOURCES_MAX
        text += f"; and {more} more" if more > 0 else ""
        turn.tell(f"rejected-{n}", Reason.SOURCE_REJECTED, text)
