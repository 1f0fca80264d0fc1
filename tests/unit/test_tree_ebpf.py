"""Packets run through the steering program on an interpreter of eBPF that knows only the standard."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kura_shaper.errors import UsageError
from kura_shaper.tenants.document import GATEWAY_PORTS_MAX
from kura_shaper.tenants.marks import TENANT_CLASS_MAX, TENANT_CLASS_MIN, MarkLayout, ReservedClass
from kura_shaper.tree.ebpf import OUR_PREFIX, EbpfProgram, TcxProgram, TcxState, steering_program

if TYPE_CHECKING:
    from collections.abc import Mapping

IPV4, IPV6, ARP = 0x0800, 0x86DD, 0x0806
HOP_BY_HOP, ICMP, TCP, UDP, DESTINATION_OPTIONS = 0, 1, 6, 17, 60
MARKS = MarkLayout()
PORTS = (443, 7443)
ACME, GLOBEX, INITECH = 0x2A7, 0x2A8, 0x300
HASH = 0xFEDCBA98
UNTOUCHED = 0
SKB, STACK = 1 << 32, 1 << 33  # where the interpreter keeps a packet's metadata, and the end of the stack


class Packet:
    """One packet as the program sees it: from its network header on."""

    def __init__(self, data: bytes = b"", *, mark: int = 0, ethertype: int = IPV4) -> None:
        self.data = data
        self.fields = {8: mark, 12: UNTOUCHED, 16: int.from_bytes(struct.pack("!H", ethertype), "little")}


def run(program: EbpfProgram, packet: Packet) -> int:
    """Run a program and return the queue mapping that it leaves; the verdict is asserted.

    Registers that a call does not keep are removed, as the verifier has it: reading one fails.
    """
    registers = {1: SKB, 10: STACK}
    stack: dict[int, int] = {}
    returns: list[tuple[int, dict[int, int]]] = []
    at = steps = 0
    while True:
        steps += 1
        code, dst, src, off, imm = program.instructions[at]
        at += 1
        match code:
            case 0xBF:
                registers[dst] = registers[src]
            case 0xB7 | 0xB4:
                registers[dst] = imm & (0xFFFFFFFF if code == 0xB4 else 0xFFFFFFFFFFFFFFFF)
            case 0x07:
                registers[dst] += imm
            case 0x04 | 0x54 | 0x64 | 0x74 | 0x94:
                registers[dst] = alu(code, registers[dst] & 0xFFFFFFFF, imm & 0xFFFFFFFF)
            case 0xDC:
                assert imm == 16
                registers[dst] = int.from_bytes((registers[dst] & 0xFFFF).to_bytes(2, "little"), "big")
            case 0x61 if registers[src] == SKB:
                registers[dst] = packet.fields[off]
            case 0x71 | 0x69:
                start = registers[src] + off
                registers[dst] = int.from_bytes([stack[start + n] for n in range({0x71: 1, 0x69: 2}[code])], "little")
            case 0x63:
                assert (registers[dst], off) == (SKB, 12), "a write to anything but queue_mapping"
                packet.fields[12] = registers[src] & 0xFFFFFFFF
            case 0x05:
                at += off
            case 0x15 | 0x55 | 0x35 | 0xA5 | 0x45:
                at += off if holds(code, registers[dst], imm) else 0
            case 0x85 if src == 1:
                returns.append((at, registers))
                registers = {1: registers[1], 10: registers[10] - 512}
                at += imm
            case 0x85:
                registers[0] = helper(imm, packet, registers, stack)
                registers = {number: value for number, value in registers.items() if number in {0, 6, 7, 8, 9, 10}}
            case 0x95 if returns:
                at, kept = returns.pop()
                registers = {number: value for number, value in kept.items() if number > 5} | {0: registers[0]}
            case 0x95:
                assert registers[0] == 0xFFFFFFFFFFFFFFFF, "the chain would end here"
                assert steps < 100
                return packet.fields[12]
            case _:
                raise AssertionError(f"instruction {code:#x} is not in this interpreter")


def alu(code: int, value: int, operand: int) -> int:
    results = {
        0x04: value + operand,
        0x54: value & operand,
        0x64: value << (operand & 31),
        0x74: value >> (operand & 31),
        0x94: value % (operand or 1),
    }
    return results[code] & 0xFFFFFFFF


def holds(code: int, value: int, operand: int) -> bool:
    return {
        0x15: value == operand,
        0x55: value != operand,
        0x35: value >= operand,
        0xA5: value < operand,
        0x45: bool(value & operand),
    }[code]


def helper(number: int, packet: Packet, registers: Mapping[int, int], stack: dict[int, int]) -> int:
    assert registers[1] == SKB
    if number == 34:
        return HASH
    assert number == 68
    offset, to, size = registers[2], registers[3], registers[4]
    assert registers[5] == 1, "an offset that depends on the link layer"
    assert STACK - 512 <= to <= STACK - size
    found = packet.data[offset : offset + size]
    whole = len(found) == size
    stack.update({to + n: found[n] if whole else 0 for n in range(size)})
    return 0 if whole else 0xFFFFFFFFFFFFFFF2


def ports_of(source: int) -> bytes:
    return struct.pack("!HHI", source, 50_000, 0)


def ipv4(payload: bytes, *, protocol: int = TCP, options: int = 0, fragment: int = 0) -> bytes:
    length = 20 + options
    header = struct.pack("!BBHHHBBH8x", 0x40 | length // 4, 0, length + len(payload), 1, fragment, 64, protocol, 0)
    return header + bytes(options) + payload


def ipv6(payload: bytes, *, protocol: int = TCP) -> bytes:
    return struct.pack("!IHBB32x", 0x60000000, len(payload), protocol, 64) + payload


def hop_by_hop(protocol: int) -> bytes:
    return struct.pack("!BBBBI", protocol, 0, 0xC2, 4, 70_000)


def program(
    placement: Mapping[int, int] | None = None, *, shaped: int = 2, live: int = 4, ports: tuple[int, ...] = PORTS
) -> EbpfProgram:
    return steering_program(MARKS, ports, placement=placement or {}, shaped_queues=shaped, live_queues=live)


def steered(made: EbpfProgram, data: bytes = b"", *, mark: int = 0, ethertype: int = IPV4) -> int:
    return run(made, Packet(data, mark=mark, ethertype=ethertype))


HOST_OF_4 = 1 + 2 + HASH % 2


@pytest.mark.parametrize("queue", [0, 1, 2, 3])
def test_a_queue_is_written_as_its_index_plus_one(queue: int) -> None:
    made = program({ACME: queue}, shaped=4)
    assert steered(made, mark=MARKS.mark(ACME)) == queue + 1


@pytest.mark.parametrize("class_id", [1, ReservedClass.GATEWAY, ACME - 1, ACME + 1, TENANT_CLASS_MAX, 0xFFFF])
def test_a_mark_without_a_place_goes_to_queue_0(class_id: int) -> None:
    for placement in ({}, {ACME: 1}, {ACME: 1, GLOBEX + 5: 1}):
        assert steered(program(placement), mark=MARKS.mark(class_id)) == 1


@pytest.mark.parametrize("mask", [0xFFFF0000, 0x00FFFF00, 0x0000FFFF, 0x7FFF8000, 0x000003FF])
def test_bits_outside_the_mask_do_not_matter(mask: int) -> None:
    marks = MarkLayout(mask)
    made = steering_program(marks, PORTS, placement={ACME: 1, GLOBEX: 2}, shaped_queues=3, live_queues=3)
    others = 0xFFFFFFFF & ~mask
    assert steered(made, mark=marks.mark(ACME) | others) == 2
    assert steered(made, mark=marks.mark(GLOBEX)) == 3
    assert steered(made, b"", mark=others, ethertype=ARP) == UNTOUCHED


def test_ten_thousand_tenants_each_land_on_their_queue() -> None:
    ids = random.Random(1).sample(range(TENANT_CLASS_MIN, TENANT_CLASS_MAX + 1), 10_000)
    placement = {class_id: at % 4 for at, class_id in enumerate(ids)}
    made = program(placement, shaped=4)
    for class_id in range(1, 0x10000):
        assert steered(made, mark=MARKS.mark(class_id)) == placement.get(class_id, 0) + 1


def test_the_worst_placement_fits_the_jumps() -> None:
    placement = {class_id: 1 + class_id % 2 for class_id in range(TENANT_CLASS_MIN, TENANT_CLASS_MAX + 1)}
    made = program(placement, shaped=3)
    assert len(made.encoded) == 8 * len(made.instructions)
    assert len(made.instructions) < 1_000_000  # BPF_COMPLEXITY_LIMIT_INSNS
    for class_id in (1, *random.Random(2).sample(sorted(placement), 1_000), 0xFFFF):
        assert steered(made, mark=MARKS.mark(class_id)) == placement.get(class_id, 0) + 1


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.integers(1, 0xFFFF) | st.integers(0x100, 0x110), st.integers(0, 3), max_size=40),
    st.lists(st.integers(1, 0xFFFF) | st.integers(0xFE, 0x112), max_size=20),
)
def test_every_placement_is_kept(placement: dict[int, int], others: list[int]) -> None:
    made = program(placement, shaped=4)
    for class_id in (*placement, *others):
        assert steered(made, mark=MARKS.mark(class_id)) == placement.get(class_id, 0) + 1


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize(
    ("data", "ethertype"),
    [
        pytest.param(lambda port: ipv4(ports_of(port)), IPV4, id="v4 tcp"),
        pytest.param(lambda port: ipv4(ports_of(port), protocol=UDP), IPV4, id="v4 udp"),
        pytest.param(lambda port: ipv4(ports_of(port), options=40), IPV4, id="v4 with options"),
        pytest.param(lambda port: ipv4(ports_of(port), fragment=0x2000), IPV4, id="v4 first fragment"),
        pytest.param(lambda port: ipv4(ports_of(port), fragment=0x4000), IPV4, id="v4 not to be cut"),
        pytest.param(lambda port: ipv4(ports_of(port)[:2]), IPV4, id="v4 just the port"),
        pytest.param(lambda port: ipv6(ports_of(port)), IPV6, id="v6 tcp"),
        pytest.param(lambda port: ipv6(ports_of(port), protocol=UDP), IPV6, id="v6 udp"),
        pytest.param(
            lambda port: ipv6(hop_by_hop(TCP) + ports_of(port), protocol=HOP_BY_HOP), IPV6, id="v6 of more than 64 KiB"
        ),
    ],
)
def test_unmarked_packets_from_a_gateway_port_go_to_queue_0(port: int, data: object, ethertype: int) -> None:
    assert callable(data)
    for live in (2, 4):
        assert steered(program(live=live), data(port), ethertype=ethertype) == 1
    assert steered(program(), data(port + 1), ethertype=ethertype) == HOST_OF_4


@pytest.mark.parametrize(
    ("data", "ethertype"),
    [
        pytest.param(ipv4(ports_of(443), protocol=ICMP), IPV4, id="v4 icmp"),
        pytest.param(ipv4(ports_of(443), fragment=0x2001), IPV4, id="v4 later fragment"),
        pytest.param(ipv4(ports_of(443), fragment=0x0001), IPV4, id="v4 last fragment"),
        pytest.param(ipv4(ports_of(443))[:21], IPV4, id="v4 half a port"),
        pytest.param(ipv4(ports_of(443))[:19], IPV4, id="v4 short header"),
        pytest.param(b"", IPV4, id="v4 nothing"),
        pytest.param(ipv6(ports_of(443), protocol=ICMP), IPV6, id="v6 other protocol"),
        pytest.param(ipv6(ports_of(443), protocol=DESTINATION_OPTIONS), IPV6, id="v6 other header"),
        pytest.param(ipv6(hop_by_hop(UDP) + ports_of(443), protocol=HOP_BY_HOP), IPV6, id="v6 hop-by-hop udp"),
        pytest.param(ipv6(b"", protocol=HOP_BY_HOP), IPV6, id="v6 hop-by-hop missing"),
        pytest.param(ipv6(ports_of(443))[:41], IPV6, id="v6 half a port"),
        pytest.param(ipv6(b"")[:6], IPV6, id="v6 short header"),
        pytest.param(ipv4(ports_of(443)), ARP, id="arp"),
    ],
)
def test_all_other_unmarked_packets_are_the_hosts(data: bytes, ethertype: int) -> None:
    assert steered(program(), data, ethertype=ethertype) == HOST_OF_4
    assert steered(program(shaped=4), data, ethertype=ethertype) == UNTOUCHED


@pytest.mark.parametrize(("shaped", "live"), [(1, 2), (1, 4), (3, 4), (2, 64)])
def test_the_hosts_flows_stay_off_the_shaped_queues(shaped: int, live: int) -> None:
    written = steered(program(shaped=shaped, live=live), ethertype=ARP)
    assert written == 1 + shaped + HASH % (live - shaped)
    assert shaped <= written - 1 < live


def test_without_gateway_ports_all_unmarked_packets_are_the_hosts() -> None:
    made = program({ACME: 1}, ports=())
    assert steered(made, ipv4(ports_of(443))) == HOST_OF_4
    assert steered(made, mark=MARKS.mark(ACME)) == 2


def test_a_program_is_named_by_what_it_does() -> None:
    made = program({ACME: 1})
    assert made.name.startswith(OUR_PREFIX)
    assert len(made.name) == 15
    assert made.name == program({INITECH: 0, ACME: 1}, ports=PORTS[::-1]).name
    assert len({each.name for each in (made, program(), program({ACME: 1}, live=3), program({GLOBEX: 1}))}) == 4


def test_an_instruction_is_encoded_in_eight_bytes() -> None:
    made = EbpfProgram(((0x63, 6, 0, 12, 0), (0xB7, 0, 0, 0, -1), (0x61, 1, 6, 8, 0)))
    assert made.encoded == bytes.fromhex("63060c0000000000 b7000000ffffffff 6161080000000000")


@pytest.mark.parametrize(
    ("placement", "shaped", "live", "words"),
    [
        ({}, 0, 4, "0 of 4 tx queues can't be shaped"),
        ({}, 5, 4, "5 of 4 tx queues can't be shaped"),
        ({ACME: 2}, 2, 4, "class 0x2a7 is placed on tx queue 2, which is not shaped"),
        ({ACME: -1}, 2, 4, "class 0x2a7 is placed on tx queue -1, which is not shaped"),
        ({0x10000: 1}, 2, 4, "class 0x10000 does not fit mask 0xffff0000"),
    ],
)
def test_what_can_not_be_steered_is_refused(placement: dict[int, int], shaped: int, live: int, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        program(placement, shaped=shaped, live=live)
    assert refused.value.message == words


def test_more_ports_than_the_classifier_takes_are_refused() -> None:
    program(ports=tuple(range(1, GATEWAY_PORTS_MAX + 1)))
    with pytest.raises(UsageError, match="41 gateway ports"):
        program(ports=tuple(range(1, GATEWAY_PORTS_MAX + 2)))


def test_a_chain_is_a_value() -> None:
    ours = TcxProgram(7, "ks_0123456789ab", is_ours=True)
    assert TcxState(supported=True, programs=(ours,)) == TcxState(supported=True, programs=(ours,))
    assert TcxState(supported=False).programs == ()
