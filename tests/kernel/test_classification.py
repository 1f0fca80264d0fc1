"""Which class a packet is counted in, seen by real sockets: by its mark, else by its source port.

Both address families everywhere: a shaper that forgets IPv6 is the oldest fault of the field.
"""

from __future__ import annotations

import random
import socket
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from kernel_traffic import (
    DISCARD_PORT,
    FAMILIES,
    NODE,
    WORLD,
    counted,
    datagram_wire_bytes,
    listener,
    read_when_sent,
    send_datagrams,
    set_mark,
    transfer,
    udp_socket,
    upload,
    warm_up,
)
from kernel_trees import (
    ACME,
    BUDGET,
    GATEWAY,
    GATEWAY_PORT,
    GBIT,
    HOST,
    PEER_PORT,
    UNATTRIBUTED,
    ZETA,
    document,
)

from kura_shaper.tree.build import Capabilities, TreeSettings, build
from kura_shaper.tree.classifier import ClassifierKind
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import Handle, HtbQdisc
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Network

pytestmark = pytest.mark.privileged

OTHER_PORT = 8443
UNKNOWN_ID = 0xFFF
# Neighbours look each other up and routers are asked for now and then; all of it is the host's.
_BACKGROUND_BYTES = 1_000

Spent = dict[Handle, tuple[int, int]]


@pytest.fixture(params=list(ClassifierKind))
def classifier(request: pytest.FixtureRequest, capabilities: Capabilities) -> ClassifierKind:
    kind: ClassifierKind = request.param
    if kind not in capabilities.classifiers:
        pytest.skip(f"this kernel can't classify by {kind}")
    return kind


def put_tree(network: Network, capabilities: Capabilities, classifier: ClassifierKind) -> None:
    only = Capabilities(capabilities.leaves, frozenset({classifier}))
    made = build(document(), network.device, settings=TreeSettings(Rate(10 * GBIT)), capabilities=only)
    refused = network.client().send(plan(made, network.read()).operations, network.device.ifindex)
    assert not any(refused), refused
    warm_up(network)


@pytest.fixture
def spent(network: Network, capabilities: Capabilities, classifier: ClassifierKind) -> Callable[..., Any]:
    """Return a context in which traffic is sent; what each class sent of it is filled in at its end."""
    put_tree(network, capabilities, classifier)

    @contextmanager
    def measuring() -> Iterator[Spent]:
        result: Spent = {}
        before = read_when_sent(network)
        yield result
        after = read_when_sent(network)
        assert after.direct_packets == before.direct_packets, "packets went past every class"
        result.update(counted(before, after))

    return measuring


def without_background(spent: Spent) -> Spent:
    """Leave out a little host traffic, which may always be there."""
    return {c: s for c, s in spent.items() if c != HOST or s[1] > _BACKGROUND_BYTES}


# None: the default class of the HTB, which is for what no class is named for.
MARKS: list[tuple[str, int, Handle | None]] = [
    ("a tenant's", ACME.minor << 16, ACME),
    ("another tenant's", ZETA.minor << 16, ZETA),
    ("a tenant's, beside bits of others", ACME.minor << 16 | 0xFFFF, ACME),
    ("the gateway's own", GATEWAY.minor << 16, GATEWAY),
    ("only bits of others", 0x0000FFFF, HOST),
    ("an id that nobody has", UNKNOWN_ID << 16, None),
    ("the largest id", 0xFFFF << 16, None),
    ("the id of a class with children", BUDGET.minor << 16, None),
    ("the id of the root class", 0x0001 << 16, None),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mark", "named"), [row[1:] for row in MARKS], ids=[row[0] for row in MARKS])
@pytest.mark.case("C8")
@pytest.mark.case("F39")
def test_a_mark_names_the_class(
    network: Network, spent: Callable[..., Any], family: socket.AddressFamily, mark: int, named: Handle | None
) -> None:
    """Case C8."""
    root = network.read().root
    assert isinstance(root, HtbQdisc)
    classid = named or Handle(root.handle.major, root.default_minor)
    with spent() as found:
        send_datagrams(family, mark=mark, payload=1_000, count=10)
    sent = (10, 10 * datagram_wire_bytes(family, 1_000))
    if classid == HOST:
        assert set(found) == {HOST}
        assert sent[1] <= found[HOST][1] <= sent[1] + _BACKGROUND_BYTES
    else:
        assert without_background(found) == {classid: sent}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mark_counts_for_more_than_a_port(spent: Callable[..., Any], family: socket.AddressFamily) -> None:
    with spent() as found:
        send_datagrams(family, mark=ACME.minor << 16, source_port=GATEWAY_PORT)
    assert set(without_background(found)) == {ACME}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("port", "classid"), [(GATEWAY_PORT, UNATTRIBUTED), (PEER_PORT, UNATTRIBUTED), (OTHER_PORT, HOST)]
)
def test_a_datagram_without_a_mark_goes_by_its_source_port(
    spent: Callable[..., Any], family: socket.AddressFamily, port: int, classid: Handle
) -> None:
    with spent() as found:
        send_datagrams(family, source_port=port, payload=1_400, count=3)
    assert set(without_background(found)) == {classid}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_datagram_to_a_gateway_port_is_the_hosts(spent: Callable[..., Any], family: socket.AddressFamily) -> None:
    with spent() as found, udp_socket(family) as made:
        made.sendto(bytes(1_400), (WORLD[family], GATEWAY_PORT))
    assert set(found) == {HOST}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mark", [ACME.minor << 16, 0])
def test_bytes_of_a_tcp_connection_go_by_its_mark(
    network: Network, spent: Callable[..., Any], family: socket.AddressFamily, mark: int
) -> None:
    with spent() as found:
        assert upload(network, family, mark=mark, size=100_000) == 100_000
    classid = ACME if mark else HOST
    assert set(without_background(found)) == {classid}
    assert found[classid][1] > 100_000


# What a gateway does: it listens, and sends. The SYN-ACK, the ACKs and the FIN of a listener
# without a mark carry no payload and no mark, and nobody can be blamed for them.


class Gateway:
    """A connection from the world to a port of the node. `far_end` is in the world."""

    def __init__(self, network: Network, family: socket.AddressFamily, port: int, *, options: bytes = b"") -> None:
        self._accepting = listener(family, NODE[family], port)
        with network.in_world():
            self.far_end = socket.socket(family, socket.SOCK_STREAM)
            self.far_end.settimeout(5)
            self.far_end.connect((NODE[family], port))
        self.near_end, _ = self._accepting.accept()
        if options:
            self.near_end.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, options)

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.near_end, self.far_end, self._accepting):
            each.close()

    def acknowledge(self) -> None:
        """Let the node answer what it received with an ACK, at once and on its own."""
        self.near_end.recv(65_536)
        self.near_end.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def segment_wire_bytes(family: socket.AddressFamily, payload: int, options: bytes) -> int:
    """Return what a TCP segment takes on the wire; its own header has time stamps."""
    return datagram_wire_bytes(family, payload) - 8 + 32 + len(options)


# flower can't tell a segment without payload.
only_bpf = pytest.mark.parametrize("classifier", [ClassifierKind.BPF], indirect=True)
# IPv4 headers grow by options of up to 40 bytes; a gateway's own sockets send no IPv6 extension headers.
headers = pytest.mark.parametrize(
    ("family", "options"),
    [(socket.AF_INET, b""), (socket.AF_INET, b"\1" * 4), (socket.AF_INET, b"\1" * 40), (socket.AF_INET6, b"")],
    ids=["IPv4", "IPv4 with an option", "IPv4 with 40 bytes of options", "IPv6"],
)


@only_bpf
@headers
@pytest.mark.parametrize("port", [GATEWAY_PORT, PEER_PORT])
def test_segments_without_payload_from_a_gateway_port_are_the_gateways(
    network: Network,
    spent: Callable[..., Any],
    family: socket.AddressFamily,
    port: int,
    options: bytes,
) -> None:
    with spent() as found, Gateway(network, family, port, options=options) as gateway:
        gateway.far_end.sendall(bytes(1_000))
        gateway.acknowledge()
        gateway.near_end.shutdown(socket.SHUT_WR)
        assert gateway.far_end.recv(1) == b""
    assert set(without_background(found)) == {GATEWAY}
    packets, size = found[GATEWAY]
    assert packets >= 3  # SYN-ACK, ACK, FIN; what the close of the far end takes; and on a busy machine each again
    # A SYN-ACK has no options yet and a header that is longer by 8, and what the kernel answers for a
    # connection that has ended has none any more; all others show that they have them.
    more = size - packets * segment_wire_bytes(family, 0, options)
    syn_acks, ended = range(1, packets), range(packets - 1)
    assert more in {8 * first - len(options) * (first + last) for first in syn_acks for last in ended}


@pytest.mark.case("F47")
@only_bpf
@headers
@pytest.mark.parametrize("payload", [1, 4, 100, 1_000])
def test_payload_without_a_mark_from_a_gateway_port_is_unattributed(
    network: Network,
    spent: Callable[..., Any],
    family: socket.AddressFamily,
    payload: int,
    options: bytes,
) -> None:
    with Gateway(network, family, GATEWAY_PORT, options=options) as gateway, spent() as found:
        assert transfer(gateway.near_end, gateway.far_end, payload) == payload
    assert set(without_background(found)) == {UNATTRIBUTED}
    assert found[UNATTRIBUTED] == (1, segment_wire_bytes(family, payload, options))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_byte_of_a_gateway_port_without_a_mark_passes_for_the_hosts(
    network: Network, spent: Callable[..., Any], family: socket.AddressFamily
) -> None:
    with spent() as found, Gateway(network, family, GATEWAY_PORT) as gateway:
        assert transfer(gateway.near_end, gateway.far_end, 50_000) == 50_000
    # By flower even the segments without payload are unattributed.
    assert set(without_background(found)) <= {GATEWAY, UNATTRIBUTED}
    assert found[UNATTRIBUTED][1] > 50_000


@only_bpf
@pytest.mark.parametrize("family", FAMILIES)
def test_a_connection_is_the_tenants_from_the_moment_that_it_is_marked(
    network: Network, spent: Callable[..., Any], family: socket.AddressFamily
) -> None:
    with spent() as found, Gateway(network, family, GATEWAY_PORT) as gateway:
        set_mark(gateway.near_end, ACME.minor << 16)
        assert transfer(gateway.near_end, gateway.far_end, 100_000) == 100_000
    assert set(without_background(found)) == {ACME, GATEWAY}
    assert found[ACME][1] > 100_000
    assert found[GATEWAY][1] <= 500


@only_bpf
@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_of_a_closed_gateway_port_is_the_gateways(
    network: Network, spent: Callable[..., Any], family: socket.AddressFamily
) -> None:
    with spent() as found, network.in_world(), socket.socket(family, socket.SOCK_STREAM) as knocking:
        knocking.settimeout(5)
        with pytest.raises(ConnectionRefusedError):
            knocking.connect((NODE[family], GATEWAY_PORT))
    assert {c: packets for c, (packets, _) in without_background(found).items()} == {GATEWAY: 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_listener_with_a_mark_is_the_tenants_from_its_first_packet(
    network: Network, spent: Callable[..., Any], family: socket.AddressFamily
) -> None:
    with listener(family, NODE[family], GATEWAY_PORT) as accepting, spent() as found:
        set_mark(accepting, ACME.minor << 16)
        with network.in_world(), socket.socket(family, socket.SOCK_STREAM) as far_end:
            far_end.settimeout(5)
            far_end.connect((NODE[family], GATEWAY_PORT))
            near_end, _ = accepting.accept()
            with near_end:
                assert transfer(near_end, far_end, 10_000) == 10_000
    assert set(without_background(found)) == {ACME}


# Fragments: only the first has ports, and in IPv6 none has them where the program looks.
FRAGMENTED_BYTES = 4_000
FRAGMENTS: list[tuple[socket.AddressFamily, int, dict[Handle, int]]] = [
    (socket.AF_INET, ACME.minor << 16, {ACME: 3}),
    (socket.AF_INET6, ACME.minor << 16, {ACME: 3}),
    (socket.AF_INET, 0, {UNATTRIBUTED: 1, HOST: 2}),
    (socket.AF_INET6, 0, {HOST: 3}),
]


@only_bpf
@pytest.mark.parametrize(("family", "mark", "packets"), FRAGMENTS)
def test_fragments_keep_the_mark_and_without_one_only_the_first_shows_its_port(
    spent: Callable[..., Any],
    family: socket.AddressFamily,
    mark: int,
    packets: dict[Handle, int],
) -> None:
    with spent() as found:
        send_datagrams(family, mark=mark, source_port=GATEWAY_PORT, payload=FRAGMENTED_BYTES)
    seen = {c: p for c, (p, _) in without_background(found).items()}
    assert seen.keys() == packets.keys()
    assert {c: p for c, p in seen.items() if c != HOST} == {c: p for c, p in packets.items() if c != HOST}
    # The host's own may be among them.
    assert packets.get(HOST, 0) <= seen.get(HOST, 0) <= packets.get(HOST, 0) + 3


@pytest.mark.case("E4")
def test_counters_of_the_classes_add_up_to_what_the_device_sent(network: Network, spent: Callable[..., Any]) -> None:
    """Case E4."""
    chosen = random.Random(7)
    expected: Counter[Handle] = Counter()
    before = network.sent_bytes()
    with spent() as found:
        at_start = network.sent_bytes()
        for _ in range(500):
            family, classid = chosen.choice(FAMILIES), chosen.choice([ACME, ZETA, GATEWAY])
            payload = chosen.randrange(1_400)
            send_datagrams(family, mark=classid.minor << 16, payload=payload)
            expected[classid] += datagram_wire_bytes(family, payload)
        at_end = network.sent_bytes()
    assert {c: size for c, (_, size) in found.items() if c != HOST} == expected
    after = network.sent_bytes()
    # The device is read on either side of the classes: the kernel's own packets may come in between.
    assert at_end - at_start <= sum(size for _, size in found.values()) <= after - before


def test_what_has_no_ports_is_the_hosts(network: Network, spent: Callable[..., Any]) -> None:
    """An echo request, and a packet of no known kind at all."""
    with spent() as found:
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
            raw.sendto(b"\x08\0\xf7\xff\0\0\0\0" + bytes(1_200), (WORLD[socket.AF_INET], DISCARD_PORT))
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x88B5)) as raw:
            raw.bind((network.device.name, 0x88B5))
            raw.send(b"\xff" * 6 + b"\2" * 6 + b"\x88\xb5" + bytes(1_000))
    assert set(found) == {HOST}
    assert found[HOST][0] >= 2
