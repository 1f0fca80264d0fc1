"""Parameters of qdiscs and classes, each explicit: never the kernel's or a library's default.

Every rule has the fault that it prevents beside it; the numbers come from the
trackers of other shapers and from measurements on real kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kura_shaper.tree.model import Bfifo, Fq, FqCodel, HtbClass, LeafKind, ticks_of_bytes
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.tree.model import Device, Handle

# HTB refuses a rate of 0, so a tenant without a floor gets a trickle and borrows the rest.
TRICKLE = Rate(1_000_000)
# At this a bucket of the largest GSO packet that a device may have lasts a minute.
TRICKLE_MIN = Rate(62_500)
# A class that never limits: nothing here may infer a cap from a link's speed, since a node's
# public budget and its link are different things, and virtual devices report nonsense.
LINE_RATE = Rate(1_000_000_000_000)
# Without it a device with txqlen 0 gets a direct queue of 0 packets, which drops everything.
DIRECT_QLEN_PACKETS = 1000

_QUANTUM_MAX_BYTES = 60_000
_QUEUE_DELAY_US = 50_000
_MEMORY_LIMIT_BYTES = 32 * 1024 * 1024
_FQ_CODEL_LIMIT_PACKETS = (1_000, 10_240)


def whole_bytes(rate: Rate) -> Rate:
    """Return the rate as the kernel can hold it: whole bytes a second, rounded down."""
    return Rate.from_bytes_per_second(rate.bytes_per_second)


def burst_bytes(rate: Rate, device: Device) -> int:
    """Return the bucket for a rate: 1 ms of it, one GSO packet, two frames, whichever is most.

    A bucket below 1 ms or below one GSO packet costs throughput (400 of 900 Mbit/s were
    seen with 5 KB); a larger one lets bursts through.
    """
    return max(rate.bytes_in_us(1_000), device.gso_max_bytes, 2 * device.frame_bytes)


def quantum_bytes(floor: Rate, device: Device) -> int:
    """Return a class's share of a round: rate / 10, at least a frame, at most 60,000 bytes.

    The kernel warns above 200,000 and below 1,000, and a round must fit at least one frame.
    """
    return max(device.frame_bytes, min(floor.bytes_per_second // 10, _QUANTUM_MAX_BYTES))


def htb_class(classid: Handle, parent: Handle, *, floor: Rate, ceil: Rate, prio: int, device: Device) -> HtbClass:
    """Return a class with its buckets and quantum. floor must be at least 1 byte a second."""
    floor, ceil = whole_bytes(floor), whole_bytes(ceil)
    return HtbClass(
        classid=classid,
        parent=parent,
        floor=floor,
        ceil=ceil,
        burst_ticks=ticks_of_bytes(floor, burst_bytes(floor, device)),
        cburst_ticks=ticks_of_bytes(ceil, burst_bytes(ceil, device)),
        quantum_bytes=quantum_bytes(floor, device),
        prio=prio,
    )


def inner_class(classid: Handle, parent: Handle, *, rate: Rate, device: Device) -> HtbClass:
    """Return a class that only holds others: floor = ceil = rate.

    Its quantum and prio are the same at every rate, since the kernel ignores a change of them
    once the class has children (htb_change_class), and shows what it was made with.
    """
    spec = htb_class(classid, parent, floor=rate, ceil=rate, prio=0, device=device)
    return replace(spec, quantum_bytes=_QUANTUM_MAX_BYTES)


def leaf_parameters(kind: LeafKind, ceil: Rate, device: Device) -> FqCodel | Fq | Bfifo:
    """Return a leaf's parameters: room for 50 ms at the ceil, within bounds of memory."""
    queue_bytes = ceil.bytes_in_us(_QUEUE_DELAY_US)
    low, high = _FQ_CODEL_LIMIT_PACKETS
    limit_packets = max(low, min(queue_bytes // device.frame_bytes, high))
    match kind:
        case LeafKind.FQ_CODEL:
            return FqCodel(
                limit_packets=limit_packets,
                flows=1024,
                target_us=5_000,
                interval_us=100_000,
                quantum_bytes=device.frame_bytes,
                memory_limit_bytes=_MEMORY_LIMIT_BYTES,
            )
        case LeafKind.FQ:
            # The kernel's own flow limit of 100 packets drops within single fast flows.
            return Fq(
                limit_packets=high,
                flow_limit_packets=1_000,
                quantum_bytes=2 * device.frame_bytes,
                initial_quantum_bytes=10 * device.frame_bytes,
                horizon_us=10_000_000,
            )
        case _:
            return Bfifo(limit_bytes=min(max(queue_bytes, 4 * device.gso_max_bytes), _MEMORY_LIMIT_BYTES))
