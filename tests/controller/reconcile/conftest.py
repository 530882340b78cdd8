from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from local_rig import LocalRig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LocalRig]:
    """A world without a job."""
    made = LocalRig(tmp_path)
    yield made
    made.close()
