"""One reading of a device's qdiscs, classes and filters as a Snapshot, or Unknown.

Decoded by hand, since a scrape of 10,000 classes must not take seconds. What is not
ours is kept by kind and handle and never stops a reading.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from kura_shaper.errors import KuraShaperError, StateUnknownError
from kura_shaper.kernel import wire
from kura_shaper.kernel.client import DumpBrokenOffError
from kura_shaper.kernel.watch import ChangeWatch
from kura_shaper.tree.ebpf import OUR_PREFIX
from kura_shaper.tree.model import (
    EGRESS,
    HOOK,
    INGRESS,
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
    MqQdisc,
    OtherMatch,
    OtherQdisc,
    QueueMapping,
    htbs_of,
)
from kura_shaper.tree.snapshot import ClassCounters, Snapshot, Unknown
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.clock import Clock
    from kura_shaper.kernel.client import TcClient
    from kura_shaper.tree.model import Device, Root

_U16, _U32, _U64 = struct.Struct("=H"), struct.Struct("=I"), struct.Struct("=Q")
_BASIC = struct.Struct("=QI")  # bytes, packets (which wrap)
_QUEUE = struct.Struct("=IIIII")  # qlen, backlog, drops, requeues, overlimits
_HTB_XSTATS = struct.Struct("=III")  # lends, borrows, giants
_STATS_BASIC, _STATS_QUEUE, _STATS_PKT64 = 1, 3, 8
# codel keeps times in units of 1024 ns, so what was set as 5000 us reads back as 4999.
_CODEL_UNIT_NS = 1024
_TRIES = 5
# What the kernel shows for one that was not chosen; before 4.8 it showed none.
_DROP_BATCHES = (0, 64)


class _Object(NamedTuple):
    """The head of one dumped object and where its attributes lie."""

    ifindex: int
    handle: int
    parent: int
    info: int
    found: dict[int, tuple[int, int]]


def read_snapshot(client: TcClient, device: Device, *, clock: Clock) -> Snapshot | Unknown:
    """Return what the kernel has on a device now; Unknown when it can't be read whole."""
    reason = ""
    try:
        for _ in range(_TRIES):
            with ChangeWatch(device.ifindex) as watch:
                try:
                    snapshot = _Reading(client, device).snapshot(clock.now_ns())
                except DumpBrokenOffError as error:
                    reason = str(error)
                    continue
                if not watch.saw_change():
                    return _plausible(snapshot)
                reason = "the tree, or the devices, changed during every reading"
    except (KuraShaperError, OSError) as error:
        return Unknown(str(error))
    except (LookupError, ValueError, struct.error) as error:
        return Unknown(f"the kernel's answer can't be understood: {type(error).__name__}: {error}")
    return Unknown(reason)


def read_class(client: TcClient, ifindex: int, classid: Handle) -> tuple[HtbClass, ClassCounters]:
    """Return one HTB class and its counters, without a walk over all the others.

    Raises KernelRefusedError when it is not there, StateUnknownError when it can't be read.
    """
    data = client.get(wire.class_request(ifindex, classid))
    found = _object(data, 0, len(data))
    try:
        parent = _above(classid, found.parent)
        return _htb_class(data, *found.found[wire.TCA_OPTIONS], classid, parent), _counters(data, found)
    except (LookupError, ValueError, struct.error) as error:
        raise StateUnknownError(f"the kernel's answer for class {classid} can't be understood: {error}") from error


def _plausible(snapshot: Snapshot) -> Snapshot | Unknown:
    """A device that is up has a root qdisc, if only noqueue: not to have seen it is not to know."""
    if snapshot.root is None and snapshot.device.is_up:
        return Unknown(f"no root qdisc was seen on {snapshot.device.name}, though it is up")
    return snapshot


class _Reading:
    """The dumps of one snapshot."""

    def __init__(self, client: TcClient, device: Device) -> None:
        self._client = client
        self._device = device
        self._root: Root = None
        self._hook: OtherQdisc | None = None
        self._verbatim: list[OtherQdisc] = []
        # By the place that they hang in, which is a class, or an mq's queue.
        self._below: dict[Handle, Leaf | OtherQdisc] = {}
        self._htbs: dict[Handle, tuple[HtbQdisc, int]] = {}
        self._majors: frozenset[int] = frozenset()
        self._classes: dict[Handle, HtbClass] = {}
        self._counters: dict[Handle, ClassCounters] = {}
        self._filters: list[Filter] = []

    def snapshot(self, taken_at_ns: int) -> Snapshot:
        self._client.dump(wire.dump_request(wire.Message.GETQDISC), self._qdisc)
        index = self._device.ifindex
        root: Root = self._htbs[ROOT][0] if ROOT in self._htbs else self._root
        queues = self._queues(root)
        htbs = htbs_of(root, queues.values())
        self._majors = frozenset(htb.handle.major for htb in htbs)
        if htbs:
            # Of one HTB only its own classes; else those of all qdiscs in one go.
            above = htbs[0].handle.u32 if len(htbs) == 1 else 0
            self._client.dump(wire.dump_request(wire.Message.GETTCLASS, index, above), self._class)
        places = [htb.handle for htb in htbs]
        if self._hook is not None and self._hook.kind == "clsact":
            places += [INGRESS, EGRESS]
        for place in places:
            self._client.dump(wire.dump_request(wire.Message.GETTFILTER, index, place.u32), self._filter)
        return Snapshot(
            device=self._device,
            root=root,
            queues=queues,
            classes=self._classes,
            leaves={place: leaf for place, leaf in self._below.items() if place in self._classes},
            filters=tuple(sorted(self._filters, key=lambda f: f.key)),
            verbatim=tuple(self._verbatim),
            counters=self._counters,
            hook=self._hook,
            direct_packets=sum(self._htbs[htb.parent][1] for htb in htbs),
            taken_at_ns=taken_at_ns,
        )

    def _queues(self, root: Root) -> dict[Handle, HtbQdisc | Leaf | OtherQdisc]:
        """Return what hangs below an mq root of somebody's choice."""
        if not isinstance(root, MqQdisc):
            return {}
        below = {place: found for place, found in self._below.items() if place.major == root.handle.major}
        return below | {place: htb for place, (htb, _) in self._htbs.items() if place in below}

    def _qdisc(self, data: memoryview, start: int, end: int) -> None:
        # The kernel ignores the device in a request for qdiscs, so it is chosen here.
        if wire.TCMSG.unpack_from(data, start)[1] != self._device.ifindex:
            return
        found = _object(data, start, end)
        if wire.TCA_KIND not in found.found:
            return
        kind = _text(data, found.found[wire.TCA_KIND])
        handle, parent = _handle(found.handle), _handle(found.parent)
        begin, stop = found.found.get(wire.TCA_OPTIONS, (0, 0))
        other = OtherQdisc(kind, handle, parent, bytes(data[begin:stop]))
        self._verbatim.append(other)
        if parent == HOOK:
            self._hook = other
            return
        if kind == "htb":
            qdisc, direct_packets = _htb_qdisc(data, begin, stop, handle, parent)
            qdisc = replace(qdisc, has_size_table=wire.TCA_STAB in found.found)
            self._htbs[parent] = (qdisc, direct_packets)
        if parent == ROOT:
            # The kernel's own mq has no handle, and says no more than any other default.
            self._root = MqQdisc(handle) if kind == "mq" and handle.major else other
            return
        parameters = _leaf_parameters(kind, other.options)
        # Handle 0 is the kernel's own default, which has yet to be replaced.
        self._below[parent] = Leaf(handle, parent, parameters) if parameters and handle.major else other

    def _class(self, data: memoryview, start: int, end: int) -> None:
        found = _object(data, start, end)
        if _text(data, found.found[wire.TCA_KIND]) != "htb" or wire.TCA_OPTIONS not in found.found:
            return
        classid = _handle(found.handle)
        if classid.major not in self._majors:
            return  # of an HTB that somebody hung below a class
        parent = _above(classid, found.parent)
        self._classes[classid] = _htb_class(data, *found.found[wire.TCA_OPTIONS], classid, parent)
        self._counters[classid] = _counters(data, found)

    def _filter(self, data: memoryview, start: int, end: int) -> None:
        found = _object(data, start, end)
        # Each priority also has a line without options, which stands for no filter.
        if wire.TCA_OPTIONS not in found.found or wire.TCA_KIND not in found.found:
            return
        ethertype = socket.ntohs(found.info & 0xFFFF)
        kind = _text(data, found.found[wire.TCA_KIND])
        match, action = _match(kind, data, found.found[wire.TCA_OPTIONS], ethertype, found.handle)
        if _u32(data, found.found, wire.TCA_CHAIN):
            match, action = OtherMatch(kind), None  # of a chain that packets come to only by somebody's action
        place = Handle.from_u32(found.parent)
        self._filters.append(Filter(place, found.info >> 16, ethertype, found.handle, match, action))


def _object(data: memoryview, start: int, end: int) -> _Object:
    _, ifindex, handle, parent, info = wire.TCMSG.unpack_from(data, start)
    return _Object(ifindex, handle, parent, info, wire.spans(data, start + wire.TCMSG.size, end))


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


def _htb_qdisc(data: memoryview, start: int, end: int, handle: Handle, parent: Handle) -> tuple[HtbQdisc, int]:
    found = wire.spans(data, start, end)
    _, _, default, _, direct_packets = wire.HTB_GLOB.unpack_from(data, found[wire.HTB_INIT][0])
    qdisc = HtbQdisc(handle, parent, default & 0xFFFF, _u32(data, found, wire.HTB_DIRECT_QLEN))
    return qdisc, direct_packets


def _above(classid: Handle, parent: int) -> Handle:
    """Return a class's parent; the kernel says "root" for one directly below the qdisc."""
    return _handle(classid.u32 & 0xFFFF0000 if parent == ROOT.u32 else parent)


def _htb_class(data: memoryview, start: int, end: int, classid: Handle, parent: Handle) -> HtbClass:
    found = wire.spans(data, start, end)
    rate64 = _U64.unpack_from(data, found[wire.HTB_RATE64][0])[0] if wire.HTB_RATE64 in found else 0
    ceil64 = _U64.unpack_from(data, found[wire.HTB_CEIL64][0])[0] if wire.HTB_CEIL64 in found else 0
    opt = wire.HTB_OPT.unpack_from(data, found[wire.HTB_PARMS][0])
    return HtbClass(
        classid=classid,
        parent=parent,
        # The 32-bit field stops at its largest value, so the 64-bit one counts where it is.
        floor=_rate(rate64 or opt[5]),
        ceil=_rate(ceil64 or opt[11]),
        burst_ticks=opt[12],
        cburst_ticks=opt[13],
        quantum_bytes=opt[14],
        prio=opt[16],
        has_overhead=any((opt[2], opt[4], opt[8], opt[10])),
    )


def _counters(data: memoryview, found: _Object) -> ClassCounters:
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
    return ClassCounters(
        sent_bytes=sent_bytes,
        sent_packets=sent_packets,
        dropped_packets=dropped,
        overlimits=overlimits,
        backlog_bytes=backlog,
        backlog_packets=backlog_packets,
        lended=lended,
        borrowed=borrowed,
    )


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
