"""What wakes the agent: the kernel telling of traffic control and links, and files that change.

An event says that something may be different, never what: whoever wakes looks at everything.
So an event that is lost, or a burst that overflows, costs one look.
"""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from inotify_simple import INotify, flags

from kura_shaper.kernel import wire
from kura_shaper.tenants.marks import PROOF_CLASS, SHAPED_QUEUES_MAX, ReservedClass

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

# linux/rtnetlink.h
_GROUPS = 0x1 | 0x8 | 0x40 | 0x400  # RTMGRP_LINK, RTMGRP_TC, RTMGRP_IPV4_ROUTE, RTMGRP_IPV6_ROUTE
_LINK_MESSAGES = frozenset({16, 17})  # RTM_NEWLINK, RTM_DELLINK
_ROUTE_MESSAGES = frozenset({24, 25})  # RTM_NEWROUTE, RTM_DELROUTE
_ROUTE = struct.Struct("=BB")  # of rtmsg: the family, and how many bits of the destination count
_RECEIVE_BYTES = 65_536
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 1024 * 1024
_LINKS_MAX = 40
_FILE_EVENTS = flags.CLOSE_WRITE | flags.MOVED_TO | flags.MOVED_FROM | flags.CREATE | flags.DELETE | flags.ATTRIB
# Of what is balanced: changed ten times a second, and told of whenever somebody reads one such class.
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
        self._socket.bind((0, _GROUPS))

    def fileno(self) -> int:
        """Return the descriptor that is readable when something was told."""
        return self._socket.fileno()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def drain(self, ifindexes: Collection[int], balanced: Collection[int] = ()) -> frozenset[str]:
        """Return what was told since the last time.

        "tc" of one of these devices, "link" of any, "route" of a default route, "lost" when more was told
        than could be kept. What a budget's balancing itself changes on the devices in `balanced` is no news.
        """
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
            reasons.update(filter(None, (_reason(data, at, ifindexes, balanced) for at in wire.messages(data))))


def _reason(data: memoryview, at: int, ifindexes: Collection[int], balanced: Collection[int]) -> str:
    _, kind, _, _, _ = wire.HEADER.unpack_from(data, at)
    at += wire.HEADER.size
    if kind in _LINK_MESSAGES:
        return "link"
    if kind in _ROUTE_MESSAGES:
        return "" if _ROUTE.unpack_from(data, at)[1] else "route"
    if not wire.Message.NEWQDISC <= kind <= wire.Message.GETTFILTER:
        return ""
    _, ifindex, handle, _, _ = wire.TCMSG.unpack_from(data, at)
    is_quiet = kind == wire.Message.NEWTCLASS and ifindex in balanced and handle & 0xFFFF in _QUIET_MINORS
    return "tc" if ifindex in ifindexes and not is_quiet else ""


class FileEvents:
    """Changes of files, however they are replaced. A file descriptor to wait on, then `drain`.

    A file is watched by every directory that its path leads through, links followed, for the one
    name in it that the path goes by: a new file put in its place, a link swapped as in a mounted
    ConfigMap, or a directory that comes later is no event of the file itself. What else happens in
    these directories, our own lock and journal included, wakes nobody.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._inotify = INotify(nonblocking=True)
        self._paths = tuple(paths)
        # By watch: the names in that directory that count.
        self._names: dict[int, set[str]] = {}
        self._watch()

    def fileno(self) -> int:
        """Return the descriptor that is readable when something happened where a path leads."""
        return int(self._inotify.fileno())

    def close(self) -> None:
        """Stop watching."""
        self._inotify.close()

    def drain(self) -> bool:
        """Return whether something changed since the last time."""
        events = self._inotify.read(timeout=0)
        has_changed = any(self._counts(event.wd, event.mask, event.name) for event in events)
        if has_changed:
            self._watch()
        return has_changed

    def _counts(self, watch: int, mask: int, name: str) -> bool:
        if mask & flags.Q_OVERFLOW:
            return True
        # IGNORED: the directory itself went.
        return watch in self._names and (bool(mask & flags.IGNORED) or name in self._names[watch])

    def _watch(self) -> None:
        names: dict[int, set[str]] = {}
        for path in self._paths:
            # The next step is taken only once a change of it would be told.
            for directory, name in _steps(path):
                try:
                    watch = self._inotify.add_watch(directory, _FILE_EVENTS | flags.ONLYDIR)
                except OSError:
                    break
                names.setdefault(watch, set()).add(name)
        for stale in self._names.keys() - names.keys():
            with suppress(OSError):
                self._inotify.rm_watch(stale)
        self._names = names


def _steps(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield each directory that a path leads through, with the name that it goes by there."""
    place, names = Path("/"), [part for part in reversed(path.absolute().parts) if part != "/"]
    links = 0
    while names:
        name = names.pop()
        if name == "..":
            place = place.parent
            continue
        yield place, name
        try:
            target = (place / name).readlink()
        except OSError:
            place = place / name
            continue
        links += 1
        if links > _LINKS_MAX:
            return
        if target.is_absolute():
            place = Path("/")
        names += [part for part in reversed(target.parts) if part != "/"]
