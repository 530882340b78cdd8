"""One pass of the core in the making: what it was given, and the ledger as it grows.

`Turn` is the only mutable thing in this room. It lives inside one call of `plan` and never leaves
it, so `plan` stays a function of its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from everstep.controller.api.ids import HostId, Incarnation, SliceId, Step
from everstep.controller.api.reasons import Reason
from everstep.controller.api.spec import JobSpec, PlannedAction
from everstep.controller.api.wire import ExitCause, Held, Report
from everstep.controller.core.ledger import Ledger
from everstep.controller.core.model import (
    Capacity,
    EmitEvent,
    HostView,
    Notice,
    NoticeClass,
    SliceView,
    View,
)
from everstep.controller.core.signals import collect_notices, has_own_notice


@dataclass(slots=True, kw_only=True)
class Turn:
    view: View
    ledger: Ledger
    now_s: float
    step_published: Step
    """Step of the last persisted status: a floor for what is known."""
    events: list[EmitEvent] = field(default_factory=list[EmitEvent])
    wakes: list[float] = field(default_factory=list[float])
    notices: dict[SliceId, Notice] = field(default_factory=dict[SliceId, Notice])
    """Every notice that the job heeds."""
    slices: dict[SliceId, SliceView] = field(default_factory=dict[SliceId, SliceView])
    _reports_of: tuple[SliceId, ...] | None = None
    _reports: list[tuple[SliceView, HostView, Report]] = field(
        default_factory=list[tuple[SliceView, HostView, Report]]
    )

    def __post_init__(self) -> None:
        self.slices = {one.id: one for one in self.view.slices}
        ignored = self.spec.disruption.planned_action is PlannedAction.IGNORE
        self.notices = {
            id_: notice
            for id_, notice in collect_notices(self.view).items()
            if not (ignored and notice.notice_class is NoticeClass.PLANNED)
        }

    @property
    def spec(self) -> JobSpec:
        return self.view.spec

    def change(self, **fields: Any) -> None:
        """Replace fields of the ledger."""
        self.ledger = msgspec.structs.replace(self.ledger, **fields)

    def wake_at(self, at_s: float) -> None:
        """Ask for another pass at this time, even if nothing is seen to change."""
        if at_s > self.now_s:
            self.wakes.append(at_s)

    def tell(self, key: str, reason: Reason, message: str, slice_: SliceId | None = None) -> None:
        self.events.append(EmitEvent(id=key, reason=reason, message=message, slice=slice_))

    # What is seen.

    def report(self, host: HostView) -> Report | None:
        """Return a host's report unless it speaks of another job (a stale identity)."""
        report = host.report
        return report if report is not None and report.job_uid == self.view.job_uid else None

    def member_reports(self) -> list[tuple[SliceView, HostView, Report]]:
        """Return the reports of all hosts of member slices, in rank order."""
        if self._reports_of != self.ledger.members:
            self._reports_of, self._reports = self.ledger.members, self._gather_reports()
        return self._reports

    def _gather_reports(self) -> list[tuple[SliceView, HostView, Report]]:
        found: list[tuple[SliceView, HostView, Report]] = []
        for id_ in self.ledger.members:
            one = self.slices.get(id_)
            for host in one.hosts if one is not None else ():
                report = self.report(host)
                if one is not None and report is not None:
                    found.append((one, host, report))
        return found

    def current_reports(self) -> list[tuple[SliceView, HostView, Report]]:
        """Return those of `member_reports` that speak of the present incarnation."""
        n = self.ledger.incarnation
        return [item for item in self.member_reports() if item[2].incarnation == n]

    @property
    def lead(self) -> HostId | None:
        return HostId(self.ledger.members[0], 0) if self.ledger.members else None

    def lead_report(self) -> Report | None:
        """Return the lead's report of the present incarnation."""
        return next((r for _, _, r in self.current_reports() if r.host == self.lead), None)

    def newest_step(self) -> Step:
        """Return the newest step of the lineage known to be finished, also by hosts that are gone.

        Once an incarnation trains, what older ones reached does not count any more: steps that
        were lost then are not lost again.
        """
        steps, lineage = [self.ledger.step_seen, self.step_published], self.ledger.lineage
        for one in self.view.slices:
            for host in one.hosts:
                report = self.report(host)
                if report is None:
                    continue
                if report.incarnation >= lineage:
                    steps.append(report.step)
                if report.exit is not None and report.exit.incarnation >= lineage:
                    steps.append(report.exit.step)
                if report.held is not None and report.incarnation >= lineage:
                    steps.append(report.held.step)
        left = self.step_left()
        return max(steps) if left is None else min(max(steps), left)

    def step_left(self) -> Step | None:
        """Return the step at which members of the present incarnation left, if any did.

        A step needs all members, so none beyond it was finished: what another host says it is past
        was begun there and never computed.
        """
        exits = [report.exit for _, _, report in self.current_reports() if report.exit is not None]
        left = [
            one.step
            for one in exits
            if one.cause is ExitCause.LEFT and one.incarnation == self.ledger.incarnation
        ]
        return min(left, default=None)

    def request_id(self) -> str | None:
        incident = self.ledger.incident
        return None if incident is None else f"{self.ledger.incarnation}-{incident.number}"

    def answer(self) -> Held | None:
        """Return the acknowledgement of the open request, from whoever led it."""
        wanted = self.request_id()
        for _, _, report in self.member_reports():
            if report.held is not None and report.held.request_id == wanted:
                return report.held
        return None

    # What is granted.

    def is_usable(self, id_: SliceId) -> bool:
        """Whether a slice may become (or stay, at a change) a member."""
        one = self.slices.get(id_)
        return (
            one is not None
            and id_ < self.spec.slices.count_max
            and one.capacity is Capacity.AVAILABLE
            and id_ not in self.notices
            and not has_own_notice(self.view, one)
        )

    def is_doomed(self, id_: SliceId) -> bool:
        """Whether a notice demands that a member leaves."""
        notice = self.notices.get(id_)
        if notice is None:
            return False
        migrates = self.spec.disruption.planned_action is PlannedAction.CHECKPOINT_AND_MIGRATE
        return migrates or notice.notice_class is NoticeClass.IMMINENT

    def next_incarnation(self) -> Incarnation:
        """Return a number above every one that was ever seen, whoever remembers it (G6)."""
        seen = [self.ledger.incarnation]
        if self.view.directive is not None and self.view.directive.job_uid == self.view.job_uid:
            seen.append(self.view.directive.incarnation)
        for one in self.view.slices:
            for host in one.hosts:
                report = self.report(host)
                seen.append(host.started_for or Incarnation(0))
                if report is not None:
                    seen += [report.incarnation, report.fenced_by or Incarnation(0)]
        return Incarnation(max(seen) + 1)
