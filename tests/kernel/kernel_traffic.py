"""Small traffic out of `nic0`, and which classes it was counted in."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Network

    from kura_shaper.tree.model import Handle
    from kura_shaper.tree.snapshot import Snapshot

NODE = {socket.AF_INET: "10.70.0.1", socket.AF_INET6: "fd70::1"}
WORLD = {socket.AF_INET: "10.70.0.2", socket.AF_INET6: "fd70::2"}
FAMILIES = [socket.AF_INET, socket.AF_INET6]
DISCARD_PORT = 9
_TIMEOUT_S = 5.0
_IP_HEADER = {socket.AF_INET: 20, socket.AF_INET6: 40}
_ETHERNET, _UDP = 14, 8


def datagram_wire_bytes(family: socket.AddressFamily, payload: int) -> int:
    """Return what a datagram of one frame takes on the wire."""
    return _ETHERNET + _IP_HEADER[family] + _UDP + payload


def set_mark(made: socket.socket, mark: int) -> None:
    """Set SO_MARK; as bytes, since marks have 32 bits and setsockopt takes a signed number."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, struct.pack("=I", mark))


@contextmanager
def udp_socket(family: socket.AddressFamily, *, mark: int = 0, source_port: int = 0) -> Iterator[socket.socket]:
    """Open a datagram socket of the node."""
    with socket.socket(family, socket.SOCK_DGRAM) as made:
        set_mark(made, mark)
        made.bind((NODE[family], source_port))
        yield made


def send_datagrams(
    family: socket.AddressFamily, *, mark: int = 0, source_port: int = 0, payload: int = 100, count: int = 1
) -> None:
    """Send datagrams from the node to the world, where nobody reads them."""
    with udp_socket(family, mark=mark, source_port=source_port) as made:
        for _ in range(count):
            made.sendto(bytes(payload), (WORLD[family], DISCARD_PORT))


def listener(family: socket.AddressFamily, address: str, port: int = 0) -> socket.socket:
    """Return a listening socket in the present namespace."""
    made = socket.socket(family, socket.SOCK_STREAM)
    made.settimeout(_TIMEOUT_S)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.listen()
    return made


def upload(network: Network, family: socket.AddressFamily, *, mark: int, size: int) -> int:
    """Send bytes over a new connection from the node to the world; return how many arrived."""
    with network.in_world():
        accepting = listener(family, WORLD[family])
    with accepting, socket.socket(family, socket.SOCK_STREAM) as sender:
        sender.settimeout(_TIMEOUT_S)
        set_mark(sender, mark)
        sender.connect(accepting.getsockname()[:2])
        receiver, _ = accepting.accept()
        with receiver:
            return transfer(sender, receiver, size)


def transfer(sender: socket.socket, receiver: socket.socket, size: int) -> int:
    """Send bytes over a connection and return how many arrived; small enough for the buffers at both ends."""
    receiver.settimeout(_TIMEOUT_S)
    sender.sendall(bytes(size))
    arrived = 0
    while arrived < size:
        part = receiver.recv(65_536)
        if not part:
            break
        arrived += len(part)
    return arrived


def warm_up(network: Network) -> None:
    """Let both ends find each other: until they have, packets wait before they reach a queue."""
    for family in FAMILIES:
        upload(network, family, mark=0, size=1)


def read_when_sent(network: Network) -> Snapshot:
    """Return a reading without a queue; what was sent may still be on its way through one."""
    for _ in range(1_000):
        found = network.read()
        if not any(counters.backlog_packets for counters in found.counters.values()):
            return found
    raise AssertionError("packets stay in their queue")


def lost_segments(connection: socket.socket) -> int:
    """Return how many segments a connection had to send again.

    Those that the other end had got already are not counted (tcpi_total_retrans less
    tcpi_dsack_dups of include/uapi/linux/tcp.h): a busy machine makes TCP impatient.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 224)
    (resent,), (needless,) = struct.unpack_from("=I", info, 100), struct.unpack_from("=I", info, 216)
    return int(resent) - int(needless)


def counted(before: Snapshot, after: Snapshot) -> dict[Handle, tuple[int, int]]:
    """Return the packets and bytes that each class without children sent between two readings."""
    inner = Counter(spec.parent for spec in after.classes.values())
    deltas = {
        classid: (
            counters.sent_packets - before.counters[classid].sent_packets,
            counters.sent_bytes - before.counters[classid].sent_bytes,
        )
        for classid, counters in after.counters.items()
        if classid not in inner
    }
    return {classid: delta for classid, delta in deltas.items() if delta != (0, 0)}
