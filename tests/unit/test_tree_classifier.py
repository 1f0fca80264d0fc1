"""Packets run through the classifier program on an interpreter of classic BPF that knows only the standard."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kura_shaper.errors import UsageError
from kura_shaper.tenants.document import GATEWAY_PORTS_MAX
from kura_shaper.tenants.marks import MarkLayout, ReservedClass
from kura_shaper.tree.classifier import OUR_PRIORITIES, ClassifierKind, bpf_program, filters, hook_program
from kura_shaper.tree.model import BpfMatch, Filter, FlowerMatch, FwMatch, Handle

if TYPE_CHECKING:
    from collections.abc import Sequence

IPV4, IPV6, ARP, VLAN = 0x0800, 0x86DD, 0x0806, 0x8100
TCP, UDP, ICMP, SCTP = 6, 17, 1, 132
SYN_ACK, ACK, PUSH, FIN, RST = 0x12, 0x10, 0x18, 0x11, 0x04
HOST, GATEWAY, UNATTRIBUTED = 0x200002, 0x200010, 0x200011
# A load beyond the packet ends the program with 0: the default class.
NO_MATCH = 0

Instruction = tuple[int, int, int, int]


def loaded(packet: bytes, offset: int, size: int, *, mark: int, ethertype: int) -> int | None:
    """What a load finds; None outside the packet. The packet begins at its network header."""
    if offset >= 0xFFFFF000:
        return {0: ethertype, 20: mark}[offset - 0xFFFFF000]
    assert offset >= 0xFFF00000, "a load that depends on the link layer"
    start = offset - 0xFFF00000
    return int.from_bytes(packet[start : start + size], "big") if start + size <= len(packet) else None


def run(program: Sequence[Instruction], packet: bytes, *, mark: int = 0, ethertype: int = IPV4) -> int:
    """Run a program of classic BPF (McCanne and Jacobson 1993, linux/bpf_common.h) and return what it returns."""
    a = x = at = 0
    memory: dict[int, int] = {}
    while True:
        code, if_true, if_false, k = program[at]
        at += 1
        kind, size, operand = code & 0x07, {0x00: 4, 0x08: 2, 0x10: 1}.get(code & 0x18, 0), x if code & 0x08 else k
        match kind, code & 0xE0, code & 0xF0:
            case 0 | 1, 0x20 | 0x40 | 0xA0 as mode, _:  # ld abs, ld ind, ldx msh
                offset = (k + (x if mode == 0x40 else 0)) & 0xFFFFFFFF
                value = loaded(packet, offset, size, mark=mark, ethertype=ethertype)
                if value is None:
                    return 0
                if kind == 0:
                    a = value
                else:
                    assert mode == 0xA0
                    x = 4 * (value & 0x0F)
            case 0, 0x60, _:  # ld mem
                a = memory[k]
            case 2, _, _:  # st
                memory[k] = a
            case 4, _, operation:  # alu
                results = {0x10: a - operand, 0x40: a | operand, 0x50: a & operand, 0x70: a >> operand}
                a = results[operation] & 0xFFFFFFFF
            case 5, _, 0x10:  # jeq
                at += if_true if a == operand else if_false
            case 5, _, 0x40:  # jset
                at += if_true if a & operand else if_false
            case 6, _, result:  # ret
                return {0x00: k, 0x10: a}[result]
            case 7, _, 0x00:  # tax
                x = a
            case _:
                raise AssertionError(f"instruction {code:#x} is not in this interpreter")


def tcp(source: int, flags: int, payload: bytes = b"", options: bytes = b"") -> bytes:
    offset = (20 + len(options)) // 4 << 4
    return struct.pack("!HHIIBBHHH", source, 50_000, 1, 1, offset, flags, 65_535, 0, 0) + options + payload


def udp(source: int, payload: bytes = b"") -> bytes:
    return struct.pack("!HHHH", source, 50_000, 8 + len(payload), 0) + payload


def ipv4(
    protocol: int, segment: bytes, *, options: bytes = b"", fragment: int = 0, total_bytes: int | None = None
) -> bytes:
    words = 5 + len(options) // 4
    total = 4 * words + len(segment) if total_bytes is None else total_bytes
    addresses = bytes((10, 0, 0, 1, 10, 0, 0, 2))
    return (
        struct.pack("!BBHHHBBH", 0x40 | words, 0, total, 7, fragment, 64, protocol, 0) + addresses + options + segment
    )


def ipv6(protocol: int, segment: bytes, *, payload_bytes: int | None = None) -> bytes:
    length = len(segment) if payload_bytes is None else payload_bytes
    return struct.pack("!IHBB", 6 << 28 | 0xABCDE, length, protocol, 64) + bytes(range(32)) + segment


def program(*ports: int, mask: int = 0xFFFF0000) -> tuple[Instruction, ...]:
    return bpf_program(MarkLayout(mask), ports, 0x20).instructions


TIMESTAMPS = bytes((1, 1, 8, 10)) + bytes(8)
ROUTER_ALERT = bytes((148, 4, 0, 0))
JUMBO = struct.pack("!BBBBI", TCP, 0, 0xC2, 4, 70_032)
TLS = b"\x17\x03\x03\x00\x10" + bytes(16)

CASES = {
    "payload from a gateway port": (IPV4, ipv4(TCP, tcp(443, PUSH, TLS)), UNATTRIBUTED),
    "payload from the last gateway port": (IPV4, ipv4(TCP, tcp(7443, PUSH, TLS)), UNATTRIBUTED),
    "one byte of payload": (IPV4, ipv4(TCP, tcp(443, PUSH, b"x")), UNATTRIBUTED),
    "payload behind TCP options": (IPV4, ipv4(TCP, tcp(443, PUSH, TLS, TIMESTAMPS)), UNATTRIBUTED),
    "payload behind IP options": (IPV4, ipv4(TCP, tcp(443, PUSH, TLS), options=ROUTER_ALERT * 3), UNATTRIBUTED),
    "payload behind the longest headers": (
        IPV4,
        ipv4(TCP, tcp(443, PUSH, TLS, bytes(40)), options=bytes(40)),
        UNATTRIBUTED,
    ),
    "a segment of 64 KiB": (IPV4, ipv4(TCP, tcp(443, PUSH, bytes(65_495))), UNATTRIBUTED),
    "a segment too large for its length field": (
        IPV4,
        ipv4(TCP, tcp(443, PUSH, bytes(70_000)), total_bytes=0),
        UNATTRIBUTED,
    ),
    "the first fragment": (IPV4, ipv4(TCP, tcp(443, PUSH, TLS), fragment=0x2000), UNATTRIBUTED),
    "payload that may not be fragmented": (IPV4, ipv4(TCP, tcp(443, PUSH, TLS), fragment=0x4000), UNATTRIBUTED),
    "a SYN-ACK": (IPV4, ipv4(TCP, tcp(443, SYN_ACK, options=TIMESTAMPS)), GATEWAY),
    "a pure ACK": (IPV4, ipv4(TCP, tcp(443, ACK)), GATEWAY),
    "a pure ACK with TCP options": (IPV4, ipv4(TCP, tcp(7443, ACK, options=TIMESTAMPS)), GATEWAY),
    "a pure ACK with IP options": (IPV4, ipv4(TCP, tcp(443, ACK), options=ROUTER_ALERT), GATEWAY),
    "a FIN": (IPV4, ipv4(TCP, tcp(443, FIN)), GATEWAY),
    "a RST": (IPV4, ipv4(TCP, tcp(443, RST)), GATEWAY),
    "a datagram from a gateway port": (IPV4, ipv4(UDP, udp(443, TLS)), UNATTRIBUTED),
    "an empty datagram": (IPV4, ipv4(UDP, udp(7443)), UNATTRIBUTED),
    "a datagram behind IP options": (IPV4, ipv4(UDP, udp(443, TLS), options=ROUTER_ALERT), UNATTRIBUTED),
    "payload from another port": (IPV4, ipv4(TCP, tcp(22, PUSH, TLS)), HOST),
    "payload from a port that looks alike": (IPV4, ipv4(TCP, tcp(444, PUSH, TLS)), HOST),
    "payload to a gateway port": (IPV4, ipv4(TCP, struct.pack("!HH", 50_000, 443) + tcp(0, PUSH, TLS)[4:]), HOST),
    "a datagram from another port": (IPV4, ipv4(UDP, udp(53, TLS)), HOST),
    "a later fragment that looks like a gateway port": (IPV4, ipv4(TCP, tcp(443, PUSH, TLS), fragment=0x2001), HOST),
    "a fragment from far behind": (IPV4, ipv4(TCP, tcp(443, PUSH, TLS), fragment=0x3000), HOST),
    "the last fragment": (IPV4, ipv4(UDP, udp(443, TLS), fragment=0x00B9), HOST),
    "a ping": (IPV4, ipv4(ICMP, b"\x01\xbb" + TLS), HOST),
    "another transport": (IPV4, ipv4(SCTP, b"\x01\xbb" + TLS), HOST),
    "a packet that ends in its IP header": (IPV4, ipv4(TCP, b"")[:8], NO_MATCH),
    "a packet that ends before its ports": (IPV4, ipv4(TCP, b""), NO_MATCH),
    "a packet that ends in its TCP header": (IPV4, ipv4(TCP, tcp(443, PUSH)[:8]), NO_MATCH),
    "IPv6 payload": (IPV6, ipv6(TCP, tcp(443, PUSH, TLS)), UNATTRIBUTED),
    "IPv6 payload behind TCP options": (IPV6, ipv6(TCP, tcp(7443, PUSH, b"x", TIMESTAMPS)), UNATTRIBUTED),
    "IPv6 payload too large for its length field": (
        IPV6,
        ipv6(TCP, tcp(443, PUSH, bytes(70_000)), payload_bytes=0),
        UNATTRIBUTED,
    ),
    "an IPv6 segment of more than 64 KiB": (
        IPV6,
        ipv6(0, JUMBO + tcp(443, PUSH, bytes(70_000), TIMESTAMPS), payload_bytes=0),
        UNATTRIBUTED,
    ),
    "such a segment from another port": (IPV6, ipv6(0, JUMBO + tcp(22, PUSH, bytes(70_000)), payload_bytes=0), HOST),
    "a multicast listener report": (IPV6, ipv6(0, b"\x3a\x00\x05\x02" + bytes(4) + b"\x01\xbb" + TLS), HOST),
    "an IPv6 SYN-ACK": (IPV6, ipv6(TCP, tcp(443, SYN_ACK, options=TIMESTAMPS)), GATEWAY),
    "an IPv6 pure ACK": (IPV6, ipv6(TCP, tcp(443, ACK)), GATEWAY),
    "an IPv6 datagram": (IPV6, ipv6(UDP, udp(443, TLS)), UNATTRIBUTED),
    "IPv6 payload from another port": (IPV6, ipv6(TCP, tcp(22, PUSH, TLS)), HOST),
    "an IPv6 datagram from another port": (IPV6, ipv6(UDP, udp(53, TLS)), HOST),
    "an IPv6 fragment": (IPV6, ipv6(44, bytes(8) + tcp(443, PUSH, TLS)), HOST),
    "a neighbour solicitation": (IPV6, ipv6(58, b"\x01\xbb" + TLS), HOST),
    "an IPv6 packet that ends before its ports": (IPV6, ipv6(TCP, b""), NO_MATCH),
    "ARP": (ARP, ipv4(TCP, tcp(443, PUSH, TLS)), HOST),
    "a VLAN tag in the packet": (VLAN, ipv4(TCP, tcp(443, PUSH, TLS)), HOST),
    "nothing at all": (0, b"", HOST),
}


@pytest.mark.parametrize("name", CASES)
def test_an_unmarked_packet_is_told_apart_by_port_and_payload(name: str) -> None:
    ethertype, packet, classid = CASES[name]
    assert run(program(443, 7443), packet, ethertype=ethertype) == classid
    # Bits of other software's outside the mask are no mark of ours.
    assert run(program(443, 7443), packet, ethertype=ethertype, mark=0xC000) == classid


@pytest.mark.parametrize("name", CASES)
def test_a_marked_packet_has_the_class_of_its_mark_whatever_it_is(name: str) -> None:
    ethertype, packet, _ = CASES[name]
    for mark in (0x02A70000, 0x02A70C00, 0x02A7FFFF):
        assert run(program(443, 7443), packet, ethertype=ethertype, mark=mark) == 0x2002A7


@pytest.mark.parametrize("name", CASES)
def test_without_gateway_ports_all_unmarked_traffic_is_the_hosts(name: str) -> None:
    ethertype, packet, placed = CASES[name]
    # Only a packet that ends before it can be told what it is matches nothing.
    ends_early = placed == NO_MATCH and "TCP header" not in name
    assert run(program(), packet, ethertype=ethertype) == (NO_MATCH if ends_early else HOST)


# What a program returns where only its filter's action counts: cls_bpf takes the first for "no match".
IS_NOT, IS = 0, 0xFFFFFFFF


@pytest.mark.parametrize("name", CASES)
def test_at_the_hook_a_packet_is_shaped_when_it_is_marked_or_the_gateways_and_else_the_hosts(name: str) -> None:
    ethertype, packet, placed = CASES[name]
    shaped, host = (
        hook_program(MarkLayout(), (443, 7443), matches_host=matches_host).instructions
        for matches_host in (False, True)
    )
    is_shaped = placed in (GATEWAY, UNATTRIBUTED)
    for mark in (0, 0xC000):
        assert run(shaped, packet, ethertype=ethertype, mark=mark) == (IS if is_shaped else IS_NOT)
        assert run(host, packet, ethertype=ethertype, mark=mark) == (IS if placed == HOST else IS_NOT)
    for mark in (0x02A70000, 0x00010C00):
        assert run(shaped, packet, ethertype=ethertype, mark=mark) == IS
        assert run(host, packet, ethertype=ethertype, mark=mark) == IS_NOT


def test_at_the_hook_more_ports_than_a_program_can_tell_apart_are_refused() -> None:
    many = range(1, GATEWAY_PORTS_MAX + 2)
    with pytest.raises(UsageError, match="41 gateway ports are more than a program can tell apart; keep to 40 ports"):
        hook_program(MarkLayout(), many, matches_host=False)


LAYOUTS = st.integers(9, 16).flatmap(
    lambda bits: st.integers(0, 32 - bits).map(lambda low: MarkLayout(((1 << bits) - 1) << low))
)


@settings(deadline=None)
@given(LAYOUTS, st.integers(0, 0xFFFFFFFF), st.integers(1, 0xFFFE), st.lists(st.integers(1, 0xFFFF), max_size=16))
def test_a_mark_is_a_class_id_under_any_mask(marks: MarkLayout, mark: int, major: int, ports: list[int]) -> None:
    classid = run(bpf_program(marks, ports, major).instructions, b"", mark=mark, ethertype=0)
    class_id = (mark & marks.mask) // (marks.mask & -marks.mask)
    assert classid == Handle(major, class_id or ReservedClass.HOST).u32


@settings(deadline=None)
@given(LAYOUTS, st.data())
def test_the_class_of_the_mark_that_the_gateway_sets_is_the_tenants(marks: MarkLayout, data: st.DataObject) -> None:
    class_id = data.draw(st.integers(0x100, marks.class_id_max))
    assert run(bpf_program(marks, [443], 0x20).instructions, b"", mark=marks.mark(class_id)) == 0x200000 | class_id


def test_the_program_begins_as_it_was_measured_on_a_kernel() -> None:
    assert program(443)[:2] == ((32, 0, 0, 4294963220), (84, 0, 0, 4294901760))
    assert program(443)[3:6] == ((116, 0, 0, 16), (68, 0, 0, 0x200000), (22, 0, 0, 0))
    (code, if_true, if_false, k) = program(443)[2]
    assert (code, if_false, k) == (21, 0, 0)
    assert program(443)[3 + if_true] == (40, 0, 0, 4294963200), "an unmarked packet goes on at its ethertype"


def test_a_mask_of_the_lowest_bits_needs_no_shift() -> None:
    assert [instruction[0] for instruction in program(443, mask=0xFFFF)[:5]] == [32, 84, 21, 68, 22]


@pytest.mark.parametrize("count", [*range(17), GATEWAY_PORTS_MAX])
@pytest.mark.parametrize("mask", [0xFFFF0000, 0x0000FFFF])
def test_every_jump_goes_forward_within_the_program_and_the_kernels_limits(count: int, mask: int) -> None:
    instructions = program(*range(1, count + 1), mask=mask)
    assert len(instructions) <= 4096
    for at, (_, if_true, if_false, k) in enumerate(instructions):
        assert 0 <= if_true <= 255
        assert 0 <= if_false <= 255
        assert at + 1 + max(if_true, if_false) < len(instructions) or instructions[at][0] & 7 == 6
        assert 0 <= k <= 0xFFFFFFFF
    assert instructions[-1][0] & 7 == 6, "a program ends with a return"


@pytest.mark.parametrize("count", [1, 2, 16, GATEWAY_PORTS_MAX])
def test_each_of_many_ports_is_found_and_no_other(count: int) -> None:
    ports = range(1_000, 1_000 + count)
    for port in (999, *ports, 1_000 + count):
        known = UNATTRIBUTED if port in ports else HOST
        for packet in (ipv4(TCP, tcp(port, PUSH, TLS)), ipv4(UDP, udp(port))):
            assert run(program(*ports), packet) == known
        for packet in (ipv6(TCP, tcp(port, PUSH, TLS)), ipv6(UDP, udp(port))):
            assert run(program(*ports), packet, ethertype=IPV6) == known


def wanted_filters(kind: ClassifierKind, class_ids: Sequence[int]) -> tuple[Filter, ...]:
    return filters(kind, MarkLayout(), gateway_ports=(443, 7443), class_ids=class_ids, root=Handle(0x20))


def test_one_program_serves_every_tenant_and_never_changes_with_them() -> None:
    (only,) = wanted_filters(ClassifierKind.BPF, [])
    assert (only.priority, only.ethertype, only.handle) == (100, 0x0003, 1)
    assert isinstance(only.match, BpfMatch)
    assert wanted_filters(ClassifierKind.BPF, range(0x100, 0x1000)) == (only,)


def test_without_bpf_each_mark_has_a_filter_of_every_protocol_and_each_port_four() -> None:
    found = wanted_filters(ClassifierKind.FW, [0x2A7])
    assert found[:2] == tuple(
        Filter(Handle(0x20), 100, 0x0003, class_id << 16, FwMatch(class_id << 16, 0xFFFF0000, Handle(0x20, class_id)))
        for class_id in (0x10, 0x2A7)
    )
    assert [(f.priority, f.ethertype, f.handle, f.match) for f in found[2:]] == [
        (priority, ethertype, handle, FlowerMatch(ethertype, protocol, port, Handle(0x20, 0x11)))
        for priority, ethertype in ((110, IPV4), (111, IPV6))
        for handle, (port, protocol) in enumerate([(443, TCP), (443, UDP), (7443, TCP), (7443, UDP)], start=1)
    ]


def test_2000_marks_have_2000_keys_at_priorities_that_are_ours() -> None:
    found = wanted_filters(ClassifierKind.FW, range(0x100, 0x100 + 2_000))
    assert len({f.key for f in found}) == len(found) == 2_001 + 8
    assert {f.priority for f in found} == OUR_PRIORITIES
