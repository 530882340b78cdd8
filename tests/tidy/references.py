"""Names of our own code in backticks, in pages, docstrings and comments: do they still exist?"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.tidy.tree import PACKAGES, ROOT, SOURCE_ROOTS, module_name, product_files

CONTROLLER, RUNTIME = PACKAGES

_FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*\.(?:py|md|toml|txt|in|sh)|[\w.-]+(?:/[\w.-]+)+/?")
_DATA = re.compile(r".*\.(?:json|jsonl|yaml|log)")
_NO_FILE_OF_OURS = frozenset({"train.py", "everstep.dev/v1alpha1"})
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


@cache
def _modules() -> dict[str, Path]:
    return {module_name(path): path for path in product_files()}


@cache
def _rooms() -> dict[str, list[str]]:
    """Short name of each room → the full names that it can stand for."""
    rooms: dict[str, list[str]] = {}
    for package in PACKAGES:
        for child in package.iterdir():
            name = child.stem
            if child.is_dir() or child.suffix == ".py":
                full = f"{module_name(package / '__init__.py')}.{name}"
                if full in _modules():
                    rooms.setdefault(name, []).append(full)
    return rooms


@cache
def _names_in(path: Path) -> frozenset[str]:
    """What a module defines or imports at its top, and the members of its classes."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.alias():
                names.add(node.asname or node.name.rpartition(".")[2])
            case ast.arg():
                names.add(node.arg)
            case _:
                pass
    return frozenset(names)


def _resolves_dotted(full: str) -> bool:
    """Whether a full dotted name is a module, or something within one."""
    modules = _modules()
    head, rest = full, list[str]()
    while head and head not in modules:
        head, _, last = head.rpartition(".")
        rest.insert(0, last)
    if not head or (rest and head in {"everstep.controller", "everstep.runtime"}):
        # The packages themselves promise only what they export.
        return bool(head) and rest[0] in _names_in(modules[head])
    return all(name in _names_in(modules[head]) for name in rest)


def resolves_name(token: str, fields: frozenset[str]) -> bool:
    """Whether `room.module`, `room.module.name` or `everstep.….name` exists.

    `fields` are the dotted fields of a job, which look alike (`checkpoint.uri`). A token whose
    first part is no room of ours is somebody else's name and not judged.
    """
    first = token.partition(".")[0]
    if first == "everstep":
        return token in _namespaces() or _resolves_dotted(token)
    candidates = _rooms().get(first)
    if candidates is None or token in fields:
        return True
    after = token.removeprefix(first)
    return any(_resolves_dotted(candidate + after) for candidate in candidates)


def _namespaces() -> frozenset[str]:
    return frozenset({"everstep", "everstep.dev"})


def resolves_file(token: str, page: Path) -> bool:
    """Whether a path exists, seen from the project, the page's folder or a source root."""
    starts = [ROOT, page.parent, *SOURCE_ROOTS, *PACKAGES]
    if "/" not in token.rstrip("/"):
        # A bare file name may lie anywhere beside the page or among the modules.
        if any((start / token).exists() for start in starts):
            return True
        return token.endswith(".py") and any(path.name == token for path in product_files())
    return any((start / token).exists() for start in starts)


def tokens(text: str) -> Iterator[str]:
    """What stands in single backticks."""
    for match in re.finditer(r"(?<!`)`([^`\n]+)`(?!`)", text):
        yield match[1]


def unresolved(text: str, page: Path, *, fields: frozenset[str], files: bool) -> Iterator[str]:
    """The backticked names in a text that name something of ours that does not exist."""
    for token in tokens(text):
        if token in _NO_FILE_OF_OURS or _DATA.fullmatch(token):
            continue  # Written when something runs, or by somebody else.
        is_file = _FILE.fullmatch(token) is not None
        if is_file and files:
            if not token.startswith(".") and not resolves_file(token, page):
                yield token
        elif not is_file and _DOTTED.fullmatch(token) and not resolves_name(token, fields):
            yield token
