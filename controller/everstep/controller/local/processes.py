"""Agents as processes: started so that they outlive the controller, ended as a whole.

Nothing here waits for a process to end: whoever needs that watches its pidfd.
"""

from __future__ import annotations

import os
import signal

from msgspec.structs import replace

from everstep.controller.api.ids import HostId, Incarnation, SliceId
from everstep.controller.local import identity
from everstep.controller.local.agents import SpawnOrder
from everstep.controller.local.errors import LocalError, RecordCorrupt
from everstep.controller.local.files import read_or_none, remove, write_durable, write_soft
from everstep.controller.local.folder import JobFolder
from everstep.controller.local.records import HostRecord, encode, load

_GATE = """
read -r go && [ "$go" = go ] || exit 125
started=$1 dir=$2; shift 2
echo $$ > "$started"
cd "$dir" || exit 126
exec "$@" < /dev/null
"""
"""The process that will be the agent waits here until its record is on disk.

When the controller ends before that, the read fails and the process ends without a trace.
"""

_RESET_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGCHLD,
    signal.SIGXFSZ,
)


class SpawnFailed(LocalError):
    """The machine gave no process. It may do so later."""


def spawn(
    order: SpawnOrder, folder: JobFolder, *, incarnation: Incarnation, now_s: float
) -> HostRecord:
    """Start the agent of a host, and record it before it does anything.

    The caller holds the folder's lock and has seen that the host has no agent.

    Durability: an agent that runs has its record on disk, whatever was killed when. A crash within
    leaves no process, or a record of one that never became an agent (`was_started` tells).
    """
    remove(folder.started(order.host))
    gate_out, gate_in = os.pipe()
    try:
        pid = _spawn_gate(order, folder, gate_out)
        who = identity.identify(pid)
        if who is None:
            # Impossible while nobody else reaps our children; better said than assumed.
            raise SpawnFailed(f"the agent of {order.host} ended before it began")
        record = HostRecord(
            host=order.host,
            job_uid=order.job_uid,
            pid=pid,
            start_ticks=who.start_ticks,
            boot_id=who.boot_id,
            pgid=pid,
            address=order.address,
            port=order.port,
            started_for=incarnation,
            started_at=now_s,
        )
        write_durable(folder.host(order.host), encode(record))
        os.write(gate_in, b"go\n")
        return record
    finally:
        os.close(gate_in)
        os.close(gate_out)


def _spawn_gate(order: SpawnOrder, folder: JobFolder, gate_out: int) -> int:
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    arguments = (
        *("/bin/sh", "-c", _GATE, "everstep-agent"),
        *(str(folder.started(order.host)), str(order.working_dir)),
        *order.command,
    )
    try:
        # A session of its own: it outlives this process and its terminal, and all that it starts
        # can be signalled as one group.
        return os.posix_spawn(
            "/bin/sh",
            arguments,
            order.environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, gate_out, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(order.log), append, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=_RESET_SIGNALS,
        )
    except OSError as error:
        raise SpawnFailed(f"cannot start the agent of {order.host}: {error.strerror}") from error


def was_started(record: HostRecord, folder: JobFolder) -> bool:
    """Whether the process went through the gate and became the agent."""
    data = read_or_none(folder.started(record.host))
    return data is not None and data.strip() == str(record.pid).encode()


def load_host(folder: JobFolder, host: HostId) -> HostRecord | None:
    """Read the record of a host.

    Raises:
        RecordCorrupt: it cannot be read.
    """
    record = load(folder.host(host), HostRecord)
    if record is not None and record.host != host:
        raise RecordCorrupt(folder.host(host), f"it is the record of host {record.host}")
    return record


def recorded_hosts(folder: JobFolder) -> tuple[HostId, ...]:
    """Return every host that has a record, readable or not."""
    found: list[HostId] = []
    try:
        names = os.listdir(folder.hosts)
    except FileNotFoundError:
        return ()
    for name in names:
        stem, dot, suffix = name.rpartition(".")
        slice_id, dash, host = stem.partition("-")
        if dot and suffix == "json" and dash and slice_id.isdigit() and host.isdigit():
            found.append(HostId(slice=SliceId(int(slice_id)), host=int(host)))
    return tuple(sorted(found))


def ask_to_stop(
    folder: JobFolder, record: HostRecord, *, grace_s: float, now_s: float
) -> HostRecord:
    """Tell an agent to end: SIGTERM and, after the grace, SIGKILL of its whole group.

    Asked again, it keeps the earlier of the two moments.
    """
    stop_by_s = now_s + grace_s
    if record.stop_by_s is not None and record.stop_by_s <= stop_by_s:
        asked = record
    else:
        asked = replace(record, stop_by_s=stop_by_s)
        write_soft(folder.host(record.host), encode(asked))
        if grace_s > 0:
            identity.send(record.identity, signal.SIGTERM)
            # A stopped process acts on SIGTERM only once it goes on.
            identity.send_group(record.identity, signal.SIGCONT)
    enforce_stop(asked, now_s=now_s)
    return asked


def enforce_stop(record: HostRecord, *, now_s: float) -> None:
    """Kill the group of an agent whose grace is over."""
    if record.stop_by_s is not None and record.stop_by_s <= now_s:
        identity.send_group(record.identity, signal.SIGKILL)


def end_rest(place: identity.Place) -> int:
    """Kill what is left running at a place without an agent; return how many processes it was."""
    return sum(identity.send(who, signal.SIGKILL) for who in identity.find_at(place))


def forget(folder: JobFolder, host: HostId) -> None:
    """Take the record of an agent that has ended away, and its report with it."""
    remove(folder.report(host))
    remove(folder.started(host))
    remove(folder.host(host))
