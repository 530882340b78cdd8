"""What the controller is told: the session's state and the figures beside it, as one report."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from everstep.controller.api.ids import Step
from everstep.controller.api.wire import Report
from everstep.runtime.agent.session import Session

if TYPE_CHECKING:
    from everstep.runtime.agent.supervisor.host import Host


class Reports:
    """Builds and publishes this host's report."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._sequence = 0
        self._is_due = False
        self.committed_at_s: float | None = None
        self.address_refused: str | None = None

    def publish_soon(self) -> None:
        """Publish once the current event is dealt with: several changes make one report."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.publish)

    def publish(self) -> None:
        self._is_due = False
        self._sequence += 1
        self._host.channel.publish(self._build())

    def _build(self) -> Report:
        host = self._host
        state, options = host.session, host.options
        snapshots, following = host.snapshots, host.following
        return Report(
            job_uid=options.job_uid,
            host=options.host,
            address=options.address,
            port=options.port,
            pid=os.getpid(),
            sequence=self._sequence,
            renewed_at_s=host.clock.unix_s(),
            directive_seen=-1 if state.directive is None else state.directive.sequence,
            incarnation=state.incarnation,
            phase=state.phase,
            phase_since_s=state.phase_since_s,
            step=_step_of(state),
            step_snapshot=None if snapshots is None else snapshots.newest_step,
            step_replicated=host.parcels.step_replicated,
            step_committed=state.step_committed,
            committed_at_s=self.committed_at_s,
            steps_per_s=None if following is None else following.pace.steps_per_s,
            loss=None if following is None else following.loss,
            exit=state.exit,
            held=state.held,
            missing=state.missing,
            coordinator_lost_at_s=state.coordinator_lost_at_s,
            notice=state.notice,
            restore=state.restore,
            fenced_by=state.fenced_by,
            save_settled=state.save_settled,
            program_ready=host.program.is_ready,
            fork_refused=host.program.fork_refused,
            storage_error=host.checkpoints.error,
            storage_error_step=host.checkpoints.error_step,
            snapshot_refused=None if snapshots is None else snapshots.refused,
            address_refused=self.address_refused,
        )


def _step_of(state: Session) -> Step:
    """The last finished step of the newest worker.

    Not the greatest step ever seen here: after a restore to an older one that would count steps as
    lost that were lost, and counted, before.
    """
    if state.worker is not None and state.worker.restored_step is not None:
        return max(state.worker.step, state.worker.restored_step)
    return state.step if state.exit is None else state.exit.step
