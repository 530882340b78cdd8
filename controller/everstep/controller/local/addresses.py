"""Addresses of hosts: every host has its own in 127.0.0.0/8, so ports need not differ."""

from __future__ import annotations

import errno
import socket
import zlib
from collections.abc import Collection

from everstep.controller.api.ids import HostId

NUMBER_COUNT = 128
SLICE_COUNT_MAX = 254
HOST_COUNT_MAX = 254


def host_address(number: int, host: HostId) -> str:
    """Return the address of a host of the job with this number."""
    return f"127.{64 + number % NUMBER_COUNT}.{host.slice + 1}.{host.host + 1}"


def choose_number(uid: str, taken: Collection[int], *, port: int) -> int:
    """Choose a number whose addresses nobody uses.

    Numbers are spread by the uid, because jobs of other state folders of this machine cannot be
    seen; a bind shows whether one of them is there.

    Args:
        uid: of the new job.
        taken: numbers of the other jobs of this folder.
        port: of the agents.
    """
    first = zlib.crc32(uid.encode()) % NUMBER_COUNT
    candidates = [(first + i) % NUMBER_COUNT for i in range(NUMBER_COUNT)]
    free = [number for number in candidates if number not in taken]
    for number in free:
        if all(_is_free(f"127.{64 + number}.{slice_ + 1}.1", port) for slice_ in range(4)):
            return number
    # More jobs than numbers: the agents find out whose port is in use, and say so.
    return (free or candidates)[0]


def _is_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
