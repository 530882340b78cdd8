"""Signs that this host will vanish, as the agent itself gets them: signals."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def listen(tell: Callable[[str], None]) -> None:
    """Call `tell` with the signal's name for each SIGTERM and SIGINT, from the event loop."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, tell, number.name)
