"""A controller that is killed at any line, and one that comes after it.

The pass runs in a process of its own that SIGKILLs itself when it reaches the line. Then another
controller is started, as `everstep local` does it, and the world must become the same as if
nothing had happened: same incarnation and members, one agent a host, every event once.

What a killed process had in memory is lost, so two lines at which the world looks the same leave
the same behind. The lines of a pass are therefore grouped by what the world looks like (files and
processes, without asking our own code), and the first and the last line of each group are tried.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

import everstep.controller.local as local_room
import everstep.controller.reconcile as reconcile_room
from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.core.plan import plan
from everstep.controller.local.files import is_temporary
from everstep.controller.local.tidy import tidy
from everstep.controller.ops.clock import SystemClock, fresh_token
from everstep.controller.reconcile.reconciler import Reconciler, Result
from local_rig import LocalRig, silent_log
from reports import write_report
from waiting import PATIENCE

# The child does nothing of jax, which another test may have brought up in this process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

WRITERS = frozenset(
    str(Path(room.__path__[0]) / name)
    for room, names in (
        (reconcile_room, ("reconciler.py",)),
        (
            local_room,
            ("world.py", "store.py", "files.py", "folder.py", "processes.py", "events.py"),
        ),
    )
    for name in names
)
"""Everything through which a pass changes the world. What only reads is the same at every line."""

Spot = tuple[str, int, int]
"""File, line, and which time it is reached."""


def _reconciler(rig: LocalRig) -> Reconciler:
    return Reconciler(
        rig.world, plan, clock=SystemClock(), fresh_token=fresh_token, log=silent_log()
    )


def _pass(rig: LocalRig) -> Result:
    rig.world.tend("llm")
    return _reconciler(rig).reconcile("llm").result


def _traced(action: Callable[[], Any], at_line: Callable[[Spot], None]) -> None:
    """Run an action and say each line of the writers right before it runs."""
    reached: Counter[tuple[str, int]] = Counter()

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in WRITERS:
            return None
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            reached[line] += 1
            at_line((*line, reached[line]))
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)


def _in_child(action: Callable[[], None]) -> int:
    """Run an action in a fork of this process; return its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


class Scenario:
    """A world right before an interesting pass."""

    def __init__(self, root: Path, prepare: Callable[[LocalRig, Path], None]) -> None:
        self.rig = LocalRig(root)
        prepare(self.rig, root)

    def spots(self) -> list[Spot]:
        """The first and the last line of each group of lines at which the world is the same."""
        found: list[Spot] = []
        groups: list[list[Spot]] = []
        seen: list[object] = [None]
        out, into = os.pipe()

        def note(spot: Spot) -> None:
            looks = _looks_of_world(self.rig.folder.root)
            if looks != seen[0]:
                seen[0] = looks
                groups.append([])
            groups[-1].append(spot)

        def run() -> None:
            _traced(lambda: _pass(self.rig), note)
            found.extend(spot for group in groups for spot in dict.fromkeys((group[0], group[-1])))
            os.write(into, msgspec.json.encode(found))

        assert _in_child(run) == 0
        os.close(into)
        with os.fdopen(out, "rb") as source:
            return msgspec.json.decode(source.read(), type=list[Spot])

    def run_until(self, spot: Spot) -> bool:
        """Run the pass in a process that kills itself at a line; return whether it got there."""

        def kill_at(here: Spot) -> None:
            if here == spot:
                os.kill(os.getpid(), signal.SIGKILL)

        status = _in_child(lambda: _traced(lambda: _pass(self.rig), kill_at))
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL

    def converge(self) -> None:
        """Be the next controller until there is nothing to do."""
        self.rig.restart()
        tidy(self.rig.folder, log=silent_log())
        deadline_s = time.monotonic() + PATIENCE * 20
        quiet = 0
        while quiet < 2:
            assert time.monotonic() < deadline_s, f"still busy: {self.summary()}"
            result = _pass(self.rig)
            is_quiet = result in (Result.QUIET, Result.GONE)
            quiet = quiet + 1 if is_quiet and not self._is_ending() else 0

    def summary(self) -> dict[str, Any]:
        """All of the world that must be the same in the end."""
        rig = self.rig
        folder = rig.folder.job("llm")
        seen = rig.world.observe("llm")
        litter = [
            str(path.relative_to(rig.folder.root))
            for path in rig.folder.root.rglob("*")
            if is_temporary(path) or path.name.startswith(".removed")
        ]
        directive = None if seen is None else seen.view.directive
        return {
            "job": folder.path.exists(),
            "incarnation": seen and seen.ledger.incarnation,
            "members": seen and seen.ledger.members,
            "phase": seen and seen.status.phase,
            "told": directive
            and (
                directive.incarnation,
                directive.command,
                [one.slice for one in directive.members],
            ),
            "agents": {str(host): len(pids) for host, pids in rig.agents().items()},
            "records": sorted(path.name for path in folder.hosts.glob("*.json")),
            "started_for": seen
            and [[host.started_for for host in one.hosts] for one in seen.view.slices],
            "events": sorted(rig.events()),
            "litter": litter,
        }

    def _is_ending(self) -> bool:
        return any(record.stop_by_s is not None for record in self.rig.world.living("llm"))

    def close(self) -> None:
        self.rig.close()


def _looks_of_world(root: Path) -> object:
    files = [
        (folder, name, os.lstat(os.path.join(folder, name)))
        for folder, _, names in os.walk(root)
        for name in names
    ]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return sorted((f, n, at.st_ino, at.st_size, at.st_mtime_ns) for f, n, at in files), children


def _new_job(rig: LocalRig, root: Path) -> None:
    rig.add_job(root=root, slices=2)


def _training(rig: LocalRig, root: Path) -> None:
    _new_job(rig, root)
    assert _pass(rig) is Result.DONE
    now_s = rig.clock.unix_s()
    for record in rig.world.living("llm"):
        write_report(rig.folder.job("llm"), record, now_s=now_s)
    _pass(rig)


def _slice_lost(rig: LocalRig, root: Path) -> None:
    _training(rig, root)
    rig.take_capacity(SliceId(1))


def _agent_lost(rig: LocalRig, root: Path) -> None:
    _training(rig, root)
    lost = rig.agents()[HostId(SliceId(0), 0)]
    rig.kill_agent(HostId(SliceId(0), 0))
    while rig.agents().get(HostId(SliceId(0), 0)) == lost:
        os.sched_yield()


def _deleted(rig: LocalRig, root: Path) -> None:
    _new_job(rig, root)
    rig.world.store.mark_deleted("llm", now_s=rig.clock.unix_s())


SCENARIOS: dict[str, Callable[[LocalRig, Path], None]] = {
    "first start": _new_job,
    "slice gone": _slice_lost,
    "agent lost": _agent_lost,
    "deleted": _deleted,
}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[[str], Scenario]]:
    scenarios: list[Scenario] = []

    def make(name: str) -> Scenario:
        scenario = Scenario(tmp_path / str(len(scenarios)), SCENARIOS[name])
        scenarios.append(scenario)
        return scenario

    yield make
    for scenario in scenarios:
        scenario.close()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_controller_killed_at_any_line_is_replaced_without_a_trace(
    name: str, made: Callable[[str], Scenario]
) -> None:
    undisturbed = made(name)
    undisturbed.converge()
    expected = undisturbed.summary()
    assert expected["litter"] == []
    spots = made(name).spots()
    assert len(spots) > 10, "the tracer sees no lines"
    missed: list[Spot] = []
    for spot in spots:
        scenario = made(name)
        if not scenario.run_until(spot):
            # A loop that waits for a process does not turn as often each time.
            missed.append(spot)
        scenario.converge()
        assert scenario.summary() == expected, f"killed at {spot}"
        # Not at the end of the test: hundreds of agents would be there by then.
        scenario.close()
    assert len(missed) < len(spots) / 8, f"the pass did not reach {missed}"
