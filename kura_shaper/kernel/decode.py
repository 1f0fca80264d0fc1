"""One dumped object: the kernel's bytes as a qdisc, a class with its counters, or a filter.

A scrape of 10,000 classes must not take seconds, and from one reading to the next nearly all
of them are what they were. So what a class or a leaf is made of is decoded once and known by
its bytes from then on, and counters are read by a layout that is worked out once for all
messages of a length and checked against each.
"""

from __future__ import annotations

import socket
import struct
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kura_shaper.kernel import wire
from kura_shaper.tree.ebpf import OUR_PREFIX
from kura_shaper.tree.model import (
    ROOT,
    Bfifo,
    BpfMatch,
    DirectBpf,
    Filter,
    FlowerMatch,
    Fq,
    FqCodel,
    FwMatch,
    Handle,
    HtbClass,
    HtbQdisc,
    Leaf,
    OtherMatch,
    OtherQdisc,
    QueueMapping,
)
from kura_shaper.tree.snapshot import ClassCounters
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

_U16, _U32, _U64 = struct.Struct("=H"), struct.Struct("=I"), struct.Struct("=Q")
_BASIC = struct.Struct("=QI")  # bytes, packets (which wrap)
_QUEUE = struct.Struct("=IIIII")  # qlen, backlog, drops, requeues, overlimits
_HTB_XSTATS = struct.Struct("=III")  # lends, borrows, giants
_STATS_BASIC, _STATS_QUEUE, _STATS_PKT64 = 1, 3, 8
# codel keeps times in units of 1024 ns, so what was set as 5000 us reads back as 4999.
_CODEL_UNIT_NS = 1024
# What the kernel shows for one that was not chosen; before 4.8 it showed none.
_DROP_BATCHES = (0, 64)


class Object(NamedTuple):
    """The head of one dumped object and where its attributes lie."""

    ifindex: int
    handle: int
    parent: int
    info: int
    found: dict[int, tuple[int, int]]


def object_of(data: memoryview, start: int, end: int) -> Object:
    """Return the object whose tcmsg begins at start."""
    _, ifindex, handle, parent, info = wire.TCMSG.unpack_from(data, start)
    return Object(ifindex, handle, parent, info, wire.spans(data, start + wire.TCMSG.size, end))


# Among thousands of classes the same few kinds, rates and leaves come again and again, and from one
# reading to the next the same handles.
_handle = lru_cache(maxsize=1 << 17)(Handle.from_u32)
_rate = lru_cache(maxsize=1 << 12)(Rate.from_bytes_per_second)


@lru_cache(maxsize=64)
def _decoded(name: bytes) -> str:
    return name.rstrip(b"\0").decode("ascii", "replace")


def _text(data: memoryview, span: tuple[int, int]) -> str:
    return _decoded(bytes(data[span[0] : span[1]]))


def _u32(data: memoryview | bytes, found: dict[int, tuple[int, int]], kind: int) -> int:
    span = found.get(kind)
    return _U32.unpack_from(data, span[0])[0] if span and span[1] - span[0] >= _U32.size else 0


class Qdisc(NamedTuple):
    """One qdisc: as the kernel's own bytes, and as what it is where it hangs below a class or a queue."""

    verbatim: OtherQdisc
    leaf: Leaf | OtherQdisc


def qdisc_of(data: memoryview, start: int, end: int) -> Qdisc | None:
    """Return the qdisc whose tcmsg begins at start; None when it has no kind."""
    _, _, handle, parent, _ = wire.TCMSG.unpack_from(data, start)
    at, kind, options = start + wire.TCMSG.size, b"", b""
    while at + wire.ATTRIBUTE.size <= end:
        length, number = wire.ATTRIBUTE.unpack_from(data, at)
        if length < wire.ATTRIBUTE.size or at + length > end:
            break
        number &= 0x3FFF
        if number == wire.TCA_KIND:
            kind = bytes(data[at + 4 : at + length])
        elif number == wire.TCA_OPTIONS:
            options = bytes(data[at + 4 : at + length])
            break  # what follows are counters, which a leaf's class has as well
        at += (length + 3) & ~3
    return _qdisc(handle, parent, _decoded(kind), options) if kind else None


@lru_cache(maxsize=1 << 17)
def _qdisc(handle: int, parent: int, kind: str, options: bytes) -> Qdisc:
    other = OtherQdisc(kind, _handle(handle), _handle(parent), options)
    parameters = _leaf_parameters(kind, options)
    # Handle 0 is the kernel's own default, which has yet to be replaced.
    is_chosen = parameters is not None and other.handle.major
    return Qdisc(other, Leaf(other.handle, other.parent, parameters) if is_chosen and parameters else other)


def htb_of(data: memoryview, start: int, end: int) -> tuple[HtbQdisc, int]:
    """Return an HTB qdisc and its direct packets. Raises LookupError, struct.error when it is malformed."""
    found = object_of(data, start, end)
    options = wire.spans(data, *found.found[wire.TCA_OPTIONS])
    _, _, default, _, direct_packets = wire.HTB_GLOB.unpack_from(data, options[wire.HTB_INIT][0])
    qdisc = HtbQdisc(
        handle=_handle(found.handle),
        parent=_handle(found.parent),
        default_minor=default & 0xFFFF,
        direct_qlen_packets=_u32(data, options, wire.HTB_DIRECT_QLEN),
        has_size_table=wire.TCA_STAB in found.found,
    )
    return qdisc, direct_packets


class Class(NamedTuple):
    """One HTB class and its counters."""

    spec: HtbClass
    counters: ClassCounters


class _Layout(NamedTuple):
    """Where in a class's message its options and counters lie, and what must stand around them for that to be so."""

    reader: struct.Struct
    headers: Callable[[tuple[Any, ...]], tuple[int, ...]]
    expected: tuple[int, ...]
    counters: Callable[[tuple[Any, ...]], tuple[int, ...]]
    options: tuple[int, int]


# By the length of a message; the kernel builds few different ones.
_layouts: dict[int, _Layout] = {}
_LAYOUTS_MAX = 64


def class_of(data: memoryview, start: int, end: int) -> Class | None:
    """Return the class whose tcmsg begins at start; None when it is not one of an HTB.

    Raises LookupError, ValueError, struct.error when it is malformed.
    """
    layout = _layouts.get(end - start)
    if layout is not None:
        fields = layout.reader.unpack_from(data, start)
        if layout.headers(fields) == layout.expected:
            begin, stop = layout.options
            _, _, handle, parent, _ = wire.TCMSG.unpack_from(data, start)
            spec = _htb_class(handle, parent, bytes(data[start + begin : start + stop]))
            return Class(spec, ClassCounters._make(layout.counters(fields)))
    found = object_of(data, start, end)
    if wire.TCA_KIND not in found.found or _text(data, found.found[wire.TCA_KIND]) != "htb":
        return None
    if wire.TCA_OPTIONS not in found.found:
        return None
    begin, stop = found.found[wire.TCA_OPTIONS]
    spec = _htb_class(found.handle, found.parent, bytes(data[begin:stop]))
    layout = _layout_of(data, start, found)
    if layout is not None and len(_layouts) < _LAYOUTS_MAX:
        _layouts[end - start] = layout
    return Class(spec, _counters(data, found))


@lru_cache(maxsize=1 << 17)
def _htb_class(handle: int, parent: int, options: bytes) -> HtbClass:
    found = wire.spans(options, 0, len(options))
    rate64 = _U64.unpack_from(options, found[wire.HTB_RATE64][0])[0] if wire.HTB_RATE64 in found else 0
    ceil64 = _U64.unpack_from(options, found[wire.HTB_CEIL64][0])[0] if wire.HTB_CEIL64 in found else 0
    opt = wire.HTB_OPT.unpack_from(options, found[wire.HTB_PARMS][0])
    return HtbClass(
        classid=_handle(handle),
        # The kernel says "root" for a class directly below the qdisc.
        parent=_handle(handle & 0xFFFF0000 if parent == ROOT.u32 else parent),
        # The 32-bit field stops at its largest value, so the 64-bit one counts where it is.
        floor=_rate(rate64 or opt[5]),
        ceil=_rate(ceil64 or opt[11]),
        burst_ticks=opt[12],
        cburst_ticks=opt[13],
        quantum_bytes=opt[14],
        prio=opt[16],
        has_overhead=any((opt[2], opt[4], opt[8], opt[10])),
    )


def _counters(data: memoryview, found: Object) -> ClassCounters:
    stats = wire.spans(data, *found.found.get(wire.TCA_STATS2, (0, 0)))
    sent_bytes = sent_packets = backlog_packets = backlog = dropped = overlimits = lended = borrowed = 0
    if _STATS_BASIC in stats:
        sent_bytes, sent_packets = _BASIC.unpack_from(data, stats[_STATS_BASIC][0])
    if _STATS_PKT64 in stats:
        (sent_packets,) = _U64.unpack_from(data, stats[_STATS_PKT64][0])
    if _STATS_QUEUE in stats:
        backlog_packets, backlog, dropped, _, overlimits = _QUEUE.unpack_from(data, stats[_STATS_QUEUE][0])
    span = found.found.get(wire.TCA_XSTATS)
    if span and span[1] - span[0] >= _HTB_XSTATS.size:
        lended, borrowed, _ = _HTB_XSTATS.unpack_from(data, span[0])
    return ClassCounters(sent_bytes, sent_packets, dropped, overlimits, backlog, backlog_packets, lended, borrowed)


def _layout_of(data: memoryview, start: int, found: Object) -> _Layout | None:
    """Return the layout of a message that has all its counters; None when it has not, or has some twice."""
    stats_span = found.found.get(wire.TCA_STATS2)
    xstats = found.found.get(wire.TCA_XSTATS)
    stats = wire.spans(data, *stats_span) if stats_span else {}
    if stats_span is None or xstats is None or xstats[1] - xstats[0] < _HTB_XSTATS.size:
        return None
    if _STATS_BASIC not in stats or _STATS_QUEUE not in stats:
        return None
    basic, queue = stats[_STATS_BASIC][0], stats[_STATS_QUEUE][0]
    packets = (stats[_STATS_PKT64][0], "Q") if _STATS_PKT64 in stats else (basic + 8, "I")
    # In the order of ClassCounters.
    counters = [(basic, "Q"), packets, (queue + 8, "I"), (queue + 16, "I"), (queue + 4, "I"), (queue, "I")]
    counters += [(xstats[0], "I"), (xstats[0] + 4, "I")]
    around = {start + wire.TCMSG.size, *(span[0] - 4 for span in (*found.found.values(), *stats.values()))}
    kind = (found.found[wire.TCA_KIND][0], "I")  # four bytes hold the whole of "htb"
    headers = [(at, "I") for at in sorted(around)] + [kind]
    reader, number = _reader(sorted({*headers, *counters}), start)
    fields = reader.unpack_from(data, start)
    heads = itemgetter(*(number[at] for at, _ in headers))
    begin, stop = found.found[wire.TCA_OPTIONS]
    values = itemgetter(*(number[at] for at, _ in counters))
    return _Layout(reader, heads, heads(fields), values, (begin - start, stop - start))


def _reader(fields: list[tuple[int, str]], start: int) -> tuple[struct.Struct, dict[int, int]]:
    """Return what reads values at these offsets of a message, and each one's place among them."""
    text, at = "=", start
    for offset, code in fields:
        text += f"{offset - at}x{code}"
        at = offset + struct.calcsize(code)
    return struct.Struct(text), {offset: number for number, (offset, _) in enumerate(fields)}


@lru_cache(maxsize=1 << 12)
def _leaf_parameters(kind: str, data: bytes) -> FqCodel | Fq | Bfifo | None:
    if kind == "bfifo" and len(data) >= _U32.size:
        return Bfifo(_U32.unpack_from(data)[0])
    found = wire.spans(data, 0, len(data))
    if kind == "fq_codel":
        if wire.FQ_CODEL_CE_THRESHOLD in found or _u32(data, found, wire.FQ_CODEL_DROP_BATCH) not in _DROP_BATCHES:
            return None  # somebody tuned it
        fields = {name: _u32(data, found, number) for name, number in wire.FQ_CODEL.items()}
        return FqCodel(
            limit_packets=fields["limit_packets"],
            flows=fields["flows"],
            target_us=_codel_us(fields["target_us"]),
            interval_us=_codel_us(fields["interval_us"]),
            quantum_bytes=fields["quantum_bytes"],
            memory_limit_bytes=_u32(data, found, wire.FQ_CODEL_MEMORY_LIMIT),
            ecn=bool(fields["ecn"]),
        )
    if kind == "fq":
        drop = found.get(wire.FQ_HORIZON_DROP)
        fields = {name: _u32(data, found, number) for name, number in wire.FQ.items()}
        if wire.FQ_MAX_RATE in found and _u32(data, found, wire.FQ_MAX_RATE) != wire.NO_RATE:
            return None  # somebody limits its flows
        return Fq(**fields, horizon_drop=bool(drop and data[drop[0]]))
    return None


def _codel_us(dumped_us: int) -> int:
    """Return the smallest time that the kernel would keep as the one it shows."""
    units = -(-dumped_us * 1000 // _CODEL_UNIT_NS)
    return -(-units * _CODEL_UNIT_NS // 1000)


def filter_of(data: memoryview, start: int, end: int) -> Filter | None:
    """Return the filter whose tcmsg begins at start; None for the line of a priority, which stands for no filter."""
    found = object_of(data, start, end)
    if wire.TCA_OPTIONS not in found.found or wire.TCA_KIND not in found.found:
        return None
    ethertype = socket.ntohs(found.info & 0xFFFF)
    kind = _text(data, found.found[wire.TCA_KIND])
    match, action = _match(kind, data, found.found[wire.TCA_OPTIONS], ethertype, found.handle)
    if _u32(data, found.found, wire.TCA_CHAIN):
        match, action = OtherMatch(kind), None  # of a chain that packets come to only by somebody's action
    return Filter(_handle(found.parent), found.info >> 16, ethertype, found.handle, match, action)


_Match = BpfMatch | FwMatch | FlowerMatch | DirectBpf | OtherMatch


def _match(
    kind: str, data: memoryview, span: tuple[int, int], ethertype: int, handle: int
) -> tuple[_Match, QueueMapping | None]:
    """Return what a filter of our kinds does; one with another action, a flag or a further key is somebody else's."""
    found = wire.spans(data, *span)
    other: tuple[_Match, None] = (OtherMatch(kind), None)
    if kind == "flower":
        return _flower(data, found, ethertype) or OtherMatch(kind), None
    action_kind = {"bpf": wire.BPF_ACTION, "fw": wire.FW_ACTION}.get(kind, 0)
    action = None
    if action_kind in found:
        action = _queue_mapping(data, found.pop(action_kind))
        if action is None:
            return other
    if kind == "bpf" and wire.BPF_OPS in found and found.keys() <= wire.BPF_PLAIN:
        begin, end = found[wire.BPF_OPS]
        return BpfMatch(tuple(wire.BPF_INSTRUCTION.iter_unpack(data[begin:end]))), action
    if kind == "bpf" and wire.BPF_NAME in found and found.keys() <= wire.BPF_DIRECT_PLAIN:
        name = _text(data, found[wire.BPF_NAME])
        return (DirectBpf(name), None) if name.startswith(OUR_PREFIX) else other
    if kind == "fw" and found.keys() <= wire.FW_PLAIN and (action or wire.FW_CLASSID in found):
        mask = _u32(data, found, wire.FW_MASK) if wire.FW_MASK in found else 0xFFFFFFFF
        classid = Handle.from_u32(_u32(data, found, wire.FW_CLASSID))
        return FwMatch(handle, mask, classid if classid.major else None), action
    return other


def _flower(data: memoryview, found: dict[int, tuple[int, int]], ethertype: int) -> FlowerMatch | None:
    if found.keys() & wire.FLOWER_NARROWER or wire.FLOWER_IP_PROTO not in found:
        return None
    protocol = data[found[wire.FLOWER_IP_PROTO][0]]
    port = found.get(wire.FLOWER_PORTS.get(protocol, 0))
    if port is None:
        return None
    classid = Handle.from_u32(_u32(data, found, wire.FLOWER_CLASSID))
    return FlowerMatch(ethertype, protocol, int.from_bytes(data[port[0] : port[1]], "big"), classid)


def _queue_mapping(data: memoryview, span: tuple[int, int]) -> QueueMapping | None:
    """Return a filter's action when it is one of ours and the only one."""
    actions = wire.spans(data, *span)
    if len(actions) != 1:
        return None
    one = wire.spans(data, *next(iter(actions.values())))
    if wire.ACT_KIND not in one or _text(data, one[wire.ACT_KIND]) != "skbedit" or wire.ACT_OPTIONS not in one:
        return None
    options = wire.spans(data, *one[wire.ACT_OPTIONS])
    needed = {wire.SKBEDIT_PARMS, wire.SKBEDIT_QUEUE_MAPPING}
    if not needed <= options.keys() or options.keys() & wire.SKBEDIT_MORE:
        return None
    _, _, verdict, _, _ = wire.SKBEDIT_GEN.unpack_from(data, options[wire.SKBEDIT_PARMS][0])
    if verdict != wire.TC_ACT_UNSPEC:
        return None
    (first,) = _U16.unpack_from(data, options[wire.SKBEDIT_QUEUE_MAPPING][0])
    span_of_last = options.get(wire.SKBEDIT_QUEUE_MAPPING_MAX)
    return QueueMapping(first, _U16.unpack_from(data, span_of_last[0])[0] if span_of_last else None)
