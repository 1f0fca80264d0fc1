"""Traffic out of `nic0` that wants all it can get, and what the device lets through in short windows."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from kernel_traffic import NODE, WORLD, listener, set_mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Network

_PR_SET_PDEATHSIG, _SO_SNDBUFFORCE = 1, 32
WINDOW_NS = 100_000_000
_UDP_PAYLOAD = {socket.AF_INET: 1472, socket.AF_INET6: 1452}


@dataclass(slots=True)
class Flows:
    """Sending sockets of one tenant. A process of their own sends, so that they never wait for the test."""

    sockets: list[socket.socket]

    def mark(self, mark: int) -> None:
        """Set another mark while they send."""
        for each in self.sockets:
            set_mark(each, mark)


@contextmanager
def flooding(
    network: Network, family: socket.AddressFamily, protocol: socket.SocketKind, *, mark: int, flows: int
) -> Iterator[Flows]:
    """Send over so many flows without end, until the end of the block."""
    with ExitStack() as stack:
        senders, receivers = [], []
        for _ in range(flows):
            sender, receiver = _pair(network, family, protocol, mark)
            senders.append(stack.enter_context(sender))
            receivers.append(stack.enter_context(receiver))
        is_stream = protocol is socket.SOCK_STREAM
        size = 1 << 16 if is_stream else _UDP_PAYLOAD[family]
        stack.enter_context(in_process(lambda: _pump(senders, bytes(size))))
        if is_stream:
            stack.enter_context(in_process(lambda: _drain(receivers)))
        yield Flows(senders)


def _pair(
    network: Network, family: socket.AddressFamily, protocol: socket.SocketKind, mark: int
) -> tuple[socket.socket, socket.socket]:
    sender = socket.socket(family, protocol)
    set_mark(sender, mark)
    if protocol is socket.SOCK_DGRAM:
        with network.in_world():
            receiver = socket.socket(family, protocol)
        receiver.bind((WORLD[family], 0))  # nobody reads: what comes is dropped there, which is no loss of ours
        sender.bind((NODE[family], 0))
        sender.connect(receiver.getsockname()[:2])
        return sender, receiver
    with network.in_world(), listener(family, WORLD[family]) as accepting:
        sender.connect(accepting.getsockname()[:2])
        receiver = accepting.accept()[0]
    receiver.settimeout(None)
    sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 1_000_000)
    return sender, receiver


def _pump(senders: list[socket.socket], data: bytes) -> None:
    ready = select.epoll()
    by_descriptor = {sender.fileno(): sender for sender in senders}
    for descriptor, sender in by_descriptor.items():
        sender.setblocking(False)
        ready.register(descriptor, select.EPOLLOUT)
    while True:
        for descriptor, _ in ready.poll():
            with suppress(BlockingIOError, OSError):
                by_descriptor[descriptor].send(data)


def _drain(receivers: list[socket.socket]) -> None:
    ready = select.epoll()
    by_descriptor = {receiver.fileno(): receiver for receiver in receivers}
    for descriptor in by_descriptor:
        ready.register(descriptor, select.EPOLLIN)
    while True:
        for descriptor, _ in ready.poll():
            by_descriptor[descriptor].recv(1 << 20)


@contextmanager
def in_process(work: Callable[[], None]) -> Iterator[None]:
    """Do some work in a child until the end of the block; it dies with this process too."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                work()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@dataclass(frozen=True, slots=True)
class Window:
    """What a device sent in a short time."""

    elapsed_ns: int
    sent_bytes: int

    @property
    def bits_per_second(self) -> float:
        """The rate in this window."""
        return self.sent_bytes * 8e9 / self.elapsed_ns

    def most_bytes(self, ceiling_bits_per_second: int, bucket_bytes: int) -> int:
        """What a ceiling lets pass in the window: its rate, its bucket, and one packet under way."""
        return ceiling_bits_per_second * self.elapsed_ns // 8_000_000_000 + bucket_bytes + 65_536


def windows(read_bytes: Callable[[], int], count: int) -> list[Window]:
    """Return so many windows in a row of a counter of bytes.

    A window lasts from before its first reading to after its last, since a busy machine may
    stop this process between the clock and the counter.
    """
    readings = []
    for _ in range(count + 1):
        before_ns = time.monotonic_ns()
        sent_bytes = read_bytes()
        readings.append((before_ns, sent_bytes, time.monotonic_ns()))
        time.sleep(WINDOW_NS / 1e9)
    return [Window(after - before, b1 - b0) for (before, b0, _), (_, b1, after) in pairwise(readings)]


def mean_bits_per_second(found: list[Window]) -> float:
    """Return the rate over all windows."""
    return sum(w.sent_bytes for w in found) * 8e9 / sum(w.elapsed_ns for w in found)
