from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from tests.tidy.tree import ROOT, pages, product_files, python_files, relative
from tests.tidy.words import CALLS, NAMES, PROSE, RAISES, BannedCall, BannedRaise

SPEAKS_OF_BANNED_WORDS = frozenset(
    {
        "docs/internals/glossary.md",  # Names the words it replaces.
        "docs/internals/style.md",  # Quotes the glossary.
        "tests/tidy/words.py",
        "tests/tidy/test_glossary.py",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    place: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.text}"


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


# --- Names ---


@cache
def parts(name: str) -> tuple[str, ...]:
    """`num_hosts`, `NumHosts` and `NUM_HOSTS` all have the parts num and hosts."""
    return tuple(part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name))


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that a file chooses itself; a foreign name that it only uses is not one."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str() as name):
                yield node.lineno, name
            case _:
                pass


def names_against_the_glossary(path: Path) -> Iterator[Found]:
    names = [(1, part) for part in path.relative_to(ROOT).with_suffix("").parts]
    for line, name in [*names, *bound_names(_tree(path))]:
        for banned in NAMES:
            if banned.part in parts(name) and name not in banned.allowed_names:
                yield Found(
                    place=relative(path),
                    line=line,
                    text=f"`{name}`: instead of {banned.part} write {banned.instead}",
                )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("num_hosts", ["num", "hosts"]),
        ("NumHosts", ["num", "hosts"]),
        ("MAX_EPOCH", ["max", "epoch"]),
        ("HTTPMaster", ["http", "master"]),
        ("deadline_s", ["deadline", "s"]),
        ("numpy", ["numpy"]),
    ],
)
def test_a_name_falls_into_parts(name: str, expected: list[str]) -> None:
    assert list(parts(name)) == expected


def test_names_keep_to_the_glossary() -> None:
    found = [
        str(one)
        for path in python_files()
        if relative(path) not in SPEAKS_OF_BANNED_WORDS
        for one in names_against_the_glossary(path)
    ]
    assert not found, "\n".join(found)


# --- Prose ---


@cache
def prose(path: Path) -> tuple[tuple[int, str], ...]:
    """Comments and docstrings of a file, or the lines of a page outside code blocks."""
    return tuple(_prose(path))


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(text.splitlines(), start=1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced:
                yield number, line
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(_tree(path)):
        # A docstring, or the sentence below a field: a string that is a statement of its own.
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            for offset, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + offset, line


_PROSE = [(re.compile(rf"\b{one.pattern}\b", re.IGNORECASE), one) for one in PROSE]


def prose_against_the_glossary(path: Path) -> Iterator[Found]:
    for number, line in prose(path):
        bare = re.sub(r"`[^`]*`", "", line)
        for pattern, banned in _PROSE:
            if match := pattern.search(bare):
                yield Found(
                    place=relative(path),
                    line=number,
                    text=f"instead of {match[0]!r} write {banned.instead}",
                )


def test_prose_keeps_to_the_glossary() -> None:
    found = [
        str(one)
        for path in [*python_files(), *pages()]
        if relative(path) not in SPEAKS_OF_BANNED_WORDS
        for one in prose_against_the_glossary(path)
    ]
    assert not found, "\n".join(found)


# --- Calls and raises ---


def _origins(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for, by its full dotted name."""
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    origins[alias.asname] = alias.name
                else:
                    top = alias.name.partition(".")[0]
                    origins[top] = top
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return origins


def _dotted(node: ast.expr, origins: dict[str, str]) -> str | None:
    match node:
        case ast.Name(id=name):
            return origins.get(name)
        case ast.Attribute(value=value, attr=attr):
            before = _dotted(value, origins)
            return None if before is None else f"{before}.{attr}"
        case _:
            return None


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every use of an imported name: called, or handed on to be called elsewhere."""
    origins = _origins(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            dotted = _dotted(node, origins)
            if dotted is not None:
                yield node.lineno, dotted


def is_banned(dotted: str, banned: BannedCall) -> bool:
    if dotted in banned.but_not:
        return False
    if banned.name.endswith(".*"):
        return dotted.startswith(banned.name[:-1])
    return dotted == banned.name


def raises(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every exception that is raised by its plain name, outside a `__post_init__`."""
    validating = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None and node not in validating:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if isinstance(raised, ast.Name):
                yield node.lineno, raised.id


def _covers(glob: str, path: Path) -> bool:
    name = relative(path)
    if glob.endswith("/**"):
        return name.startswith(glob[:-2])
    return PurePosixPath(name).match(glob)


def _is_example(path: Path) -> bool:
    """An example is a user's program: it may do what a user may do."""
    return relative(path).startswith("runtime/everstep/runtime/examples/")


@cache
def _offences(path: Path) -> tuple[tuple[BannedCall | BannedRaise, int], ...]:
    tree = _tree(path)
    used = [(call, at) for at, dotted in uses(tree) for call in CALLS if is_banned(dotted, call)]
    raised = [(kind, at) for at, name in raises(tree) for kind in RAISES if kind.name == name]
    return (*used, *raised)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("import time\ntime.monotonic()", ["time.monotonic"], id="module"),
        pytest.param("import time as t\nt.time_ns()", ["time.time_ns"], id="renamed-module"),
        pytest.param("import time\ntime.sleep(0.01)", [], id="a-pause"),
        pytest.param("from time import time as now\nnow()", ["time.time"], id="renamed-name"),
        pytest.param("import time\nf(clock=time.time)", ["time.time"], id="handed-on"),
        pytest.param("self.time.monotonic()", [], id="an-attribute-of-ours"),
    ],
)
def test_a_banned_call_is_seen_however_it_was_imported(source: str, expected: list[str]) -> None:
    clock = next(call for call in CALLS if call.name == "time.*")
    assert [name for _, name in uses(ast.parse(source)) if is_banned(name, clock)] == expected


def test_the_product_makes_no_banned_call_and_raises_no_mute_error() -> None:
    found = [
        f"{relative(path)}:{line}: instead of {banned.name} write {banned.instead}"
        for path in product_files()
        if not _is_example(path)
        for banned, line in _offences(path)
        if not any(_covers(glob, path) for glob in banned.allowed)
    ]
    assert not found, "\n".join(found)


def test_no_exception_to_the_ban_is_left_over() -> None:
    needed = {
        (banned.name, glob)
        for path in product_files()
        for banned, _ in _offences(path)
        for glob in banned.allowed
        if _covers(glob, path)
    }
    bans: list[BannedCall | BannedRaise] = [*CALLS, *RAISES]
    granted = {(banned.name, glob) for banned in bans for glob in banned.allowed}
    assert granted == needed
