"""Whether something changed while a reading was under way.

The kernel hands a dump out in parts and finds its place again by counting, so an object
that comes or goes in between makes it skip another, or show one twice, and for traffic
control it sets no flag that says so. It does tell every change, before the next part can
be read, to whoever listens: a reading during which nothing was told is whole. What is told
of a budget class does not count: it is there for as long as its tree is, and is read and
changed ten times a second where a budget is balanced.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from kura_shaper.kernel import wire
from kura_shaper.tenants.marks import ReservedClass

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_RTMGRP_LINK, _RTMGRP_TC = 0x1, 0x8
_RTM_DELLINK = 17
_RECEIVE_BYTES = 65_536


class ChangeWatch:
    """Listens from its making on, in the calling thread's network namespace. A context manager."""

    def __init__(self, ifindex: int) -> None:
        self._ifindex = ifindex
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.setblocking(False)  # noqa: FBT003 - the socket module's own form
        self._socket.bind((0, _RTMGRP_LINK | _RTMGRP_TC))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def saw_change(self) -> bool:
        """Whether the device's traffic control changed, or any device went, since the watch began."""
        while True:
            try:
                data = memoryview(self._socket.recv(_RECEIVE_BYTES))
            except BlockingIOError:
                return False
            except OSError:
                return True  # more was told than could be kept
            if any(self._matters(data, at) for at in wire.messages(data)):
                return True

    def _matters(self, data: memoryview, at: int) -> bool:
        _, kind, _, _, _ = wire.HEADER.unpack_from(data, at)
        if kind == _RTM_DELLINK:
            return True
        if not wire.Message.NEWQDISC <= kind <= wire.Message.GETTFILTER:
            return False
        _, ifindex, handle, _, _ = wire.TCMSG.unpack_from(data, at + wire.HEADER.size)
        is_budget = kind == wire.Message.NEWTCLASS and handle & 0xFFFF == ReservedClass.BUDGET
        return bool(ifindex == self._ifindex and not is_budget)
