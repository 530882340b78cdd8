"""How a command fails: what `kubectl` users expect to read, and the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

from everstep.controller.api.errors import SpecError
from everstep.controller.local.errors import (
    Conflict,
    FieldRefused,
    FolderBusy,
    LocalError,
    NotFound,
    RecordCorrupt,
)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CommandFailed(Exception):
    """A command cannot do what was asked. The text is what people read."""

    def __init__(self, message: str, code: int = EXIT_FAILED) -> None:
        self.code = code
        super().__init__(message)


class UsageWrong(CommandFailed):
    """The words of the command do not mean anything."""

    def __init__(self, message: str) -> None:
        super().__init__(f"error: {message}", EXIT_USAGE)


class JobInvalid(CommandFailed):
    """A job in a file cannot be accepted; every problem is named."""

    def __init__(self, name: str, problems: tuple[str, ...]) -> None:
        head = f'The MultiSliceJob "{name}" is invalid:'
        if len(problems) == 1:
            super().__init__(f"{head} {problems[0]}")
        else:
            super().__init__("\n".join([head, *(f"* {problem}" for problem in problems)]))


def explain(error: Exception) -> str:
    """Return what people read of an error."""
    match error:
        case CommandFailed():
            return str(error)
        case NotFound():
            return f"Error from server (NotFound): {error}"
        case Conflict():
            return f"Error from server (Conflict): {error}"
        case RecordCorrupt():
            return f"Error from server (InternalError): {error}; the file was left as it is"
        case FolderBusy():
            return f"Error from server (Timeout): {error}"
        case FieldRefused() | SpecError():
            return f"error: {error}"
        case _:
            return f"error: {error}"


@contextmanager
def failing_well() -> Generator[None]:
    """Turn errors that people can do something about into a message and an exit code."""
    try:
        yield
    except CommandFailed as error:
        print(explain(error), file=sys.stderr)
        raise SystemExit(error.code) from None
    except (LocalError, SpecError) as error:
        print(explain(error), file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None
    except BrokenPipeError:
        # The reader (`head`, `less`) had enough. Python must not try to flush into it again.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it lives as long as the process)
        raise SystemExit(EXIT_FAILED) from None
    except PermissionError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
