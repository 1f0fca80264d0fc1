"""Senders: `python -m kura_shaper.bench.load '{"address": ...}'`, each a process that is kept on one CPU.

A sender fills its sockets with marked UDP as fast as the kernel takes it. What waits in a qdisc
is charged to the socket, so a tree that holds back makes the sender wait instead of dropping,
as TCP would. Many datagrams go with one sendmmsg, or 64 KB with one UDP_SEGMENT send: then a single
buffer passes the qdisc, as it does on a NIC that cuts segments itself.

Nothing receives: the frames carry a hardware address that the other end does not have, so that its
IP layer drops them first thing.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kura_shaper.errors import StateUnknownError

if TYPE_CHECKING:
    from collections.abc import Sequence

DISCARD_PORT: Final = 9
HEADER_BYTES, MTU_FRAME_BYTES = 14 + 20 + 8, 1514
FRAME_BYTES_MIN, FRAME_BYTES_MAX = 64, 65_536

_SEGMENT_BYTES = MTU_FRAME_BYTES - HEADER_BYTES
# One IP datagram's worth; the kernel takes at most 64 segments a send.
_SEGMENTS_MAX = 44
_DATAGRAMS_A_CALL = 64
# The kernel doubles it. Some 4 ms at 500 Mbit/s, so that a fair queue has no reason to drop.
_SEND_BUFFER_BYTES = 131_072
_READY = "ready\n"
_UDP_SEGMENT, _PR_SET_PDEATHSIG = 103, 1
_TRY_AGAIN = frozenset({errno.EAGAIN, errno.ENOBUFS, errno.EINTR})


@dataclass(frozen=True, slots=True)
class Packets:
    """What one send hands to the device: a frame, or a large buffer that is cut below the qdisc."""

    frame_bytes: int

    @property
    def segments(self) -> int:
        """The frames on the wire."""
        return max(1, min(self.frame_bytes // _SEGMENT_BYTES, _SEGMENTS_MAX))

    @property
    def payload_bytes(self) -> int:
        """What the application sends."""
        return self.segments * _SEGMENT_BYTES if self.is_gso else self.frame_bytes - HEADER_BYTES

    @property
    def wire_bytes(self) -> int:
        """With the headers of each frame, which is what HTB counts."""
        return self.payload_bytes + self.segments * HEADER_BYTES

    @property
    def is_gso(self) -> bool:
        """Whether the buffer is larger than a frame."""
        return self.frame_bytes > MTU_FRAME_BYTES

    def __str__(self) -> str:
        return f"{round(self.payload_bytes / 1024)} KB GSO" if self.is_gso else f"{self.frame_bytes} B"


@dataclass(frozen=True, slots=True)
class SenderSpec:
    """What one process sends, from which CPU: a socket for each mark. It dies with the process `parent`."""

    address: str
    marks: tuple[int, ...]
    frame_bytes: int
    cpu: int
    parent: int


class Senders:
    """Running senders. As a context manager it ends them; they also end with this process or thread."""

    def __init__(self, specs: Sequence[SenderSpec]) -> None:
        self._specs = specs
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> frozenset[int]:
        """The processes."""
        return frozenset(process.pid for process in self._processes)

    def wait_until_ready(self) -> None:
        """Return once every sender is about to send. Raises StateUnknownError when one can't."""
        for process in self._processes:
            line = process.stdout.readline().decode() if process.stdout else ""
            if line != _READY:
                raise StateUnknownError(f"a sender could not start: {line.strip() or 'it ended'}")

    @property
    def are_alive(self) -> bool:
        """Whether all go on."""
        return all(process.poll() is None for process in self._processes)

    def __enter__(self) -> Senders:
        try:
            for spec in self._specs:
                line = [sys.executable, "-m", __name__, json.dumps(asdict(spec))]
                child = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)  # noqa: S603
                self._processes.append(child)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdout:
                process.stdout.close()


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    """struct msghdr; the sockets are connected, so a message needs no name."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("iov", ctypes.POINTER(_Iovec)),
        ("iov_length", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    """struct mmsghdr."""

    _fields_ = (("header", _Header), ("sent", ctypes.c_uint))


def send_for_ever(spec: SenderSpec) -> NoReturn:
    """Send until killed. Raises OSError when the kernel takes nothing for another reason than a full queue."""
    packets = Packets(spec.frame_bytes)
    sockets = [_socket(spec.address, mark, packets) for mark in spec.marks]
    count = 1 if packets.is_gso else _DATAGRAMS_A_CALL
    payload = ctypes.create_string_buffer(packets.payload_bytes)
    iovec = _Iovec(ctypes.cast(payload, ctypes.c_void_p), packets.payload_bytes)
    header = _Header(iov=ctypes.pointer(iovec), iov_length=1)
    messages = (_Message * count)(*(_Message(header=header) for _ in range(count)))
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLOUT)
    sys.stdout.write(_READY)
    sys.stdout.flush()
    libc: Any = ctypes.CDLL(None, use_errno=True)
    every = ready = [each.fileno() for each in sockets]
    while True:
        taken = [libc.sendmmsg(descriptor, messages, count, socket.MSG_DONTWAIT) for descriptor in ready]
        if min(taken) == count:
            continue
        number = ctypes.get_errno()
        if max(taken) <= 0 and number not in _TRY_AGAIN:
            raise OSError(number, os.strerror(number))
        # Writable is a socket with half of its buffer free, so a sender that is held back wakes for many
        # packets, as a server does, and does not spin for each.
        ready = [descriptor for descriptor, _ in poll.poll(100)] or every


def _socket(address: str, mark: int, packets: Packets) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, struct.pack("=I", mark))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    if packets.is_gso:
        made.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, _SEGMENT_BYTES)
    made.connect((address, DISCARD_PORT))
    return made


def main() -> int:
    """Be a sender."""
    found = json.loads(sys.argv[1])
    spec = SenderSpec(**{**found, "marks": tuple(found["marks"])})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != spec.parent:
        return 1  # it died before we could say that we die with it
    # Ctrl-C reaches every process of a terminal; this one is ended by the one that started it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.sched_setaffinity(0, {spec.cpu})
    try:
        send_for_ever(spec)
    except OSError as error:
        sys.stdout.write(f"{error.strerror}\n")  # in place of `ready`: the one that started it says it
    return 1


if __name__ == "__main__":
    sys.exit(main())
