"""`logs`: what agents and trainings wrote to their standard output and error."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from everstep.controller.cli.failure import CommandFailed
from everstep.controller.local.folder import JobFolder, StateFolder
from everstep.controller.local.store import Store
from everstep.controller.ops.settings import Settings

_NAME = re.compile(r"(\d+)-(\d+)\.log")


@dataclass(slots=True)
class _Tail:
    """One file, and how far it was printed."""

    path: Path
    prefix: str
    offset: int = 0

    def print_new(self, *, whole_lines: bool) -> None:
        try:
            with self.path.open("rb") as source:
                source.seek(self.offset)
                block = source.read()
        except FileNotFoundError:
            return
        if whole_lines:
            # The rest of a line that is being written comes with its end.
            block = block[: block.rfind(b"\n") + 1]
        self.offset += len(block)
        text = block.decode(errors="replace")
        for line in text.splitlines():
            sys.stdout.write(f"{self.prefix}{line}\n")
        sys.stdout.flush()


def print_logs(
    settings: Settings,
    name: str,
    *,
    slice_id: int | None,
    host: int | None,
    follow: bool,
) -> None:
    """Print the logs of a job's hosts; lines carry their host when there are several."""
    state = StateFolder(settings.folder)
    record = Store(state).read(name)
    folder = state.job(name)
    tails: dict[Path, _Tail] = {}
    _find(folder, tails, slice_id, host)
    if not tails and not follow:
        place = "" if slice_id is None else f" of slice {slice_id}"
        place += "" if host is None else f" host {host}"
        raise CommandFailed(f'error: no logs{place} of the job "{name}" yet')
    for tail in list(tails.values()):
        tail.print_new(whole_lines=False)
    if not follow:
        return
    from everstep.controller.cli.awaiting import FINISHED, read_or_none
    from everstep.controller.cli.following import Follower

    store, uid = Store(state), record.metadata.uid
    with Follower(state, name) as follower:
        while True:
            found = read_or_none(store, name)
            is_over = found is None or found.metadata.uid != uid or found.status.phase in FINISHED
            _find(folder, tails, slice_id, host)
            for tail in tails.values():
                tail.print_new(whole_lines=not is_over)
            if is_over:
                return
            follower.wait(None)


def _find(
    folder: JobFolder, tails: dict[Path, _Tail], slice_id: int | None, host: int | None
) -> None:
    try:
        paths = sorted(folder.logs.iterdir())
    except FileNotFoundError:
        return
    for path in paths:
        found = _NAME.fullmatch(path.name)
        if found is None or path in tails:
            continue
        its_slice, its_host = int(found.group(1)), int(found.group(2))
        if (slice_id is None or slice_id == its_slice) and (host is None or host == its_host):
            is_only = slice_id is not None and host is not None
            tails[path] = _Tail(path, "" if is_only else f"[{its_slice}/{its_host}] ")
