"""Hearing what changes traffic control, whoever does it."""

from __future__ import annotations

import socket
import struct
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TC_GROUP, _TC_MESSAGES = 0x8, range(36, 48)


@contextmanager
def hearing(device: str = "") -> Iterator[Callable[[], int]]:
    """Listen to each change in this network, or of one device; the value returns how many were told until now."""
    count, only = 0, socket.if_nametoindex(device) if device else 0
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as listening:
        listening.bind((0, _TC_GROUP))
        listening.setblocking(False)

        def heard() -> int:
            nonlocal count
            with suppress(BlockingIOError):
                while data := listening.recv(65_536):
                    while data:
                        length, kind, _, _, _, _, ifindex = struct.unpack_from("=IHHIIIi", data)
                        count += kind in _TC_MESSAGES and only in (0, ifindex)
                        data = data[(length + 3) & ~3 :]
            return count

        yield heard
