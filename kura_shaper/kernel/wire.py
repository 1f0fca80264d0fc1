"""Traffic-control messages as bytes: a lean encoder for what we send, and the primitives to read.

The general library spends 1.2 ms a class on rate tables that kernels since 3.8 do not
read once the rate says its link layer; packing by hand takes a few microseconds. What
is encoded here is exact: 64-bit rates, bucket ticks as they are, every field explicit.

Layouts: include/uapi/linux/{netlink,rtnetlink,pkt_sched,pkt_cls}.h, in host byte order.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING

from kura_shaper.errors import UsageError
from kura_shaper.tree.model import (
    HOOK,
    Bfifo,
    BpfMatch,
    DirectBpf,
    FlowerMatch,
    Fq,
    FqCodel,
    FwMatch,
    Handle,
    HtbQdisc,
    Leaf,
    OtherMatch,
    OtherQdisc,
)
from kura_shaper.tree.operations import (
    AddClass,
    AddHook,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteHook,
    DeleteLeaf,
    DeleteRoot,
    RemoveTcx,
    RestoreQdisc,
    SetFilter,
    SetLeaf,
    SetQueue,
    SetTcx,
    SetXps,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.tree.model import Filter, HtbClass, MqQdisc, QueueMapping
    from kura_shaper.tree.operations import Operation


class Message(IntEnum):
    """rtnetlink message types."""

    NEWQDISC, DELQDISC, GETQDISC = 36, 37, 38
    NEWTCLASS, DELTCLASS, GETTCLASS = 40, 41, 42
    NEWTFILTER, DELTFILTER, GETTFILTER = 44, 45, 46


class Flags(IntFlag):
    """nlmsg_flags of a request."""

    REQUEST = 0x001
    ACK = 0x004
    ECHO = 0x008
    DUMP = 0x300
    REPLACE = 0x100
    EXCL = 0x200
    CREATE = 0x400


NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_DUMP_INTR, NLM_F_ACK_TLVS = 0x10, 0x200

HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
FLAGS_AT, SEQUENCE_AT = 6, 8
TCMSG = struct.Struct("=BxxxiIII")  # family, ifindex, handle, parent, info
ATTRIBUTE = struct.Struct("=HH")  # length with this header, type

TCA_KIND, TCA_OPTIONS, TCA_XSTATS, TCA_STATS2, TCA_STAB, TCA_CHAIN = 1, 2, 4, 7, 8, 11
HTB_PARMS, HTB_INIT, HTB_DIRECT_QLEN, HTB_RATE64, HTB_CEIL64 = 1, 2, 5, 6, 7
# cell log, link layer, overhead, cell align, mpu, rate in bytes a second; twice, then
# buffer ticks, cbuffer ticks, quantum, level, prio
_HTB_OPT = "BBHhHI BBHhHI IIIII"
HTB_OPT = struct.Struct(f"={_HTB_OPT}")
HTB_GLOB = struct.Struct("=IIIII")  # version, rate2quantum, default, debug, direct packets
LINKLAYER_ETHERNET = 1
_HTB_VERSION, _R2Q = 3, 10

FQ_CODEL = {"target_us": 1, "limit_packets": 2, "interval_us": 3, "ecn": 4, "flows": 5, "quantum_bytes": 6}
FQ_CODEL_CE_THRESHOLD, FQ_CODEL_DROP_BATCH, FQ_CODEL_MEMORY_LIMIT = 7, 8, 9
FQ = {"limit_packets": 1, "flow_limit_packets": 2, "quantum_bytes": 3, "initial_quantum_bytes": 4, "horizon_us": 14}
FQ_HORIZON_DROP = 15
FQ_MAX_RATE, NO_RATE = 7, 0xFFFFFFFF

BPF_ACTION, BPF_OPS_LEN, BPF_OPS, BPF_FD, BPF_NAME, BPF_FLAGS = 1, 4, 5, 6, 7, 8
_BPF_DIRECT = 1
# What a filter of ours is shown with: the program and whether hardware has it, no action, no flag.
BPF_PLAIN = frozenset({BPF_OPS_LEN, BPF_OPS, 9})
BPF_DIRECT_PLAIN = frozenset({BPF_NAME, BPF_FLAGS, 9, 10, 11})
BPF_INSTRUCTION = struct.Struct("=HBBI")
FW_CLASSID, FW_ACTION, FW_MASK = 1, 4, 5
FW_PLAIN = frozenset({FW_CLASSID, FW_MASK})
ACT_KIND, ACT_OPTIONS, ACT_STATS = 1, 2, 4
SKBEDIT_PARMS, SKBEDIT_QUEUE_MAPPING, SKBEDIT_FLAGS, SKBEDIT_QUEUE_MAPPING_MAX = 2, 4, 9, 10
# What skbedit shows beside these would change more than the queue: priority, mark, packet type, mask.
SKBEDIT_MORE = frozenset({3, 5, 7, 8})
SKBEDIT_GEN = struct.Struct("=IIiii")  # index, capab, what follows, references
SKBEDIT_SPREAD_BY_HASH = 0x40
# The verdict that lets the chain go on, for what others hang there (include/uapi/linux/pkt_cls.h).
TC_ACT_UNSPEC = -1
FLOWER_CLASSID, FLOWER_ETH_TYPE, FLOWER_IP_PROTO = 1, 8, 9
FLOWER_PORTS = {6: 18, 17: 20}  # TCP_SRC, UDP_SRC
# An action, an input device, or a key beside the ones above.
FLOWER_NARROWER = frozenset({*range(2, 8), *range(10, 18), 19, 21, *range(23, 35)})

_U16, _U32, _U64 = struct.Struct("=H"), struct.Struct("=I"), struct.Struct("=Q")
_U32_ATTRIBUTE = struct.Struct("=HHI")  # length, type, value
# A whole message up to its body, and a class up to its 64-bit rates: a tree has thousands of them.
_REQUEST = struct.Struct("=IHHII BxxxiIII")
_CLASS = struct.Struct(f"=IHHII BxxxiIII HH4s HH HH {_HTB_OPT}")
# Plain numbers, since operators of an IntFlag cost as much as packing a message.
_REQUEST_FLAGS = int(Flags.REQUEST)
_ADD = int(Flags.REQUEST | Flags.CREATE | Flags.EXCL)
_REPLACE = int(Flags.REQUEST | Flags.CREATE | Flags.REPLACE)
_U32_MAX = 0xFFFFFFFF


def attribute(kind: int, payload: bytes) -> bytes:
    """Return one netlink attribute, padded to four bytes."""
    length = ATTRIBUTE.size + len(payload)
    return ATTRIBUTE.pack(length, kind) + payload + b"\0" * (-length & 3)


def spans(data: memoryview | bytes, start: int, end: int) -> dict[int, tuple[int, int]]:
    """Return (first byte, end) of attributes by type; the last of a type counts, a malformed rest ends the walk.

    Flags in the type's two highest bits (nested, byte order) are masked away.
    """
    found = {}
    unpack = ATTRIBUTE.unpack_from
    while start + 4 <= end:
        length, kind = unpack(data, start)
        if length < 4 or start + length > end:
            break
        found[kind & 0x3FFF] = (start + 4, start + length)
        start += (length + 3) & ~3
    return found


def messages(data: memoryview) -> Iterator[int]:
    """Yield where each message of a datagram begins; a malformed rest ends the walk."""
    at = 0
    while at + HEADER.size <= len(data):
        (length,) = _U32.unpack_from(data, at)
        if length < HEADER.size or at + length > len(data):
            return
        yield at
        at += (length + 3) & ~3


def message(kind: Message, flags: int, *, ifindex: int, handle: int, parent: int, info: int, body: bytes) -> bytes:
    """Return a request with sequence number 0; the client numbers it when it sends."""
    return _REQUEST.pack(_REQUEST.size + len(body), kind, flags, 0, 0, 0, ifindex, handle, parent, info) + body


def dump_request(kind: Message, ifindex: int = 0, parent: int = 0) -> bytes:
    """Return a request for all objects of a kind."""
    return message(kind, Flags.REQUEST | Flags.DUMP, ifindex=ifindex, handle=0, parent=parent, info=0, body=b"")


def class_request(ifindex: int, classid: Handle) -> bytes:
    """Return a request for one class with its counters.

    Without ECHO the kernel tells everybody who listens for changes, and not who asked (nlmsg_notify).
    """
    flags = Flags.REQUEST | Flags.ECHO
    return message(Message.GETTCLASS, flags, ifindex=ifindex, handle=classid.u32, parent=0, info=0, body=b"")


def encode(operation: Operation, ifindex: int, *, program_fd: int = -1) -> bytes:
    """Return the message that carries out an operation on a device.

    program_fd is the loaded program of a filter of eBPF. Raises UsageError for what netlink does not do.
    """
    match operation:
        # The most frequent first: each case costs a look.
        case AddClass(spec):
            return _htb_class(spec, _ADD, ifindex)
        case SetLeaf(leaf, _, in_place):
            options = attribute(TCA_OPTIONS, _leaf_options(leaf, in_place=in_place))
            return _qdisc(leaf.handle, leaf.parent, leaf.parameters.kind, options, ifindex)
        case ChangeClass(spec):
            # Without CREATE: changing a class that is gone must fail, not make one.
            return _htb_class(spec, _REQUEST_FLAGS, ifindex)
        case DeleteClass(classid):
            return _delete(Message.DELTCLASS, ifindex, classid.u32, 0)
        case SetFilter(filter_):
            return _filter(filter_, Message.NEWTFILTER, _REPLACE, ifindex, program_fd)
        case DeleteFilter(filter_):
            return _filter(filter_, Message.DELTFILTER, _REQUEST_FLAGS, ifindex)
        case AddRoot(qdisc):
            return _own_qdisc(qdisc, ifindex)
        case SetQueue(qdisc):
            return _own_qdisc(qdisc, ifindex)
        case AddHook():
            return _qdisc(Handle(HOOK.major), HOOK, "clsact", b"", ifindex)
        case DeleteHook():
            return _delete(Message.DELQDISC, ifindex, Handle(HOOK.major).u32, HOOK.u32)
        case RestoreQdisc(qdisc):
            return _qdisc(qdisc.handle, qdisc.parent, qdisc.kind, _verbatim(qdisc), ifindex)
        case DeleteRoot(handle):
            return _delete(Message.DELQDISC, ifindex, handle.u32, _U32_MAX)
        case DeleteLeaf(parent, handle):
            return _delete(Message.DELQDISC, ifindex, handle.u32, parent.u32)
        case SetTcx() | RemoveTcx() | SetXps():
            raise UsageError(f"{operation.describe()} is no matter of netlink", remedy="report this as a fault")


def _delete(kind: Message, ifindex: int, handle: int, parent: int) -> bytes:
    return message(kind, _REQUEST_FLAGS, ifindex=ifindex, handle=handle, parent=parent, info=0, body=b"")


def _qdisc(handle: Handle, parent: Handle, kind: str, options: bytes, ifindex: int) -> bytes:
    return message(
        Message.NEWQDISC,
        _REPLACE,
        ifindex=ifindex,
        handle=handle.u32,
        parent=parent.u32,
        info=0,
        body=attribute(TCA_KIND, kind.encode() + b"\0") + options,
    )


def _own_qdisc(qdisc: HtbQdisc | MqQdisc | Leaf, ifindex: int) -> bytes:
    if isinstance(qdisc, Leaf):
        options = attribute(TCA_OPTIONS, _leaf_options(qdisc, in_place=False))
        return _qdisc(qdisc.handle, qdisc.parent, qdisc.parameters.kind, options, ifindex)
    options = _htb_qdisc_options(qdisc) if isinstance(qdisc, HtbQdisc) else b""
    return _qdisc(qdisc.handle, qdisc.parent, qdisc.kind, options, ifindex)


def _verbatim(qdisc: OtherQdisc) -> bytes:
    return attribute(TCA_OPTIONS, qdisc.options) if qdisc.options else b""


def _htb_qdisc_options(qdisc: HtbQdisc) -> bytes:
    init = HTB_GLOB.pack(_HTB_VERSION, _R2Q, qdisc.default_minor, 0, 0)
    return attribute(
        TCA_OPTIONS,
        attribute(HTB_INIT, init) + attribute(HTB_DIRECT_QLEN, _U32.pack(qdisc.direct_qlen_packets)),
    )


def _htb_class(spec: HtbClass, flags: int, ifindex: int) -> bytes:
    floor, ceil = spec.floor.bytes_per_second, spec.ceil.bytes_per_second
    rates64 = b""
    # The kernel takes the larger of both fields, so the 64-bit one goes only where it is needed.
    if floor > _U32_MAX:
        rates64 += attribute(HTB_RATE64, _U64.pack(floor))
    if ceil > _U32_MAX:
        rates64 += attribute(HTB_CEIL64, _U64.pack(ceil))
    parms = ATTRIBUTE.size + HTB_OPT.size
    return (
        _CLASS.pack(
            *(_CLASS.size + len(rates64), Message.NEWTCLASS, flags, 0, 0),
            *(0, ifindex, spec.classid.u32, spec.parent.u32, 0),
            *(8, TCA_KIND, b"htb\0"),
            *(ATTRIBUTE.size + parms + len(rates64), TCA_OPTIONS),
            *(parms, HTB_PARMS),
            *(0, LINKLAYER_ETHERNET, 0, 0, 0, min(floor, _U32_MAX)),
            *(0, LINKLAYER_ETHERNET, 0, 0, 0, min(ceil, _U32_MAX)),
            *(spec.burst_ticks, spec.cburst_ticks, spec.quantum_bytes, 0, spec.prio),
        )
        + rates64
    )


def _leaf_options(leaf: Leaf, *, in_place: bool) -> bytes:
    match leaf.parameters:
        case Bfifo(limit_bytes):
            return _U32.pack(limit_bytes)
        case FqCodel() as p:
            # The number of flows can be chosen only once (net/sched/sch_fq_codel.c).
            fields = {name: kind for name, kind in FQ_CODEL.items() if not (in_place and name == "flows")}
            return _u32_attributes(p, fields) + attribute(FQ_CODEL_MEMORY_LIMIT, _U32.pack(p.memory_limit_bytes))
        case Fq() as p:
            return _u32_attributes(p, FQ) + attribute(FQ_HORIZON_DROP, bytes([p.horizon_drop]))


def _u32_attributes(parameters: FqCodel | Fq, fields: dict[str, int]) -> bytes:
    return b"".join([_U32_ATTRIBUTE.pack(8, kind, getattr(parameters, name)) for name, kind in fields.items()])


def _filter(filter_: Filter, kind: Message, flags: int, ifindex: int, program_fd: int = -1) -> bytes:
    name, options = _match(filter_, program_fd)
    body = attribute(TCA_KIND, name.encode() + b"\0")
    if kind is Message.NEWTFILTER:
        body += attribute(TCA_OPTIONS, options)
    return message(
        kind,
        flags,
        ifindex=ifindex,
        handle=filter_.handle,
        parent=filter_.parent.u32,
        info=filter_.priority << 16 | socket.htons(filter_.ethertype),
        body=body,
    )


def _match(filter_: Filter, program_fd: int) -> tuple[str, bytes]:
    match filter_.match:
        case BpfMatch(instructions):
            ops = b"".join(BPF_INSTRUCTION.pack(*i) for i in instructions)
            match = attribute(BPF_OPS_LEN, _U16.pack(len(instructions))) + attribute(BPF_OPS, ops)
            return "bpf", match + _action(BPF_ACTION, filter_.action)
        case DirectBpf(name):
            # A program by its descriptor: 32 bits, which the kernel reads at once and does not keep.
            fields = attribute(BPF_FD, struct.pack("=i", program_fd)) + attribute(BPF_NAME, name.encode() + b"\0")
            return "bpf", fields + attribute(BPF_FLAGS, _U32.pack(_BPF_DIRECT))
        case FwMatch(_, mask, classid):
            to = attribute(FW_CLASSID, _U32.pack(classid.u32)) if classid else b""
            return "fw", to + _action(FW_ACTION, filter_.action) + attribute(FW_MASK, _U32.pack(mask))
        case FlowerMatch(ethertype, protocol, port, classid):
            return "flower", (
                attribute(FLOWER_CLASSID, _U32.pack(classid.u32))
                + attribute(FLOWER_ETH_TYPE, struct.pack("!H", ethertype))
                + attribute(FLOWER_IP_PROTO, bytes([protocol]))
                + attribute(FLOWER_PORTS[protocol], struct.pack("!H", port))
            )
        case OtherMatch(kind):
            return kind, b""


def _action(kind: int, action: QueueMapping | None) -> bytes:
    """Return a filter's list of one action (include/uapi/linux/tc_act/tc_skbedit.h)."""
    if action is None:
        return b""
    options = attribute(SKBEDIT_PARMS, SKBEDIT_GEN.pack(0, 0, TC_ACT_UNSPEC, 0, 0))
    options += attribute(SKBEDIT_QUEUE_MAPPING, _U16.pack(action.first))
    if action.last is not None:
        options += attribute(SKBEDIT_QUEUE_MAPPING_MAX, _U16.pack(action.last))
        options += attribute(SKBEDIT_FLAGS, _U64.pack(SKBEDIT_SPREAD_BY_HASH))
    one = attribute(ACT_KIND, b"skbedit\0") + attribute(ACT_OPTIONS, options)
    return attribute(kind, attribute(1, one))


def error_of(data: memoryview, start: int, flags: int) -> tuple[int, str]:
    """Return (errno, the kernel's own words) of an NLMSG_ERROR whose payload begins at start.

    errno 0 is an acknowledgement; it can carry words too, which are warnings.
    """
    (number,) = struct.unpack_from("=i", data, start)
    words = ""
    if flags & NLM_F_ACK_TLVS:
        (inner_length,) = _U32.unpack_from(data, start + 4)
        capped = flags & 0x100
        first = start + 4 + (HEADER.size if capped else (inner_length + 3) & ~3)
        begin, end = spans(data, first, len(data)).get(1, (0, 0))
        words = bytes(data[begin:end]).rstrip(b"\0").decode(errors="replace")
    return abs(number) or 0, " ".join(words.split())
