"""Changing rates while a tenant sends at its ceiling interrupts nobody (case G1)."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from kernel_flood import in_process
from kernel_traffic import WORLD, listener, lost_segments, set_mark
from kernel_trees import ACME, MBIT, ZETA, differences, tenant, wanted

from kura_shaper.tree.build import Capabilities
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import LeafKind
from kura_shaper.tree.operations import ChangeClass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Network

    from kura_shaper.tree.snapshot import ClassCounters

pytestmark = [pytest.mark.privileged, pytest.mark.traffic]

_SO_SNDBUFFORCE = 32
CHANGES, CONNECTIONS, SENT_BYTES = 1_000, 4, 12_000_000
CEILINGS = (200 * MBIT, 220 * MBIT)


@contextmanager
def sending_without_end(network: Network, mark: int) -> Iterator[list[socket.socket]]:
    """Send from the node over several connections, as fast as the class lets, until the end of the block."""
    with ExitStack() as stack:
        with network.in_world():
            accepting = stack.enter_context(listener(socket.AF_INET, WORLD[socket.AF_INET]))
        senders, receivers = [], []
        for _ in range(CONNECTIONS):
            sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            set_mark(sender, mark)
            # Enough that the queue never runs dry when the sending process has to wait for a processor.
            sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 8_000_000)
            sender.connect(accepting.getsockname())
            senders.append(sender)
            receivers.append(stack.enter_context(accepting.accept()[0]))
        # Processes, since as threads they would stop whenever this one computes.
        stack.enter_context(in_process(lambda: pump(senders)))
        stack.enter_context(in_process(lambda: drain(receivers)))
        yield senders


def pump(senders: list[socket.socket]) -> None:
    data = bytes(1 << 18)
    while True:
        for sender in senders:
            sender.sendall(data)


def drain(receivers: list[socket.socket]) -> None:
    while True:
        for receiver in receivers:
            receiver.recv(1 << 20)


@dataclass(frozen=True, slots=True)
class Queue:
    """What waited in the class at a moment, and what it had sent and dropped until then."""

    at_ns: int
    counters: ClassCounters

    @classmethod
    def read(cls, network: Network) -> Queue:
        at_ns = time.monotonic_ns()
        return cls(at_ns, network.read().counters[ACME])

    def can_drain_by(self, at_ns: int) -> int:
        """Bytes that may have left the queue since: at the higher ceiling, and a bucket of each packet size."""
        return CEILINGS[1] * (at_ns - self.at_ns) // (8 * 10**9) + 2 * 65_536


@pytest.mark.case("G1")
def test_a_thousand_changes_keep_the_queue_and_lose_no_packet(network: Network, capabilities: Capabilities) -> None:
    """Case G1."""
    # A leaf that drops nothing by itself: fq_codel does, whenever its queue stands.
    plain = Capabilities(frozenset({LeafKind.BFIFO}), capabilities.classifiers)
    trees = [
        wanted(network.device, plain, tenant(ACME, ceiling=ceiling), tenant(ZETA), budget=ceiling)
        for ceiling in CEILINGS
    ]
    client, ifindex = network.client(), network.device.ifindex
    assert not any(client.send(plan(trees[0], network.read()).operations, ifindex))
    there_and_back = [
        [ChangeClass(spec) for spec in (trees[to].tree.class_of(c.minor) for c in (ACME, ZETA)) if spec]
        for to in (1, 0)
    ]
    with sending_without_end(network, ACME.minor << 16) as senders:
        while Queue.read(network).counters.backlog_bytes < 4 * 65_536:
            pass
        start = before = Queue.read(network)
        changes = 0
        # Long enough that what a change had lost would have been sent again by now.
        while changes < CHANGES or before.counters.sent_bytes - start.counters.sent_bytes < SENT_BYTES:
            for operations in there_and_back:
                assert client.send(operations, ifindex) == [None, None]
            changes += 2
            after = Queue.read(network)
            drained = before.can_drain_by(time.monotonic_ns())
            assert after.counters.backlog_bytes >= before.counters.backlog_bytes - drained
            before = after
        assert before.counters.dropped_packets == 0
        deadline = time.monotonic() + 2
        while sum(map(lost_segments, senders)) and time.monotonic() < deadline:
            pass
        assert sum(map(lost_segments, senders)) == 0
    assert differences(trees[0], network.read()) == []
