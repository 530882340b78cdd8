from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from everstep.controller.ops.logs import open_log
from everstep.controller.ops.settings import Settings


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_settings_have_defaults_that_need_no_environment() -> None:
    found = Settings.read({})
    assert found.folder == Path(".everstep/local").absolute()
    assert found.agent_command == (sys.executable, "-m", "everstep.runtime.agent.main")
    assert found.log_level == "info"


def test_the_environment_changes_settings(tmp_path: Path) -> None:
    found = Settings.read(
        {
            "EVERSTEP_LOCAL_DIR": str(tmp_path),
            "EVERSTEP_LOCAL_AGENT": "python 'my agent.py' -v",
            "EVERSTEP_LOG_LEVEL": "DEBUG",
        }
    )
    assert found.folder == tmp_path
    assert found.agent_command == ("python", "my agent.py", "-v")
    assert found.log_level == "debug"


def test_an_empty_variable_means_the_default() -> None:
    assert Settings.read({"EVERSTEP_LOCAL_DIR": "", "EVERSTEP_LOCAL_AGENT": ""}) == Settings.read(
        {}
    )


def test_a_file_gets_one_json_object_a_line_with_the_traceback_in_it() -> None:
    stream = io.StringIO()
    log = open_log(stream=stream)
    log.info("reconciled", job="llm", step=7)
    try:
        raise OSError("as the test asked")
    except OSError as error:
        log.error("pass failed", job="llm", exc_info=error)
    first, second = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (first["event"], first["job"], first["step"], first["level"]) == (
        "reconciled",
        "llm",
        7,
        "info",
    )
    assert "timestamp" in first
    assert second["exception"][0]["exc_value"] == "as the test asked"


def test_a_terminal_gets_lines_for_people() -> None:
    stream = _Terminal()
    open_log(stream=stream).warning("record refused", path="job.json")
    assert "record refused" in stream.getvalue()
    assert not stream.getvalue().lstrip().startswith("{")


def test_what_is_below_the_level_is_not_said() -> None:
    stream = io.StringIO()
    log = open_log(level="warning", stream=stream)
    log.info("reconciled")
    log.warning("action failed")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == [
        "action failed"
    ]
