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

from kura_shaper.errors import KuraShaperError
from kura_shaper.kernel import wire
from kura_shaper.kernel.client import DumpBrokenOffError
from kura_shaper.kernel.watch import ChangeWatch
from kura_shaper.tree.model import (
    ROOT,
    Bfifo,
    BpfMatch,
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
)
from kura_shaper.tree.snapshot import ClassCounters, Snapshot, Unknown
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.clock import Clock
    from kura_shaper.kernel.client import TcClient
    from kura_shaper.tree.model import Device

_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
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
        self._root: HtbQdisc | OtherQdisc | None = None
        self._verbatim: list[OtherQdisc] = []
        self._leaves: dict[Handle, Leaf | OtherQdisc] = {}
        self._direct_packets = 0
        self._classes: dict[Handle, HtbClass] = {}
        self._counters: dict[Handle, ClassCounters] = {}
        self._filters: list[Filter] = []

    def snapshot(self, taken_at_ns: int) -> Snapshot:
        self._client.dump(wire.dump_request(wire.Message.GETQDISC), self._qdisc)
        root = self._root
        if isinstance(root, HtbQdisc):
            index = self._device.ifindex
            self._client.dump(wire.dump_request(wire.Message.GETTCLASS, index, root.handle.u32), self._class)
            request = wire.dump_request(wire.Message.GETTFILTER, index, root.handle.u32)
            self._client.dump(request, self._filter)
        return Snapshot(
            device=self._device,
            root=root,
            classes=self._classes,
            leaves={p: leaf for p, leaf in self._leaves.items() if p in self._classes},
            filters=tuple(sorted(self._filters, key=lambda f: f.key)),
            verbatim=tuple(self._verbatim),
            counters=self._counters,
            direct_packets=self._direct_packets,
            taken_at_ns=taken_at_ns,
        )

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
        if parent == ROOT:
            self._root = other
            if kind == "htb":
                qdisc, self._direct_packets = _htb_qdisc(data, begin, stop, handle, parent)
                self._root = replace(qdisc, has_size_table=wire.TCA_STAB in found.found)
            return
        parameters = _leaf_parameters(kind, other.options)
        # Handle 0 is the kernel's own default, which has yet to be replaced.
        self._leaves[parent] = Leaf(handle, parent, parameters) if parameters and handle.major else other

    def _class(self, data: memoryview, start: int, end: int) -> None:
        found = _object(data, start, end)
        if _text(data, found.found[wire.TCA_KIND]) != "htb" or wire.TCA_OPTIONS not in found.found:
            return
        classid = _handle(found.handle)
        if self._root is None or classid.major != self._root.handle.major:
            return  # of an HTB that somebody hung below a class
        parent = _handle(found.parent)
        if parent == ROOT:
            # The kernel says "root" for a class directly below the qdisc.
            parent = self._root.handle
        self._classes[classid] = _htb_class(data, *found.found[wire.TCA_OPTIONS], classid, parent)
        self._counters[classid] = _counters(data, found)

    def _filter(self, data: memoryview, start: int, end: int) -> None:
        found = _object(data, start, end)
        # Each priority also has a line without options, which stands for no filter.
        if wire.TCA_OPTIONS not in found.found or wire.TCA_KIND not in found.found:
            return
        ethertype = socket.ntohs(found.info & 0xFFFF)
        kind = _text(data, found.found[wire.TCA_KIND])
        match = _match(kind, data, found.found[wire.TCA_OPTIONS], ethertype, found.handle)
        if _u32(data, found.found, wire.TCA_CHAIN):
            match = OtherMatch(kind)  # of a chain that packets come to only by somebody's action
        filter_ = Filter(Handle.from_u32(found.parent), found.info >> 16, ethertype, found.handle, match)
        self._filters.append(filter_)


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


def _match(
    kind: str, data: memoryview, span: tuple[int, int], ethertype: int, handle: int
) -> BpfMatch | FwMatch | FlowerMatch | OtherMatch:
    """Return what a filter of our kinds does; one with an action, a flag or a further key is somebody else's."""
    found = wire.spans(data, *span)
    if kind == "bpf" and found.keys() <= wire.BPF_PLAIN and wire.BPF_OPS in found:
        begin, end = found[wire.BPF_OPS]
        return BpfMatch(tuple(wire.BPF_INSTRUCTION.iter_unpack(data[begin:end])))
    if kind == "fw" and found.keys() <= wire.FW_PLAIN and wire.FW_CLASSID in found:
        mask = _u32(data, found, wire.FW_MASK) if wire.FW_MASK in found else 0xFFFFFFFF
        return FwMatch(handle, mask, Handle.from_u32(_u32(data, found, wire.FW_CLASSID)))
    if kind == "flower" and not found.keys() & wire.FLOWER_NARROWER and wire.FLOWER_IP_PROTO in found:
        protocol = data[found[wire.FLOWER_IP_PROTO][0]]
        port = found.get(wire.FLOWER_PORTS.get(protocol, 0))
        if port is not None:
            classid = Handle.from_u32(_u32(data, found, wire.FLOWER_CLASSID))
            return FlowerMatch(ethertype, protocol, int.from_bytes(data[port[0] : port[1]], "big"), classid)
    return OtherMatch(kind)
