"""What announces a loss: every sign of one slice becomes one notice."""

from __future__ import annotations

from dataclasses import replace

from everstep.controller.api.ids import SliceId
from everstep.controller.core.model import Notice, NoticeClass, ProcessState, SliceView, View


def collect_notices(view: View) -> dict[SliceId, Notice]:
    """Merge all signs of each slice: five markers of one event make one notice.

    The world's own notice gives the id; a SIGTERM that an agent reported stands alone only where
    the world says nothing. The earliest deadline and the first sighting win.
    """
    notices: dict[SliceId, Notice] = {}
    for one in view.slices:
        signs = [one.notice] if one.notice is not None else []
        signs += _reported(view, one)
        if signs:
            notices[one.id] = _merge(signs)
    return notices


def has_own_notice(view: View, one: SliceView) -> bool:
    """Whether an agent of the slice was told to end; that process takes no new work."""
    return bool(_reported(view, one))


def _reported(view: View, one: SliceView) -> list[Notice]:
    return [
        Notice(
            id=f"agent-{one.id}-{host.host}-{host.report.notice.at_s:.3f}",
            slice=one.id,
            notice_class=NoticeClass.IMMINENT,
            deadline_s=host.report.notice.deadline_s,
            first_seen_s=host.report.notice.at_s,
        )
        for host in one.hosts
        if host.process is ProcessState.ALIVE
        and host.report is not None
        and host.report.job_uid == view.job_uid
        and host.report.notice is not None
    ]


def _merge(signs: list[Notice]) -> Notice:
    imminent = any(sign.notice_class is NoticeClass.IMMINENT for sign in signs)
    return replace(
        signs[0],
        notice_class=NoticeClass.IMMINENT if imminent else NoticeClass.PLANNED,
        deadline_s=min(sign.deadline_s for sign in signs),
        first_seen_s=min(sign.first_seen_s for sign in signs),
    )
