"""Each tenant is charged with what its own sockets sent again, and with nothing else.

The loss is real: frames to an address of the world go to a link address that nobody has, so they
leave `nic0`, arrive, and are thrown away there. Each count is held to what the sockets themselves
say (tcpi_total_retrans), for a busy machine makes TCP impatient with connections that lose nothing.
"""

from __future__ import annotations

import ctypes
import re
import socket
import struct
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kernel_traffic import FAMILIES, WORLD, listener, set_mark
from pyroute2 import IPRoute

from kura_shaper.clock import FakeClock
from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel.retransmits import BEST_FIRST, NO_TENANT, OTHER, RetransmitCounter, Way, open_retransmit_counter
from kura_shaper.kernel.retransmits_diag import INTERVAL_NS, DiagRetransmits
from kura_shaper.tenants.marks import MarkLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Ended, Network

pytestmark = pytest.mark.privileged

MARKS = MarkLayout()
BY_TENANT = [Way.TRACEPOINT, Way.INET_DIAG, *([Way.BCC] if find_spec("bcc") else [])]
ALICE, BOB = 0x100, 0xFFFE
PERFECT = WORLD
LOSSY = {socket.AF_INET: "10.70.0.3", socket.AF_INET6: "fd70::3"}
CAP_NET_ADMIN, CAP_PERFMON, CAP_BPF = 12, 38, 39
_NOBODY = "02:00:00:00:00:99"
_IFA_F_NODAD = 0x02
_NUD_PERMANENT = 0x80
_TIMEOUT_S = 10.0
_SEGMENT = 1_000


def total_retransmits(connection: socket.socket) -> int:
    """Return how many segments a connection sent again, by its own account."""
    return int(struct.unpack_from("=I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100)[0])


@dataclass(slots=True)
class Wire:
    """Connections from the node to the world, to addresses of which one can lose all that is sent to it."""

    network: Network
    world_address: str
    ends: ExitStack
    sent: dict[int, list[socket.socket]] = field(default_factory=dict)

    def connect(self, family: socket.AddressFamily, address: str, mark: int) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a new connection; the node's has the mark."""
        with self.network.in_world():
            accepting = listener(family, address)
        with accepting:
            sender = self.ends.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sender.settimeout(_TIMEOUT_S)
            set_mark(sender, mark)
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sender.connect((address, accepting.getsockname()[1]))
            receiver = self.ends.enter_context(accepting.accept()[0])
            receiver.settimeout(_TIMEOUT_S)
        return sender, receiver

    @contextmanager
    def loss(self, family: socket.AddressFamily) -> Iterator[None]:
        """Lose all that the node sends to the lossy address."""
        self.resolve(LOSSY[family], _NOBODY)
        try:
            yield
        finally:
            self.resolve(LOSSY[family], self.world_address)

    def resolve(self, address: str, link_address: str) -> None:
        """Have the node take this for the link address of an address."""
        with IPRoute() as ip:
            ip.neigh(
                "replace", dst=address, lladdr=link_address, ifindex=self.network.device.ifindex, state=_NUD_PERMANENT
            )

    def retransmit(self, family: socket.AddressFamily, mark: int, *, segments: int = 1) -> tuple[socket.socket, ...]:
        """Return both ends of a new connection that lost segments, sent some of them again, and has recovered."""
        sender, receiver = self.connect(family, LOSSY[family], mark)
        with self.loss(family):
            for _ in range(segments):
                sender.send(bytes(_SEGMENT))
            wait_until(lambda: total_retransmits(sender) > 0)
        receive(receiver, segments * _SEGMENT)
        return sender, receiver

    def send(self, family: socket.AddressFamily, mark: int) -> socket.socket:
        """Return the node's end of a new connection that carried bytes to the perfect address."""
        sender, receiver = self.connect(family, PERFECT[family], mark)
        sender.sendall(bytes(_SEGMENT))
        receive(receiver, _SEGMENT)
        return sender


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def receive(receiver: socket.socket, size: int) -> None:
    """Read so many bytes; the sender then has its acknowledgement, or has it very soon."""
    while size:
        part = receiver.recv(size)
        assert part
        size -= len(part)


@pytest.fixture
def wire(network: Network) -> Iterator[Wire]:
    """Return the wire from node to world, which has an address more."""
    with network.in_world(), IPRoute() as ip:
        (index,) = ip.link_lookup(ifname="up0")
        ip.addr("add", index=index, address=LOSSY[socket.AF_INET], prefixlen=24)
        ip.addr("add", index=index, address=LOSSY[socket.AF_INET6], prefixlen=64, flags=_IFA_F_NODAD)
        world_address = ip.get_links(index)[0].get("address")
    with ExitStack() as ends:
        made = Wire(network, str(world_address), ends)
        for family in FAMILIES:
            made.resolve(LOSSY[family], made.world_address)
            made.resolve(PERFECT[family], made.world_address)
        yield made


def opened(way: Way, marks: MarkLayout = MARKS) -> RetransmitCounter:
    """Open a way to count in the present network namespace, where this machine has it."""
    try:
        if way is Way.INET_DIAG:  # without the interval, in which a reading is the last one
            return RetransmitCounter(DiagRetransmits(marks, clock=FakeClock(), interval_ns=0), way, marks)
        return open_retransmit_counter(marks, ways=[way])
    except StateUnknownError as error:
        pytest.skip(error.message)


@pytest.fixture(params=BY_TENANT)
def counter(request: pytest.FixtureRequest, network: Network) -> Iterator[RetransmitCounter]:
    """Return each way to count by tenant, counting in the node."""
    with opened(request.param) as made:
        yield made


def settled(counter: RetransmitCounter, of: dict[int, list[socket.socket]]) -> None:
    """Assert that the counts of classes come to what their sockets say."""

    def expected() -> dict[int, int]:
        return {class_id: sum(map(total_retransmits, made)) for class_id, made in of.items()}

    def counts() -> dict[int, int]:
        found = counter.read()
        return {class_id: found.get(class_id, 0) for class_id in of}

    deadline = time.monotonic() + 2
    while counts() != expected() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert counts() == expected()


@pytest.mark.parametrize("family", FAMILIES, ids=["ipv4", "ipv6"])
def test_a_tenant_has_what_its_sockets_sent_again_and_no_other_has(
    family: socket.AddressFamily, wire: Wire, counter: RetransmitCounter
) -> None:
    a, b = MARKS.mark(ALICE), MARKS.mark(BOB)
    bobs = [wire.send(family, b)]
    alices = [wire.retransmit(family, a)[0]]
    before = counter.read()
    settled(counter, {ALICE: alices, BOB: bobs})
    assert before[ALICE] > 0
    bobs.append(wire.retransmit(family, b, segments=5)[0])
    alices.append(wire.send(family, a))
    settled(counter, {ALICE: alices, BOB: bobs})
    assert counter.read()[BOB] > 0
    assert counter.has_tenants


def test_a_segment_sent_again_in_one_large_packet_is_counted_once_each(wire: Wire, counter: RetransmitCounter) -> None:
    sender, receiver = wire.connect(socket.AF_INET, LOSSY[socket.AF_INET], MARKS.mark(ALICE))
    sender.sendall(bytes(200_000))
    receive(receiver, 200_000)
    with wire.loss(socket.AF_INET):
        size = sender.send(bytes(200_000))
        wait_until(lambda: total_retransmits(sender) > 0)
    receive(receiver, size)
    settled(counter, {ALICE: [sender]})
    assert counter.read()[ALICE] > 10


def test_bits_of_others_in_the_mark_change_nothing_and_no_mark_is_no_tenant(
    wire: Wire, counter: RetransmitCounter
) -> None:
    family = socket.AF_INET
    alice, _ = wire.retransmit(family, MARKS.mark(ALICE) | 0xC80)
    nobody, _ = wire.retransmit(family, 0xC80)
    no_tenants, _ = wire.retransmit(family, MARKS.mark(0x99))
    settled(counter, {ALICE: [alice], BOB: []})
    counts = counter.read()
    assert set(counts) <= {NO_TENANT, OTHER, ALICE}
    assert counts[NO_TENANT] >= total_retransmits(nobody) > 0
    assert counts[OTHER] == total_retransmits(no_tenants) > 0


@pytest.mark.parametrize("way", BY_TENANT)
def test_what_was_sent_again_before_does_not_count_and_what_ended_still_does(way: Way, wire: Wire) -> None:
    mark = MARKS.mark(ALICE)
    older, _ = wire.retransmit(socket.AF_INET, mark)
    with opened(way) as counter:
        assert counter.read() == {NO_TENANT: 0}
        ends = wire.retransmit(socket.AF_INET, mark)
        count = counter.read()[ALICE]
        assert 0 < count <= total_retransmits(ends[0])
        for end in ends:
            end.close()
        assert [counter.read()[ALICE] >= count for _ in range(4)] == [True] * 4
    assert total_retransmits(older) > 0


def test_what_sockets_sent_again_that_nobody_asked_in_time_is_in_the_sum(wire: Wire) -> None:
    with opened(Way.INET_DIAG) as counter, opened(Way.PROC) as node:
        assert counter.is_lower_bound
        sender, receiver = wire.retransmit(socket.AF_INET, MARKS.mark(ALICE))
        count = total_retransmits(sender)
        receiver.close()
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sender.close()
        counts = counter.read()
        assert ALICE not in counts
        assert counts[NO_TENANT] == node.read()[NO_TENANT] >= count


def test_the_sum_of_a_namespace_is_known_without_tenants(wire: Wire) -> None:
    with opened(Way.PROC) as counter:
        assert counter.read() == {NO_TENANT: 0}
        alice, _ = wire.retransmit(socket.AF_INET, MARKS.mark(ALICE))
        bob, _ = wire.retransmit(socket.AF_INET6, MARKS.mark(BOB))
        assert counter.read()[NO_TENANT] >= total_retransmits(alice) + total_retransmits(bob) > 0
        assert not counter.has_tenants


def keep_capabilities(*kept: int) -> None:
    """Take every capability but some from this process."""
    mask = sum(1 << each for each in kept)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = struct.pack("=6I", low, low, 0, high, high, 0)
    if ctypes.CDLL(None, use_errno=True).capset(struct.pack("=Ii", 0x20080522, 0), data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


@pytest.mark.case("G12")
@pytest.mark.case("G13")
@pytest.mark.parametrize(
    ("kept", "way"),
    [
        pytest.param((CAP_BPF, CAP_PERFMON), Way.TRACEPOINT, id="bpf and perfmon"),
        pytest.param((CAP_NET_ADMIN,), Way.INET_DIAG, id="net_admin"),
        pytest.param((CAP_BPF,), Way.PROC, id="bpf"),
        pytest.param((), Way.PROC, id="none"),
    ],
)
def test_the_best_way_that_our_privileges_allow_is_taken_and_why_no_better_one_is_said(
    kept: tuple[int, ...], way: Way, network: Network, in_child: Callable[[Callable[[], int | None]], Ended]
) -> None:
    """What a kernel or a container lacks makes the counting worse, and never ends it (G12, G13)."""
    if way is Way.TRACEPOINT:
        opened(way).close()

    def count() -> None:
        keep_capabilities(*kept)
        with open_retransmit_counter(MARKS) as counter:
            print(counter.way, counter.read())
            print(*counter.refused, sep="\n")

    ended = in_child(count)
    assert ended.status == 0, ended.stderr
    first, *refused = ended.stdout.strip().split("\n")
    assert first == f"{way} {{0: 0}}"
    better = BEST_FIRST[: BEST_FIRST.index(way)]
    assert [line.partition(":")[0] for line in refused if line] == [each.value for each in better]
    assert all(
        re.search("needs CAP|this kernel lacks|is not installed|no kernel headers", line) for line in refused if line
    )


def test_counting_goes_on_after_the_privileges_are_gone(
    wire: Wire, in_child: Callable[[Callable[[], int | None]], Ended], drop_capabilities: Callable[[], None]
) -> None:
    opened(Way.TRACEPOINT).close()

    def count() -> None:
        counter = open_retransmit_counter(MARKS, ways=[Way.TRACEPOINT])
        wire.retransmit(socket.AF_INET, MARKS.mark(ALICE))
        drop_capabilities()
        print(counter.read()[ALICE] > 0)

    ended = in_child(count)
    assert (ended.status, ended.stdout) == (0, "True\n"), ended.stderr


def test_a_counter_that_is_closed_leaves_nothing_in_the_kernel(network: Network) -> None:
    open_files = sorted(Path("/proc/self/fd").iterdir())
    for way in (*BY_TENANT, Way.PROC):
        with suppress(StateUnknownError), open_retransmit_counter(MARKS, ways=[way]) as counter:
            counter.read()
            counter.close()
    assert sorted(Path("/proc/self/fd").iterdir()) == open_files


def test_readings_within_the_interval_ask_no_socket_again(wire: Wire) -> None:
    clock = FakeClock()
    with open_retransmit_counter(MARKS, ways=[Way.INET_DIAG], clock=clock) as counter:
        alice, _ = wire.retransmit(socket.AF_INET, MARKS.mark(ALICE))
        clock.wait_ns(INTERVAL_NS - 1)
        assert counter.read() == {NO_TENANT: 0}
        assert counter.age_ns == INTERVAL_NS - 1
        clock.wait_ns(1)
        assert counter.read()[ALICE] > 0
        assert counter.age_ns == 0
    assert total_retransmits(alice) > 0


def test_sockets_of_another_namespace_with_the_same_mark_are_not_ours(wire: Wire, counter: RetransmitCounter) -> None:
    with wire.network.in_world():
        elsewhere = opened(counter.way)
    with elsewhere:
        alice, _ = wire.retransmit(socket.AF_INET, MARKS.mark(ALICE))
        settled(counter, {ALICE: [alice]})
        assert elsewhere.read() == {NO_TENANT: 0}
