"""The local world keeps every promise of the seam."""

from __future__ import annotations

from tests.controller.world_conformance.checks import *  # noqa: F403
