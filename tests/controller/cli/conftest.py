from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep_command import Everstep


@pytest.fixture
def everstep(tmp_path: Path) -> Iterator[Everstep]:
    """The command line over a state folder of its own, with agents that obey."""
    made = Everstep(tmp_path)
    yield made
    made.close()
