from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import msgspec
import pytest
import typer
import yaml

from everstep.controller.api.reasons import TABLE, Budget, Reason
from everstep.controller.api.spec import JobSpec, MultiSliceJob
from everstep.controller.cli.local import app as local_app
from everstep.controller.cli.main import app
from everstep.runtime.cli.main import app as checkpoint_app
from tests.tidy.references import unresolved
from tests.tidy.test_glossary import prose
from tests.tidy.tree import ROOT, kept_files, pages, product_files, relative

REASONS_PAGE = ROOT / "docs" / "reference" / "reasons.md"
KINDS = frozenset({"tutorials", "how-to", "reference", "explanation", "decisions", "internals"})

# Written in two halves, so that this file does not contain what it forbids.
FORBIDDEN = {
    "".join(halves): why
    for halves, why in {
        ("pypi", ".org"): "a registry's address; name the package only",
        ("python", "hosted.org"): "a registry's address; name the package only",
        ("registry.", "npmjs"): "a registry's address; name the package only",
        ("crates", ".io"): "a registry's address; name the package only",
        ("proxy.", "golang.org"): "a registry's address; name the module only",
        ("--index", "-url"): "installs come from wherever the machine is configured to look",
        ("--extra-index", "-url"): "installs come from wherever the machine is configured to look",
        ("--trusted", "-host"): "installs come from wherever the machine is configured to look",
        ("/opt/", "wheels"): "a path of one machine",
        ("/wo", "rk/"): "a path of one machine",
        ("/ro", "ot/"): "a path of one machine",
    }.items()
}


CHARGED_TO = {
    Budget.NONE: "nothing",
    Budget.DISRUPTION: "the disruption budget",
    Budget.FAILURE: "the failure budget",
}


def _struct_within(kind: object) -> type[msgspec.Struct] | None:
    for inner in (kind, *typing.get_args(kind)):
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            return inner
    return None


def _spec_fields(kind: type[msgspec.Struct], before: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        inner = _struct_within(field.type)
        for name in {field.name, field.encode_name}:
            yield f"{before}{name}"
            if inner is not None:
                yield from _spec_fields(inner, f"{before}{name}.")


SPEC_FIELDS = frozenset(_spec_fields(JobSpec))


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ +(.+?) *$", page.read_text(encoding="utf-8"), re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
    return set(slugs)


def _links(page: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", pages(), ids=relative)
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    broken: list[str] = []
    for link in _links(page):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        leads = file.exists() and (not anchor or anchor in _anchors(file))
        if not leads:
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", pages(), ids=relative)
def test_every_name_of_ours_on_a_page_exists(page: Path) -> None:
    text = "\n".join(line for _, line in prose(page))
    assert not list(unresolved(text, page, fields=SPEC_FIELDS, files=True))


def test_every_module_named_in_a_comment_exists() -> None:
    stale = [
        f"{relative(path)}:{number}: {token}"
        for path in product_files()
        for number, line in prose(path)
        for token in unresolved(line, path, fields=SPEC_FIELDS, files=False)
    ]
    assert not stale, "\n".join(stale)


def test_every_page_is_of_one_kind() -> None:
    inside = [path for path in (ROOT / "docs").iterdir() if path.is_dir()]
    assert {path.name for path in inside} <= KINDS


def test_every_kind_of_page_is_reachable_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    seen: set[Path] = set()
    queue = [index]
    while queue:
        page = queue.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        links = (link.partition("#")[0] for link in _links(page))
        queue += [(page.parent / link).resolve() for link in links if link and ":" not in link]
    unreachable = [relative(page) for page in (ROOT / "docs").rglob("*.md") if page not in seen]
    assert not unreachable


def test_every_decision_says_when_it_would_be_wrong() -> None:
    wanted = {"Context", "Decision", "Drawbacks", "Alternatives", "How we would notice"}
    for page in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        text = page.read_text(encoding="utf-8")
        headings = set(re.findall(r"^## (.+)$", text, re.MULTILINE))
        assert headings >= wanted, relative(page)


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.value)
def test_every_reason_is_documented_with_its_own_sentence(reason: Reason) -> None:
    text = REASONS_PAGE.read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (\w+)\n\n(.+?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    assert reason.value in sections, f"add a section to {relative(REASONS_PAGE)}"
    entry, section = TABLE[reason], " ".join(sections[reason.value].split())
    assert entry.sentence in section
    assert f"*Severity*: {entry.severity.name.lower()}." in section
    assert f"*Charged to*: {CHARGED_TO[entry.budget]}." in section


def test_no_page_documents_a_reason_that_is_gone() -> None:
    headings = re.findall(r"^### (\w+)$", REASONS_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(headings) == {reason.value for reason in Reason}


@pytest.mark.parametrize("page", [*pages()], ids=relative)
def test_every_example_on_a_page_is_well_formed(page: Path) -> None:
    for language, block in _blocks(page):
        if language == "python":
            compile(block, relative(page), "exec")
        elif language == "yaml" and "MultiSliceJob" in block:
            assert msgspec.convert(yaml.safe_load(block), MultiSliceJob)
        elif language == "json":
            json.loads(block)


def test_every_field_of_a_job_is_in_the_reference_with_its_default() -> None:
    text = (ROOT / "docs" / "reference" / "job.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.\[\]]+)` \| (.*?) ?\|", text, re.MULTILINE))
    assert rows == dict(_field_rows(MultiSliceJob))


def test_every_command_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    groups = {"local": local_app, "checkpoint": checkpoint_app}
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    for name, commands in groups.items():
        (section,) = (one for one in sections if one.startswith(f"`everstep {name}`"))
        rows = re.findall(r"^\| `([a-z]+)[^`]*` \|", section, re.MULTILINE)
        assert sorted(rows) == sorted(_verbs(commands)), name
    headings = re.findall(r"^## `everstep ([a-z]+)`$", text, re.MULTILINE)
    assert sorted(headings) == sorted([*_verbs(app), *groups])


def _verbs(commands: typer.Typer) -> list[str]:
    registered = commands.registered_commands
    names = [one.name or getattr(one.callback, "__name__", "") for one in registered]
    hidden = {name for name, one in zip(names, registered, strict=True) if one.hidden}
    return [name for name in names if name not in hidden]


def _field_rows(kind: type[msgspec.Struct], before: str = "") -> Iterator[tuple[str, str]]:
    """The rows of the reference: each field that has no fields of its own, and each list."""
    for field in msgspec.structs.fields(kind):
        name = f"{before}{field.encode_name}"
        inner = _struct_within(field.type)
        is_list = typing.get_origin(field.type) is tuple
        if name in {"apiVersion", "kind"}:
            continue
        if inner is None or is_list:
            yield name, _default_of(field)
        if inner is not None:
            yield from _field_rows(inner, f"{name}{'[]' if is_list else ''}.")


def _default_of(field: msgspec.structs.FieldInfo) -> str:
    """A default as people write it in YAML."""
    if field.required:
        return "required"
    value: object = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    match value:
        case None:
            return ""
        case Enum():
            return f"`{value.value}`"
        case bool():
            return f"`{str(value).lower()}`"
        case float():
            return f"`{value:g}`"
        case "":
            return '`""`'
        case ():
            return "`[]`"
        case _:
            return f"`{value}`"


def _blocks(page: Path) -> Iterator[tuple[str, str]]:
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_no_file_names_a_registry_or_a_machine() -> None:
    found = [
        f"{relative(path)}: {text}: {why}"
        for path in kept_files()
        if (content := _text_of(path)) is not None
        for text, why in FORBIDDEN.items()
        if text in content
    ]
    assert not found, "\n".join(found)


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None  # A golden checkpoint or an image.
