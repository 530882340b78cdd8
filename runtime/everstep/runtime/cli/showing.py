"""How steps, leaves and differences read on a terminal, and as JSON."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from everstep.runtime.cli.opened import OpenedStep, leaf_bytes
from everstep.runtime.errors import CheckpointInvalid, ConfigurationError
from everstep.runtime.layout.compare import describe
from everstep.runtime.layout.scalars import INLINE, inline_values
from everstep.runtime.storage.history import Commit

if TYPE_CHECKING:
    from rich.table import Table

    from everstep.runtime.cli.collecting import CleanUp
    from everstep.runtime.cli.comparing import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    step: int
    size_bytes: int | None
    leaves: int | None
    items: tuple[str, ...]
    committed_at_s: float
    age_s: float
    incarnation: int
    job_uid: str
    metadata: dict[str, str]
    folder: str
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRow:
    item: str
    leaf: str
    what: str
    chunk: tuple[int, ...] | None
    size_bytes: int
    value: str | None = None


def step_row(commit: Commit, opened: OpenedStep | CheckpointInvalid, *, now_s: float) -> StepRow:
    """One line of `ls`. What cannot be opened is a line too, with the reason."""
    found, problem = (opened, "") if isinstance(opened, OpenedStep) else (None, str(opened))
    return StepRow(
        step=commit.step,
        size_bytes=found.size_bytes if found is not None else None,
        leaves=found.leaves if found is not None else None,
        items=found.names if found is not None else (),
        committed_at_s=commit.committed_at_s,
        age_s=max(now_s - commit.committed_at_s, 0.0),
        incarnation=commit.incarnation,
        job_uid=commit.job_uid,
        metadata={
            key: value
            for key, value in commit.extra.items()
            if key != INLINE and not key.startswith("everstep.")
        },
        folder=commit.folder,
        problem=problem,
    )


def leaf_rows(opened: OpenedStep, *, pattern: str | None) -> list[LeafRow]:
    """Leaves in the order of the tree.

    Raises:
        ConfigurationError: no leaf matches the pattern.
    """
    rows = [
        LeafRow(
            item=item,
            leaf=leaf.name,
            what=describe(leaf),
            chunk=tuple(reader.chunks[index]) if index in reader.chunks else None,
            size_bytes=leaf_bytes(leaf),
            value=repr(values[index]) if index in values else None,
        )
        for item, reader in opened.items.items()
        for values in [inline_values(reader.tree, reader.extra)]
        for index, leaf in enumerate(reader.tree.leaves)
        if pattern is None or fnmatch.fnmatchcase(leaf.name, pattern)
    ]
    if pattern is not None and not rows:
        raise ConfigurationError("--leaves", pattern, "a pattern that some leaf's name matches")
    return rows


def step_json(opened: OpenedStep, rows: Sequence[LeafRow]) -> dict[str, Any]:
    return {
        "step": opened.step,
        "folder": opened.commit.folder,
        "size_bytes": opened.size_bytes,
        "leaves": [asdict(row) for row in rows],
    }


def differences_json(a: int, b: int, found: Sequence[tuple[str, Difference]]) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "differences": [{"item": item, **asdict(difference)} for item, difference in found],
    }


def print_steps(rows: Sequence[StepRow]) -> None:
    table = _table("STEP", "SIZE", "LEAVES", "AGE", "INCARNATION", "ITEMS", "METADATA")
    for row in rows:
        notes = " ".join(f"{key}={value}" for key, value in sorted(row.metadata.items()))
        table.add_row(
            str(row.step),
            "?" if row.size_bytes is None else size_words(row.size_bytes),
            "?" if row.leaves is None else str(row.leaves),
            age_words(row.age_s),
            str(row.incarnation),
            ",".join(row.items),
            row.problem or notes,
        )
    _print(table)


def print_step(opened: OpenedStep, rows: Sequence[LeafRow]) -> None:
    print(
        f"step {opened.step}, {size_words(opened.size_bytes)}, {opened.leaves} leaves, "
        f"in {opened.commit.folder}"
    )
    has_items = len(opened.items) > 1
    table = _table(*(["ITEM"] if has_items else []), "LEAF", "WHAT", "CHUNK", "SIZE")
    for row in rows:
        what = row.what if row.value is None else f"{row.what} {row.value}"
        chunk = "" if row.chunk is None else "×".join(map(str, row.chunk))
        cells = [row.leaf, what, chunk, size_words(row.size_bytes) if row.size_bytes else ""]
        table.add_row(*([row.item] if has_items else []), *cells)
    _print(table)
    for name, files in opened.others.items():
        print(f"part {name}: {', '.join(files)}")


def print_differences(a: int, b: int, found: Sequence[tuple[str, Difference]]) -> None:
    if not found:
        print(f"Steps {a} and {b} have the same leaves with the same bytes.")
        return
    table = _table("LEAF", "DIFFERENCE", "WHAT")
    for item, difference in found:
        name = difference.leaf if item == "state" else f"{item}: {difference.leaf}"
        table.add_row(name, difference.kind, difference.words)
    _print(table)


def print_clean_up(plan: CleanUp) -> None:
    kept = ", ".join(map(str, plan.kept)) or "none"
    print(f"Kept: steps {kept}.")
    if not plan.deleted:
        print("Nothing would be deleted.")
        return
    table = _table("FOLDER", "STEP", "WHY")
    for one in plan.deleted:
        table.add_row(one.folder, "" if one.step is None else str(one.step), one.why)
    _print(table)
    print("Nothing was deleted: the job that owns the run does that.")


def size_words(size: int) -> str:
    """In powers of 1024, three digits."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{size} B"
        value /= 1024
    return f"{value:.3g} TiB"


def age_words(age_s: float) -> str:
    """As kubectl writes an age: the largest unit, and the next where it is short."""
    seconds = int(age_s)
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 7200:
        return f"{seconds // 60}m"
    if seconds < 172_800:
        return f"{seconds // 3600}h"
    return f"{seconds // 86_400}d"


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 3, 0, 0), header_style="", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=False)
    return table


def _print(table: Table) -> None:
    import sys

    from rich.console import Console

    # A pipe has no width: what is read by another program is not folded. Names of leaves have
    # brackets, which are no markup.
    is_read = sys.stdout.isatty()
    console = Console(markup=False, highlight=False, width=None if is_read else 10_000)
    console.print(table)
