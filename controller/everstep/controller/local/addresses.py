"""Addresses of hosts: every host has its own in 127.0.0.0/8, so ports need not differ.

A job has a number, and that gives the network of its hosts. Jobs of other state folders of this
machine cannot be seen, and one that starts, waits or is suspended holds no port. So the numbers
that this user's programs chose are kept on one page for the whole machine, each with the file of
the job that it belongs to. Those whose file is gone are next, the one first that was chosen the
longest ago.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import zlib
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from everstep.controller.api.ids import HostId

NUMBER_COUNT = 128
SLICE_COUNT_MAX = 254
HOST_COUNT_MAX = 254


def host_address(number: int, host: HostId) -> str:
    """Return the address of a host of the job with this number."""
    return f"127.{64 + number % NUMBER_COUNT}.{host.slice + 1}.{host.host + 1}"


class Chosen(msgspec.Struct, frozen=True, array_like=True):
    """A line of the page."""

    number: int
    owner: str
    """A path: while there is something, the number belongs to it."""


def choose_number(
    uid: str, taken: Collection[int], *, port: int, owner: Path, page: Path | None = None
) -> int:
    """Choose a number whose addresses nobody uses.

    Two that choose at the same moment get two numbers, and a number comes again after all others.
    Where the page cannot be kept, numbers are spread by the uid, and a bind shows whether somebody
    is there already.

    Args:
        uid: of the new job.
        taken: numbers of the other jobs of this folder.
        port: of the agents.
        owner: what exists as long as the job does; it may come into being after this call.
        page: of the numbers that were chosen on this machine; None for the user's own.

    Blocking: for as long as another one chooses: milliseconds.
    """
    with _chosen_before(page or _page_of_user()) as chosen:
        owned = {one.number for one in chosen if os.path.lexists(one.owner)}
        candidates = order_candidates(uid, taken, owned, [one.number for one in chosen])
        free = (number for number in candidates if _is_free(number, port))
        # More jobs than numbers: the agents find out whose port is in use, and say so.
        number = next(free, candidates[0])
        chosen[:] = [one for one in chosen if one.number != number]
        chosen.append(Chosen(number, str(owner.absolute())))
    return number


def order_candidates(
    uid: str, taken: Collection[int], owned: Collection[int], chosen: Sequence[int]
) -> list[int]:
    """Order the numbers to try: never chosen, chosen long ago, chosen just now, owned.

    Args:
        uid: of the new job, which spreads those that were never chosen.
        taken: numbers not to try, unless all are.
        owned: numbers of jobs that exist, to try last.
        chosen: numbers that were chosen before, the newest last.
    """
    first = zlib.crc32(uid.encode()) % NUMBER_COUNT
    numbers = [(first + i) % NUMBER_COUNT for i in range(NUMBER_COUNT)]
    age: Mapping[int, int] = {number: place for place, number in enumerate(chosen)}
    numbers.sort(key=lambda number: (number in owned, age.get(number, -1)))
    return [number for number in numbers if number not in taken] or numbers


def _page_of_user() -> Path:
    # Not where TMPDIR says: the addresses are the whole machine's.
    return Path(f"/tmp/everstep-{os.getuid()}/numbers.json")


@contextmanager
def _chosen_before(page: Path) -> Generator[list[Chosen]]:
    """Give the numbers chosen so far, for nobody else to change until the block is left."""
    try:
        page.parent.mkdir(mode=0o700, exist_ok=True)
        if page.parent.lstat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "belongs to another user", str(page.parent))
        fd = os.open(page, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        # Without a page there is still the probe of each address.
        yield []
        return
    with open(fd, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            chosen = msgspec.json.decode(file.read(), type=list[Chosen])
        except msgspec.DecodeError:
            # New, or torn by a kill: nothing depends on it but how likely a collision is.
            chosen = []
        yield chosen
        file.seek(0)
        file.truncate()
        file.write(msgspec.json.encode(chosen))


def _is_free(number: int, port: int) -> bool:
    hosts = (f"127.{64 + number}.{slice_ + 1}.1" for slice_ in range(4))
    return all(_can_bind(host, port) for host in hosts)


def _can_bind(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
