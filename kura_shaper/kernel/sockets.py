"""Sockets on some ports: who listens, and what each connection carries (sock_diag, man sock_diag).

Marks are shown to CAP_NET_ADMIN only, so without it a connection's mark is None and never 0.
Layouts: include/uapi/linux/{inet_diag,tcp,xdp_diag}.h.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING

from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel import wire
from kura_shaper.kernel.diag import DiagDoor
from kura_shaper.kernel.errors import NotThereError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_PROC = Path("/proc")
_REQUEST = struct.Struct("=BBBxI48x")  # family, protocol, extensions, states, any socket
# family, state, ports, source, destination, device, cookie, then (expires, queues, uid), inode
_MESSAGE = struct.Struct("=BBxx 4s 16s 16s I Q 16x I")
_INFO, _MARK = 2, 15
# Established, fin-wait-1 and -2, close-wait, last-ack, closing: whoever may still send payload.
_SENDING = sum(1 << state for state in (1, 4, 5, 8, 9, 11))
_LISTEN, _UNCONNECTED = 1 << 10, 1 << 7
_RESENT_AT, _SEGMENTS_AT, _SENT_AT = 100, 156, 200  # total_retrans, data_segs_out, bytes_sent (from 4.19)

_XDP_REQUEST = struct.Struct("=BBHIIII")  # family, protocol, pad, inode, what to show, cookie
_XDP_MESSAGE_BYTES, _XDP_SHOW = 16, 1 | 2 | 4
_XDP_INFO, _XDP_TX_RING, _XDP_UMEM = 1, 4, 5
_XDP_UMEM_FLAGS_AT, _XDP_ZERO_COPY = 32, 1

_U32, _U64, _PORTS = struct.Struct("=I"), struct.Struct("=Q"), struct.Struct("!HH")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that takes what comes to a port: TCP that listens, or UDP without a peer."""

    protocol: str
    address: Address
    port: int
    inode: int

    def __str__(self) -> str:
        place = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        return f"{self.protocol} {place}:{self.port}"


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection; sent_bytes is its payload since it began, retransmits counted again.

    mark is None when it is not shown to us, sent_bytes when the kernel does not count it (before 4.19).
    """

    cookie: int
    local: Address
    port: int
    peer: Address
    peer_port: int
    inode: int
    mark: int | None
    sent_bytes: int | None
    sent_segments: int = 0
    resent_segments: int = 0


@dataclass(frozen=True, slots=True)
class XdpSocket:
    """An AF_XDP socket that sends: past every qdisc, with and without zero copy. ifindex is 0 when it is not told."""

    ifindex: int
    is_zero_copy: bool = False


def read_listeners(ports: Collection[int]) -> tuple[Listener, ...]:
    """Return who takes what comes to these ports. Raises KernelRefusedError, StateUnknownError."""
    found = []
    with DiagDoor() as door:
        for protocol, states in ((socket.IPPROTO_TCP, _LISTEN), (socket.IPPROTO_UDP, _UNCONNECTED)):
            name = "tcp" if protocol == socket.IPPROTO_TCP else "udp"
            for view, start, _ in _dump(door, protocol, states, extensions=0):
                family, _, ports_bytes, source, _, _, _, inode = _MESSAGE.unpack_from(view, start)
                (port, _) = _PORTS.unpack(ports_bytes)
                if port in ports:
                    found.append(Listener(name, _address(family, source), port, inode))
    return tuple(sorted(found, key=lambda one: (one.port, one.protocol, str(one.address), one.inode)))


def read_connections(ports: Collection[int]) -> tuple[Connection, ...]:
    """Return the TCP connections of these local ports. Raises KernelRefusedError, StateUnknownError."""
    with DiagDoor() as door:
        rows = _dump(door, socket.IPPROTO_TCP, _SENDING, extensions=1 << (_INFO - 1))
        return tuple(_connection(view, start, end) for view, start, end in rows if _port(view, start) in ports)


def _dump(door: DiagDoor, protocol: int, states: int, *, extensions: int) -> Iterator[tuple[memoryview, int, int]]:
    for family in _FAMILIES:
        body = _REQUEST.pack(family, protocol, extensions, states)
        try:
            yield from door.dump(body, doing="reading the sockets")
        except NotThereError:
            # IPv6 that the kernel was built or started without. IPv4 is always there where its diag module is.
            if family == socket.AF_INET:
                name = "tcp_diag" if protocol == socket.IPPROTO_TCP else "udp_diag"
                raise StateUnknownError(f"this kernel lacks {name}", remedy=f"modprobe {name}") from None


def _port(view: memoryview, start: int) -> int:
    return int(_PORTS.unpack_from(view, start + 4)[0])


def _connection(view: memoryview, start: int, end: int) -> Connection:
    family, _, ports, source, destination, _, cookie, inode = _MESSAGE.unpack_from(view, start)
    port, peer_port = _PORTS.unpack(ports)
    spans = wire.spans(view, start + _MESSAGE.size, end)
    mark_at, _ = spans.get(_MARK, (0, 0))
    info_at, info_end = spans.get(_INFO, (0, 0))
    has_sent = info_end - info_at >= _SENT_AT + 8
    return Connection(
        cookie=cookie,
        local=_address(family, source),
        port=port,
        peer=_address(family, destination),
        peer_port=peer_port,
        inode=inode,
        mark=_U32.unpack_from(view, mark_at)[0] if mark_at else None,
        sent_bytes=_U64.unpack_from(view, info_at + _SENT_AT)[0] if has_sent else None,
        sent_segments=_U32.unpack_from(view, info_at + _SEGMENTS_AT)[0] if has_sent else 0,
        resent_segments=_U32.unpack_from(view, info_at + _RESENT_AT)[0] if has_sent else 0,
    )


def _address(family: int, packed: bytes) -> Address:
    if family == socket.AF_INET:
        return IPv4Address(packed[:4])
    found = IPv6Address(packed)
    return found.ipv4_mapped or found  # a socket of both families shows IPv4 so


def read_xdp_sockets(proc: Path = _PROC) -> tuple[XdpSocket, ...]:
    """Return the AF_XDP sockets of this network namespace that can send.

    A kernel without xdp_diag tells only how many there are: those come without a device.
    Raises KernelRefusedError, StateUnknownError.
    """
    count = _xdp_count(proc)
    if not count:
        return ()
    body = _XDP_REQUEST.pack(socket.AF_XDP if hasattr(socket, "AF_XDP") else 44, 0, 0, 0, _XDP_SHOW, 0, 0)
    try:
        with DiagDoor() as door:
            rows = [parse_xdp(view, at, end) for view, at, end in door.dump(body, doing="reading the AF_XDP sockets")]
    except NotThereError:
        return (XdpSocket(0),) * count
    return tuple(row for row in rows if row)


def parse_xdp(view: memoryview, start: int, end: int) -> XdpSocket | None:
    """Return the socket of one message of xdp_diag, None for one that can't send."""
    spans = wire.spans(view, start + _XDP_MESSAGE_BYTES, end)
    if _XDP_TX_RING not in spans:
        return None
    info_at, _ = spans.get(_XDP_INFO, (0, 0))
    umem_at, umem_end = spans.get(_XDP_UMEM, (0, 0))
    has_flags = umem_end - umem_at >= _XDP_UMEM_FLAGS_AT + 4
    flags = _U32.unpack_from(view, umem_at + _XDP_UMEM_FLAGS_AT)[0] if has_flags else 0
    return XdpSocket(_U32.unpack_from(view, info_at)[0] if info_at else 0, bool(flags & _XDP_ZERO_COPY))


def _xdp_count(proc: Path) -> int:
    """Return how many AF_XDP sockets this network namespace has: every kernel tells everybody."""
    path = proc / "thread-self" / "net" / "protocols"
    try:
        rows = [line.split() for line in path.read_text("ascii").splitlines()]
        return sum(int(row[2]) for row in rows if row and row[0] == "XDP")
    except (OSError, ValueError, IndexError) as error:
        raise StateUnknownError(f"{path} can't be read: {error}") from error
