"""Settings of the controller, read from the environment once, at the door of a process."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENV_FOLDER = "EVERSTEP_LOCAL_DIR"
ENV_AGENT = "EVERSTEP_LOCAL_AGENT"
ENV_LOG_LEVEL = "EVERSTEP_LOG_LEVEL"
FOLDER_DEFAULT = Path(".everstep") / "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    folder: Path
    """State folder of the local world; absolute."""
    agent_command: tuple[str, ...]
    """What is run as the agent of a host, before its own arguments."""
    log_level: str

    @staticmethod
    def read(environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings, with their defaults.

        Args:
            environ: the environment; the process's own when absent.
        """
        found = os.environ if environ is None else environ
        agent = found.get(ENV_AGENT, "")
        return Settings(
            folder=Path(found.get(ENV_FOLDER) or FOLDER_DEFAULT).absolute(),
            agent_command=(
                tuple(shlex.split(agent))
                if agent
                else (sys.executable, "-m", "everstep.runtime.agent.main")
            ),
            log_level=found.get(ENV_LOG_LEVEL, "info").lower(),
        )
