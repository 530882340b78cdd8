"""For all tests."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

# A shell without job control lets what it starts in the background ignore SIGINT, and that is
# inherited: commands that a test starts could not be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that nobody is left alone with one at the end."""
    weights: Counter[Path] = Counter()
    for item in items:
        for name, weight in (("slow", 10), ("processes", 1)):
            if item.get_closest_marker(name) is not None:
                weights[item.path] += weight
    items.sort(key=lambda item: -weights[item.path])
