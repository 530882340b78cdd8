"""How the controller logs: for people at a terminal, as JSON otherwise.

The logger is made here once, at the door of a process, and passed to whoever logs.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, TextIO, cast

import structlog

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def open_log(*, level: str = "info", stream: TextIO | None = None) -> FilteringBoundLogger:
    """Return a logger that writes to a stream.

    Args:
        level: `debug`, `info`, `warning` or `error`; any other word means `info`.
        stream: standard error when absent. A terminal gets lines for people, anything else JSON.
    """
    target = sys.stderr if stream is None else stream
    is_terminal = target.isatty()
    render: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=True)
        if is_terminal
        else structlog.processors.JSONRenderer()
    )
    logger = structlog.wrap_logger(
        structlog.PrintLogger(target),
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS.get(level, logging.INFO)),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks
            if not is_terminal
            else structlog.processors.ExceptionPrettyPrinter(target),
            render,
        ],
    )
    return cast("FilteringBoundLogger", logger)
