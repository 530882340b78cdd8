"""What the demo puts on the terminal: a live line, sentences, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from everstep.controller.api.status import JobStatus, Recovery
from everstep.controller.cli.demo.run import Run
from everstep.controller.cli.demo.stage import Played
from everstep.controller.cli.demo.verdict import Check

MARKS = {
    "Absent": "·",
    "Gone": "✗",
    "Starting": "…",
    "Joining": "~",
    "Ready": "●",
    "Disrupted": "!",
    "Suspect": "?",
    "Lost": "✗",
}


class View:
    """A live line under the sentences; plain lines where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(Text(""), console=console, refresh_per_second=8, transient=True)
        self._last_plain = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def tell(self, sentence: str) -> None:
        self._console.print(Text(sentence), highlight=False)

    def watch(self, run: Run, step_count: int, status: JobStatus) -> None:
        newest = run.lines[max(run.lines)] if run.lines else None
        step = newest.step if newest else 0
        value = newest.values["loss"] if newest else None
        loss = "-" if value is None else f"{value:.4f}"
        in_order = sorted(status.slice_statuses, key=lambda one: one.id)
        slices = " ".join(f"{one.id}{MARKS.get(one.state, '?')}" for one in in_order)
        what = status.message or status.phase.value
        head = f"slices {slices or '-'}  incarnation {status.incarnation}"
        line = f"  {head}  step {step}/{step_count}  loss {loss}  {what}"
        if self._console.is_terminal:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))
            return
        # Without a terminal a line is worth printing when the story moved, not when a step passed.
        plain = f"{head}  {what}"
        if plain != self._last_plain:
            self._last_plain = plain
            self._console.print(Text(line), soft_wrap=True)


def recovery_table(recoveries: Sequence[Recovery]) -> Table:
    """One row per change of incarnation; narrow enough for 80 columns."""
    table = _table("what each change cost: state read from, and seconds")
    for name in ("cause", "size"):
        table.add_column(name, no_wrap=True)
    for name in ("lost", "own", "peers", "disk"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("detect", "drain", "join", "restore", "first", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in recoveries:
        seconds = (r.detect_s, r.drain_s, r.join_s, r.restore_s, r.first_step_s, r.total_s)
        table.add_row(
            r.cause,
            f"{r.from_slices}→{r.to_slices}",
            "-" if r.lost_steps is None else str(r.lost_steps),
            *(_bytes(n) for n in (r.own_bytes, r.peer_bytes, r.storage_bytes)),
            *("-" if s is None else f"{s:.2f}" for s in seconds),
        )
    return table


def check_table(played: Sequence[tuple[Played, Sequence[Check]]], end: Sequence[Check]) -> Table:
    """One row per promise."""
    table = _table("what had to hold")
    for name in ("promise", "held", "figures"):
        table.add_column(name)
    for one, checks in played:
        table.add_row(Text(one.act.sentence, style="bold"))
        for check in checks:
            table.add_row(f"  {check.name}", "yes" if check.holds else "NO", check.detail)
    table.add_row(Text("at the end", style="bold"))
    for check in end:
        table.add_row(f"  {check.name}", "yes" if check.holds else "NO", check.detail)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)


def _bytes(count: int) -> str:
    if not count:
        return "-"
    size = float(count)
    for unit in ("B", "K", "M"):
        if size < 1024:
            return f"{size:.0f}{unit}"
        size /= 1024
    return f"{size:.1f}G"
