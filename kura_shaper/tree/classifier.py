"""How packets find their class: one constant classic BPF program for each HTB.

Because a mark is a class id under a mask, the program turns (mark & mask) >> shift
into major:id and never changes when a tenant comes or goes. Packets without a mark
that leave from a gateway port are the failure that this product exists for, so they
are told apart from host traffic:

- with payload (or UDP): `unattributed`, counted and bounded by the node budget;
- TCP segments without payload (SYN-ACK, pure ACK, RST): `gateway`. The kernel sends
  them for a listening socket before any program has seen the connection, so they can
  carry no mark and say nothing about a gateway that forgot to set one.

Everything else without a mark is the host's. So the HTB's default class, `unknown`, gets
what carries a mark that no class has (a tenant that the gateway knows and this node does
not), and everything while there is no filter: it is not held back, but counted apart.

Instruction codes: include/uapi/linux/bpf_common.h and filter.h. cls_bpf takes the
program over netlink, so neither bpf(2) nor a compiler is needed. Loads are relative
to the network header (SKF_NET_OFF), so the device's link layer does not matter.
A kernel without cls_bpf gets one fw filter for each tenant, and flower for the ports: there
the default class is `host`, and segments without payload count as unattributed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.tenants.document import GATEWAY_PORTS_MAX
from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.model import BpfMatch, Filter, FlowerMatch, FwMatch, Handle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.tenants.marks import MarkLayout

ETH_P_ALL, ETH_P_IP, ETH_P_IPV6 = 0x0003, 0x0800, 0x86DD
_HOP_BY_HOP, _TCP, _UDP = 0, 6, 17

MARK_PRIORITY = 100
PORT_PRIORITIES = {ETH_P_IP: 110, ETH_P_IPV6: 111}
OUR_PRIORITIES = frozenset({MARK_PRIORITY, *PORT_PRIORITIES.values()})

_LD_W_ABS, _LD_H_ABS, _LD_B_ABS = 0x20, 0x28, 0x30
_LD_H_IND, _LD_B_IND, _LDX_B_MSH = 0x48, 0x50, 0xB1
_LD_MEM, _ST = 0x60, 0x02
_AND, _OR, _RSH, _SUB_X = 0x54, 0x44, 0x74, 0x1C
_JEQ, _JEQ_X, _JSET = 0x15, 0x1D, 0x45
_RET_K, _RET_A, _TAX = 0x06, 0x16, 0x07
_SKB_PROTOCOL, _SKB_MARK = 0xFFFFF000, 0xFFFFF014  # SKF_AD_OFF + SKF_AD_PROTOCOL, SKF_AD_MARK
_NET = 0xFFF00000  # SKF_NET_OFF
# What a program returns where only its filter's action counts (net/sched/cls_bpf.c).
_MATCH, _NO_MATCH = 0xFFFFFFFF, 0


class ClassifierKind(StrEnum):
    """What turns a packet into a class."""

    BPF = "bpf"
    FW = "fw"


class _Assembler:
    """Classic BPF with names for jump targets. Jumps go forward only, by at most 255."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, str | None, str | None, int]] = []
        self._labels: dict[str, int] = {}

    def emit(self, code: int, k: int = 0, *, then: str | None = None, other: str | None = None) -> None:
        self._lines.append((code, then, other, k))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._lines)

    def assemble(self) -> tuple[tuple[int, int, int, int], ...]:
        return tuple(
            (code, self._distance(at, then), self._distance(at, other), k)
            for at, (code, then, other, k) in enumerate(self._lines)
        )

    def _distance(self, at: int, target: str | None) -> int:
        return 0 if target is None else self._labels[target] - at - 1


def bpf_program(marks: MarkLayout, gateway_ports: Iterable[int], major: int) -> BpfMatch:
    """Return the program that classifies every packet of the HTB with this major.

    Raises UsageError for more than GATEWAY_PORTS_MAX ports.
    """
    host, gateway, unattributed = (
        Handle(major, r).u32 for r in (ReservedClass.HOST, ReservedClass.GATEWAY, ReservedClass.UNATTRIBUTED)
    )
    asm = _Assembler()
    asm.emit(_LD_W_ABS, _SKB_MARK)
    asm.emit(_AND, marks.mask)
    asm.emit(_JEQ, 0, then="unmarked")
    if marks.shift:
        asm.emit(_RSH, marks.shift)
    asm.emit(_OR, major << 16)
    asm.emit(_RET_A)
    _unmarked(asm, gateway_ports, host=host, gateway=gateway, unattributed=unattributed)
    return BpfMatch(asm.assemble())


def hook_program(marks: MarkLayout, gateway_ports: Iterable[int], *, matches_host: bool) -> BpfMatch:
    """Return the program that matches all that is to be shaped, or the rest, which is the host's.

    Raises UsageError for more than GATEWAY_PORTS_MAX ports.
    """
    shaped, host = (_NO_MATCH, _MATCH) if matches_host else (_MATCH, _NO_MATCH)
    asm = _Assembler()
    asm.emit(_LD_W_ABS, _SKB_MARK)
    asm.emit(_AND, marks.mask)
    asm.emit(_JEQ, 0, then="unmarked")
    asm.emit(_RET_K, shaped)
    _unmarked(asm, gateway_ports, host=host, gateway=shaped, unattributed=shaped)
    return BpfMatch(asm.assemble())


def _unmarked(asm: _Assembler, gateway_ports: Iterable[int], *, host: int, gateway: int, unattributed: int) -> None:
    ports = tuple(gateway_ports)
    if len(ports) > GATEWAY_PORTS_MAX:
        remedy = f"keep to {GATEWAY_PORTS_MAX} ports"
        raise UsageError(f"{len(ports)} gateway ports are more than a program can tell apart", remedy=remedy)
    asm.label("unmarked")
    asm.emit(_LD_H_ABS, _SKB_PROTOCOL)
    asm.emit(_JEQ, ETH_P_IP, then="ipv4")
    asm.emit(_JEQ, ETH_P_IPV6, then="ipv6", other="host")
    _ipv4(asm, ports, host)
    _ipv6(asm, ports, host)
    asm.label("host")
    asm.emit(_RET_K, host)
    asm.label("gateway")
    asm.emit(_RET_K, gateway)
    asm.label("unattributed")
    asm.emit(_RET_K, unattributed)


def _ipv4(asm: _Assembler, ports: tuple[int, ...], host: int) -> None:
    asm.label("ipv4")
    asm.emit(_LD_H_ABS, _NET + 6)
    asm.emit(_JSET, 0x1FFF, then="host")  # a later fragment has no ports
    asm.emit(_LDX_B_MSH, _NET)  # X = length of the IP header
    asm.emit(_LD_B_ABS, _NET + 9)
    asm.emit(_JEQ, _TCP, then="tcp4")
    asm.emit(_JEQ, _UDP, other="host")
    asm.emit(_LD_H_IND, _NET)
    _match_ports(asm, ports, found="unattributed", host=host)
    asm.label("tcp4")
    asm.emit(_LD_H_IND, _NET)
    _match_ports(asm, ports, found="payload4", host=host)
    asm.label("payload4")
    asm.emit(_LD_B_IND, _NET + 12)
    asm.emit(_AND, 0xF0)
    asm.emit(_RSH, 2)
    asm.emit(_ST, 0)  # M[0] = length of the TCP header
    asm.emit(_LD_H_ABS, _NET + 2)
    asm.emit(_SUB_X)
    asm.emit(_ST, 1)  # M[1] = total length - IP header
    asm.emit(_LD_MEM, 0)
    asm.emit(_TAX)
    asm.emit(_LD_MEM, 1)
    asm.emit(_JEQ_X, then="gateway", other="unattributed")


def _ipv6(asm: _Assembler, ports: tuple[int, ...], host: int) -> None:
    """With one extension header: the kernel's own, before a segment of more than 64 KiB (BIG TCP)."""
    asm.label("ipv6")
    asm.emit(_LD_B_ABS, _NET + 6)
    asm.emit(_JEQ, _TCP, then="tcp6")
    asm.emit(_JEQ, _HOP_BY_HOP, then="jumbo6")
    asm.emit(_JEQ, _UDP, other="host")
    asm.emit(_LD_H_ABS, _NET + 40)
    _match_ports(asm, ports, found="unattributed", host=host)
    asm.label("jumbo6")
    asm.emit(_LD_B_ABS, _NET + 40)
    asm.emit(_JEQ, _TCP, other="host")
    asm.emit(_LD_H_ABS, _NET + 48)
    _match_ports(asm, ports, found="unattributed", host=host)
    asm.label("tcp6")
    asm.emit(_LD_H_ABS, _NET + 40)
    _match_ports(asm, ports, found="payload6", host=host)
    asm.label("payload6")
    asm.emit(_LD_B_ABS, _NET + 52)
    asm.emit(_AND, 0xF0)
    asm.emit(_RSH, 2)
    asm.emit(_TAX)
    asm.emit(_LD_H_ABS, _NET + 4)
    asm.emit(_JEQ_X, then="gateway", other="unattributed")


def _match_ports(asm: _Assembler, ports: tuple[int, ...], *, found: str, host: int) -> None:
    for port in ports:
        asm.emit(_JEQ, port, then=found)
    asm.emit(_RET_K, host)


def filters(
    kind: ClassifierKind, marks: MarkLayout, *, gateway_ports: Iterable[int], class_ids: Iterable[int], root: Handle
) -> tuple[Filter, ...]:
    """Return the filters on an HTB: one program, or one fw filter a class and flower for ports."""
    if kind is ClassifierKind.BPF:
        program = bpf_program(marks, gateway_ports, root.major)
        return (Filter(root, MARK_PRIORITY, ETH_P_ALL, 1, program),)
    return (*_fw_filters(marks, class_ids, root), *_port_filters(gateway_ports, root))


def _fw_filters(marks: MarkLayout, class_ids: Iterable[int], root: Handle) -> Iterable[Filter]:
    for class_id in (ReservedClass.GATEWAY, *class_ids):
        mark = marks.mark(class_id)
        match = FwMatch(mark, marks.mask, Handle(root.major, class_id))
        yield Filter(root, MARK_PRIORITY, ETH_P_ALL, mark, match)


def _port_filters(gateway_ports: Iterable[int], root: Handle) -> Iterable[Filter]:
    classid = Handle(root.major, ReservedClass.UNATTRIBUTED)
    ports = tuple(gateway_ports)
    for ethertype, priority in PORT_PRIORITIES.items():
        matches = [FlowerMatch(ethertype, protocol, port, classid) for port in ports for protocol in (_TCP, _UDP)]
        for number, match in enumerate(matches, start=1):
            yield Filter(root, priority, ethertype, number, match)
