"""What wakes the agent: the kernel telling of traffic control and links, and files that change.

An event says that something may be different, never what: whoever wakes looks at everything.
So an event that is lost, or a burst that overflows, costs one look.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from inotify_simple import INotify, flags

from kura_shaper.kernel import wire
from kura_shaper.tenants.marks import PROOF_CLASS, SHAPED_QUEUES_MAX, ReservedClass

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

_RTMGRP_LINK, _RTMGRP_TC = 0x1, 0x8
_LINK_MESSAGES = frozenset({16, 17})  # RTM_NEWLINK, RTM_DELLINK (linux/rtnetlink.h)
_RECEIVE_BYTES = 65_536
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 1024 * 1024
_FILE_EVENTS = flags.CLOSE_WRITE | flags.MOVED_TO | flags.MOVED_FROM | flags.CREATE | flags.DELETE | flags.ATTRIB
# Told of whenever somebody reads one such class, and changed ten times a second where a budget is balanced.
_QUIET_MINORS = frozenset({ReservedClass.BUDGET, *range(PROOF_CLASS, PROOF_CLASS + SHAPED_QUEUES_MAX)})


class KernelEvents:
    """Traffic control and links of this network namespace. A file descriptor to wait on, then `drain`."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.setblocking(False)  # noqa: FBT003 - the socket module's own form
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._socket.bind((0, _RTMGRP_LINK | _RTMGRP_TC))

    def fileno(self) -> int:
        """Return the descriptor that is readable when something was told."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def drain(self, ifindexes: Collection[int]) -> frozenset[str]:
        """Return what was told since the last time: "tc" of one of these devices, "link" of any, "lost" when
        more was told than could be kept."""
        reasons: set[str] = set()
        while True:
            try:
                data = memoryview(self._socket.recv(_RECEIVE_BYTES))
            except BlockingIOError:
                return frozenset(reasons)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                reasons.add("lost")
                continue
            reasons.update(filter(None, (_reason(data, at, ifindexes) for at in wire.messages(data))))


def _reason(data: memoryview, at: int, ifindexes: Collection[int]) -> str:
    _, kind, _, _, _ = wire.HEADER.unpack_from(data, at)
    if kind in _LINK_MESSAGES:
        return "link"
    if not wire.Message.NEWQDISC <= kind <= wire.Message.GETTFILTER:
        return ""
    _, ifindex, handle, _, _ = wire.TCMSG.unpack_from(data, at + wire.HEADER.size)
    is_quiet = kind == wire.Message.NEWTCLASS and handle & 0xFFFF in _QUIET_MINORS
    return "tc" if ifindex in ifindexes and not is_quiet else ""


class FileEvents:
    """Changes of files, however they are replaced. A file descriptor to wait on, then `drain`.

    A file is watched by the directories that its path leads through, since a new file put in its
    place, or a link swapped as in a mounted ConfigMap, is no event of the old one.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._inotify = INotify(nonblocking=True)
        self._paths = tuple(paths)
        self._watched: set[Path] = set()
        self._watch()

    def fileno(self) -> int:
        """Return the descriptor that is readable when something changed."""
        return int(self._inotify.fileno())

    def close(self) -> None:
        """Stop watching."""
        self._inotify.close()

    def drain(self) -> bool:
        """Return whether something changed since the last time."""
        has_changed = bool(self._inotify.read(timeout=0))
        if has_changed:
            self._watch()
        return has_changed

    def _watch(self) -> None:
        wanted = {directory for path in self._paths for directory in _directories(path)}
        for directory in wanted - self._watched:
            try:
                self._inotify.add_watch(directory, _FILE_EVENTS | flags.ONLYDIR)
            except OSError:
                continue
            self._watched.add(directory)
        self._watched &= wanted


def _directories(path: Path) -> set[Path]:
    """Return the directories in which something can change where a path leads."""
    found, step = set(), path.absolute()
    for _ in range(40):
        found.add(step.parent)
        try:
            target = step.readlink()
        except OSError:
            break
        step = step.parent / target
    found.add(path.resolve().parent)
    return found
