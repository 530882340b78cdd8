"""What is wrong with something that people or processes wrote, in the reader's words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One field that cannot stay as it is."""

    path: str
    """As people write it: `spec.slices.min`, `spec.template.spec.containers[0].name`."""
    found: str
    expected: str

    def __str__(self) -> str:
        where = self.path or "the document"
        return f"{where}: found {self.found}, expected {self.expected}"


class SpecError(Exception):
    """A job that cannot be accepted; the user changes it before trying again.

    `path`, `found` and `expected` are those of the first problem; `problems` has all that could
    be told at once.
    """

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        if not problems:
            problems = (Problem(path="", found="nothing wrong", expected="a problem"),)
        self.problems = problems
        self.path = problems[0].path
        self.found = problems[0].found
        self.expected = problems[0].expected
        super().__init__("\n".join(str(problem) for problem in problems))


class WireError(Exception):
    """A directive, report, status or ledger that does not read as one.

    The reader keeps what it had: a message that cannot be read is as good as none.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {message}")
