"""`everstep demo`: plays the story, then the undisturbed run, then compares them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from everstep.controller.api.status import JobStatus, Recovery
from everstep.controller.cli.demo.program import PROGRAMS, Program
from everstep.controller.cli.demo.run import Run, StageError
from everstep.controller.cli.demo.show import View, check_table, recovery_table
from everstep.controller.cli.demo.stage import Played, Stage, ended_afterwards, fresh_folder
from everstep.controller.cli.demo.story import STEP_COUNT_MIN, Story, draw_story, standard_story
from everstep.controller.cli.demo.verdict import Check, Result, judge_act, judge_end
from everstep.controller.cli.failure import EXIT_INTERRUPTED

STEPS_DEFAULT = {"language-model": 160, "tiny": 120}


def demo(
    *,
    seed: int | None = None,
    program: str = "language-model",
    steps: int | None = None,
    folder: Path = Path(".everstep/demo"),
    reference: Path | None = None,
) -> int:
    """Play a story and say whether everything held.

    Args:
        seed: draws another story; None plays the standard one.
        program: `language-model` or `tiny`.
        steps: length of the training, 60 or more.
        folder: everything the demo writes goes there; its content is replaced.
        reference: result of an earlier undisturbed run of the same program and steps
            (`undisturbed.json`), to be compared with instead of running it again.

    Returns:
        The exit code: 0 only if every promise held; 2 when there can be no such story.
    """
    console = Console()
    chosen = PROGRAMS[program]
    step_count = STEPS_DEFAULT[program] if steps is None else steps
    if step_count < STEP_COUNT_MIN:
        Console(stderr=True).print(
            f"error: --steps: found {step_count}, expected {STEP_COUNT_MIN} or more: in fewer "
            f"there is no room for a story; {STEPS_DEFAULT[program]} when not given",
            highlight=False,
            soft_wrap=True,
        )
        return 2
    story = standard_story(step_count) if seed is None else draw_story(seed, step_count)
    try:
        return _tell(console, story, chosen, folder, reference)
    except KeyboardInterrupt as interrupt:
        # The first is answered by ending everything; a second breaks that off.
        if isinstance(interrupt.__context__, KeyboardInterrupt):
            said = "interrupted again: processes of the demo may be left; end them with"
            said += f" EVERSTEP_LOCAL_DIR={folder / 'local'} everstep local stop --all"
        else:
            said = "interrupted: every process of the demo was ended; its files are in"
            said += f" {folder}"
        console.print(said, highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED


def _tell(
    console: Console, story: Story, chosen: Program, folder: Path, reference: Path | None
) -> int:
    step_count = story.step_count
    began_s = time.monotonic()
    with View(console) as view:
        disturbed = Run("demo", folder, view.tell)
        fresh_folder(folder, disturbed)
        with ended_afterwards(disturbed):
            try:
                view.tell(f"everstep demo: {story.title}, {step_count} steps on 3 slices")
                played = _play(view, disturbed, chosen, story, slice_count=3)
                recoveries = disturbed.status().recoveries
                found = Result(losses=disturbed.losses(), digests=_digests(disturbed))
                if reference is None:
                    view.tell("now the same steps undisturbed, on one slice")
                    expected = _undisturbed(view, folder, chosen, step_count)
                else:
                    expected = _read_result(reference)
            except StageError as error:
                view.tell(f"the story broke: {error}")
                _write_report(folder, story, disturbed.status().recoveries, None, str(error))
                return 1
    judged = [(one, _judge(one, chosen)) for one in played]
    conflicts = disturbed.conflicts
    end = judge_end(found, expected, step_count=step_count, conflicts=conflicts)
    checks = [*(check for _, some in judged for check in some), *end]
    verdict = "everything held" if all(c.holds for c in checks) else "NOT everything held"
    console.print(recovery_table(recoveries))
    console.print(check_table(judged, end))
    took_s = time.monotonic() - began_s
    console.print(f"{verdict}; {took_s:.0f} s; the figures are in {folder / 'report.json'}")
    _write_report(folder, story, recoveries, end, verdict)
    return 0 if all(c.holds for c in checks) else 1


def undisturbed(*, program: str, steps: int, folder: Path) -> Path:
    """Run a program undisturbed on one slice and keep its result, to compare many stories with.

    Returns:
        The file to hand to `demo` as `reference`.
    """
    with View(Console()) as view:
        fresh_folder(folder, Run("undisturbed", folder, view.tell))
        _undisturbed(view, folder, PROGRAMS[program], steps)
    return folder / "undisturbed.json"


def _undisturbed(view: View, folder: Path, program: Program, step_count: int) -> Result:
    run = Run("undisturbed", folder, lambda _: None)
    calm = Story(title="undisturbed", step_count=step_count, acts=(), acts_required=0)
    with ended_afterwards(run):
        _play(view, run, program, calm, slice_count=1)
        result = Result(losses=run.losses(), digests=_digests(run))
    kept = {"losses": dict(result.losses), "digests": dict(result.digests)}
    (folder / "undisturbed.json").write_text(json.dumps(kept))
    return result


def _read_result(path: Path) -> Result:
    found = json.loads(path.read_text())
    losses = {int(step): float(loss) for step, loss in found["losses"].items()}
    return Result(losses=losses, digests=found["digests"])


def _judge(one: Played, program: Program) -> list[Check]:
    return judge_act(
        one.act,
        one.recoveries,
        step_committed=one.step_committed,
        snapshot_every_steps=program.snapshot_every_steps,
    )


def _play(
    view: View, run: Run, program: Program, story: Story, *, slice_count: int
) -> list[Played]:
    def look(status: JobStatus) -> None:
        view.watch(run, story.step_count, status)

    return Stage(run, program, story, slice_count, view.tell, look).play()


def _digests(run: Run) -> dict[str, str]:
    """SHA-256 of each leaf of the newest checkpoint, read back from disk and verified."""
    uri = (run.folder / "checkpoints" / run.name).absolute().as_uri()
    done = subprocess.run(
        [sys.executable, "-m", "everstep.runtime.checkpoint.digest", uri],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise StageError(f"the last checkpoint of {run.name} cannot be read: {done.stderr.strip()}")
    found: dict[str, str] = json.loads(done.stdout)["leaves"]
    return found


def _write_report(
    folder: Path,
    story: Story,
    recoveries: Sequence[Recovery],
    end: tuple[Check, Check] | None,
    verdict: str,
) -> None:
    rows = [
        {
            "cause": r.cause,
            "from_slices": r.from_slices,
            "to_slices": r.to_slices,
            "lost_steps": r.lost_steps,
            "bytes": {"own": r.own_bytes, "peer": r.peer_bytes, "storage": r.storage_bytes},
            "detect_s": r.detect_s,
            "drain_s": r.drain_s,
            "join_s": r.join_s,
            "restore_s": r.restore_s,
            "first_step_s": r.first_step_s,
            "total_s": r.total_s,
        }
        for r in recoveries
    ]
    report = {
        "steps": story.step_count,
        "story": [asdict(act) | {"deed": act.deed.value} for act in story.acts],
        "recoveries": rows,
        "losses_equal": bool(end and end[0].holds),
        "parameters_equal": bool(end and end[1].holds),
        "verdict": verdict,
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
