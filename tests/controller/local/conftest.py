from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from local_rig import LocalRig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LocalRig]:
    made = LocalRig(tmp_path)
    made.add_job(root=tmp_path, slices=2, hosts=2)
    yield made
    made.close()
