"""What a tree on a device is made of. Wanted and actual trees share these types.

Handles are `major:minor`, 16 bits each. A qdisc has minor 0; a class shares its
qdisc's major, and its minor is the class id of the tenants document, so the mark,
the class and the document show one number. (man tc, tc-htb)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kura_shaper.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from kura_shaper.tree.ebpf import EbpfProgram
    from kura_shaper.units import Rate

# One tick of a tc bucket is 64 ns (include/net/pkt_sched.h: PSCHED_SHIFT 6).
TICK_NS = 64
_U32_MAX = 0xFFFFFFFF


class _Halves(NamedTuple):
    major: int
    minor: int = 0


class Handle(_Halves):
    """A qdisc's or class's handle. Raises UsageError when a half has more than 16 bits.

    The kernel would not: it takes 1:10000 (hex) for a handle that aliases 1:0. A tuple, since trees
    of thousands of classes are looked up by it.
    """

    __slots__ = ()

    def __new__(cls, major: int, minor: int = 0) -> Self:
        """Check both halves."""
        if not (0 <= major <= 0xFFFF and 0 <= minor <= 0xFFFF):
            raise UsageError(f"handle {major:x}:{minor:x} is out of range", remedy="each half has 16 bits")
        return super().__new__(cls, major, minor)

    @classmethod
    def from_u32(cls, value: int) -> Handle:
        """Return the handle that the kernel's 32-bit form names."""
        return cls(value >> 16, value & 0xFFFF)

    @property
    def u32(self) -> int:
        """The kernel's 32-bit form."""
        return self.major << 16 | self.minor

    def __str__(self) -> str:
        return f"{self.major:x}:{self.minor:x}" if self.minor else f"{self.major:x}:"


ROOT = Handle(0xFFFF, 0xFFFF)
# The hook that every packet passes before the kernel chooses its tx queue, and where its filters
# hang (include/uapi/linux/pkt_sched.h: TC_H_CLSACT, TC_H_MIN_EGRESS), beside those of arriving packets.
HOOK, INGRESS, EGRESS = Handle(0xFFFF, 0xFFF1), Handle(0xFFFF, 0xFFF2), Handle(0xFFFF, 0xFFF3)


# Where our trees stand, and what tells them from others': the mq root of shape mq, and the first HTB, which
# is the root in shape single. The HTBs of further shaped queues have the majors that follow.
MQ_HANDLE, HTB_HANDLE = Handle(0x1F), Handle(0x20)


class Shape(StrEnum):
    """How the tree sits on the device."""

    SINGLE = "single"
    MQ = "mq"


class SteeringKind(StrEnum):
    """What puts a tenant's packets on their tx queue, the best first.

    skbedit makes the kernel skip its own choice, whatever that would be. The other two write a wish
    that XPS and a connection's remembered queue override: tcx runs ahead of what others hang on the
    hook, bpf in its turn.
    """

    SKBEDIT = "skbedit"
    BPF = "bpf"
    TCX = "tcx"

    @property
    def needs_xps_off(self) -> bool:
        """Whether a queue's XPS mask would override it."""
        return self is not SteeringKind.SKBEDIT


class HostTraffic(StrEnum):
    """Whether unmarked host traffic is beside the node budget or under it."""

    OUTSIDE = "outside"
    INSIDE = "inside"


class LeafKind(StrEnum):
    """Queueing disciplines that we put below a class, the best first."""

    FQ_CODEL = "fq_codel"
    FQ = "fq"
    BFIFO = "bfifo"


@dataclass(frozen=True, slots=True)
class Device:
    """What the planner needs to know of a network device.

    gso_max_bytes is the largest packet that the stack hands to the qdisc at once. tx_queues are
    the live ones. kind is the kernel's name for a virtual device's kind, "" for hardware; ports are
    the devices below a bond or bridge, below is the device that this one stands on.
    """

    name: str
    ifindex: int
    mtu_bytes: int = 1500
    gso_max_bytes: int = 65536
    tx_queue_len_packets: int = 1000
    tx_queues: int = 1
    is_loopback: bool = False
    is_up: bool = True
    kind: str = ""
    ports: tuple[str, ...] = ()
    below: str = ""
    master: str = ""

    @property
    def frame_bytes(self) -> int:
        """MTU and the Ethernet header: what HTB charges for one full packet."""
        return self.mtu_bytes + 14


@dataclass(frozen=True, slots=True)
class HtbQdisc:
    """An HTB qdisc. default_minor names the class of all that no filter matched.

    has_size_table is never wanted: packets would be charged other than their size (man tc-stab).
    """

    handle: Handle
    parent: Handle
    default_minor: int
    direct_qlen_packets: int
    has_size_table: bool = False
    kind: str = field(default="htb", init=False)


@dataclass(frozen=True, slots=True)
class MqQdisc:
    """An mq root: one child for each tx queue, at minor queue index + 1 (man tc-mq, net/sched/sch_mq.c)."""

    handle: Handle
    parent: Handle = ROOT
    kind: str = field(default="mq", init=False)

    def child(self, queue: int) -> Handle:
        """Return where the qdisc of a tx queue hangs."""
        return Handle(self.handle.major, queue + 1)


@dataclass(frozen=True, slots=True)
class HtbClass:
    """An HTB class: floor (HTB rate), ceil, their buckets in ticks of 64 ns, quantum, prio.

    has_overhead is never wanted: packets would be charged other than their size.
    """

    classid: Handle
    parent: Handle
    floor: Rate
    ceil: Rate
    burst_ticks: int
    cburst_ticks: int
    quantum_bytes: int
    prio: int
    has_overhead: bool = False

    @property
    def burst_bytes(self) -> int:
        """Bytes in the floor's bucket."""
        return bytes_of_ticks(self.floor, self.burst_ticks)

    @property
    def cburst_bytes(self) -> int:
        """Bytes in the ceil's bucket."""
        return bytes_of_ticks(self.ceil, self.cburst_ticks)


@dataclass(frozen=True, slots=True)
class FqCodel:
    """Parameters of an fq_codel leaf (man tc-fq_codel)."""

    limit_packets: int
    flows: int
    target_us: int
    interval_us: int
    quantum_bytes: int
    memory_limit_bytes: int
    ecn: bool = True
    kind: LeafKind = field(default=LeafKind.FQ_CODEL, init=False)


@dataclass(frozen=True, slots=True)
class Fq:
    """Parameters of an fq leaf (man tc-fq)."""

    limit_packets: int
    flow_limit_packets: int
    quantum_bytes: int
    initial_quantum_bytes: int
    horizon_us: int
    horizon_drop: bool = True
    kind: LeafKind = field(default=LeafKind.FQ, init=False)


@dataclass(frozen=True, slots=True)
class Bfifo:
    """Parameters of a bfifo leaf: what is left where the kernel has neither fq_codel nor fq."""

    limit_bytes: int
    kind: LeafKind = field(default=LeafKind.BFIFO, init=False)


@dataclass(frozen=True, slots=True)
class OtherQdisc:
    """A qdisc that is not of our making; options are the kernel's bytes, kept verbatim.

    Handle 0 marks the kernel's own default.
    """

    kind: str
    handle: Handle
    parent: Handle
    options: bytes = b""

    @property
    def is_kernel_default(self) -> bool:
        """Whether nobody chose it: the kernel gives its own defaults no handle."""
        return self.handle.major == 0


# What a device may have as its root; None where it has none at all.
Root = HtbQdisc | MqQdisc | OtherQdisc | None


@dataclass(frozen=True, slots=True)
class Leaf:
    """The qdisc below a leaf class, or below an mq for a queue without an HTB."""

    handle: Handle
    parent: Handle
    parameters: FqCodel | Fq | Bfifo


@dataclass(frozen=True, slots=True)
class BpfMatch:
    """A cls_bpf filter of classic BPF; its return value is the classid (man tc-bpf).

    Each instruction is (code, jump if true, jump if false, k).
    """

    instructions: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class FwMatch:
    """A cls_fw filter: (mark & mask) picks the class, or only carries an action (man tc-fw)."""

    mark: int
    mask: int
    classid: Handle | None = None


@dataclass(frozen=True, slots=True)
class DirectBpf:
    """A cls_bpf filter of eBPF that acts by itself (man tc-bpf, direct-action); its name is its identity."""

    name: str
    program: EbpfProgram | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class FlowerMatch:
    """A cls_flower filter on an IP protocol and the source port (man tc-flower)."""

    ethertype: int
    ip_protocol: int
    source_port: int
    classid: Handle


@dataclass(frozen=True, slots=True)
class QueueMapping:
    """The action skbedit queue_mapping (man tc-skbedit): the tx queue of what matches, then the next filter.

    With last, packets spread over first..last by their flow's hash.
    """

    first: int
    last: int | None = None


@dataclass(frozen=True, slots=True)
class OtherMatch:
    """A filter that is not of our making."""

    kind: str


@dataclass(frozen=True, slots=True)
class Filter:
    """One filter on a qdisc. It is known by parent, priority, ethertype and handle."""

    parent: Handle
    priority: int
    ethertype: int
    handle: int
    match: BpfMatch | FwMatch | FlowerMatch | DirectBpf | OtherMatch
    action: QueueMapping | None = None

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What the kernel tells this filter from others by."""
        return (self.parent.u32, self.priority, self.ethertype, self.handle)


@dataclass(frozen=True, slots=True)
class Steering:
    """How a tree's packets come to their queue; program where it is eBPF."""

    kind: SteeringKind
    program: EbpfProgram | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    """A whole wanted tree. Classes stand parents first.

    queues are what hangs below an mq root: HTBs on the shaped queues, leaves on the others.
    """

    root: HtbQdisc | MqQdisc
    queues: tuple[HtbQdisc | Leaf, ...]
    classes: tuple[HtbClass, ...]
    leaves: tuple[Leaf, ...]
    filters: tuple[Filter, ...]
    steering: Steering | None = None

    @property
    def shape(self) -> Shape:
        """How the tree sits on its device."""
        return Shape.MQ if isinstance(self.root, MqQdisc) else Shape.SINGLE

    @property
    def htbs(self) -> tuple[HtbQdisc, ...]:
        """The HTBs of the tree, in the order of their queues."""
        return htbs_of(self.root, self.queues)

    @property
    def has_hook(self) -> bool:
        """Whether filters of the tree hang on the egress hook."""
        return any(filter_.parent == EGRESS for filter_ in self.filters)

    def class_of(self, minor: int) -> HtbClass | None:
        """Return the first class with this minor, if there is one."""
        return next((c for c in self.classes if c.classid.minor == minor), None)


def htbs_of(root: Root, queues: Iterable[HtbQdisc | Leaf | OtherQdisc]) -> tuple[HtbQdisc, ...]:
    """Return the HTB at the root, or those of ours below an mq root, in the order of their queues."""
    if isinstance(root, HtbQdisc):
        return (root,)
    below = (qdisc for qdisc in queues if isinstance(qdisc, HtbQdisc))
    return tuple(sorted((htb for htb in below if is_htb_of_queue(htb)), key=lambda htb: htb.parent))


def is_htb_of_queue(htb: HtbQdisc) -> bool:
    """Whether an HTB below an mq has the handle that ours has in its place."""
    return htb.handle.major - HTB_HANDLE.major == htb.parent.minor - 1


def ticks_of_bytes(rate: Rate, size_bytes: int) -> int:
    """Return the ticks that size_bytes take at rate, rounded up: the bucket never gets smaller.

    The kernel keeps a bucket as the time that it takes to send it (net/sched/sch_htb.c).
    Raises UsageError when the bucket does not fit the kernel's 32 bits.
    """
    ticks = -(-size_bytes * 1_000_000_000 // (rate.bytes_per_second * TICK_NS))
    if ticks > _U32_MAX:
        raise UsageError(f"a bucket of {size_bytes} bytes at {rate} bit/s is too long", remedy="raise the rate")
    return ticks


def bytes_of_ticks(rate: Rate, ticks: int) -> int:
    """Return the bytes that pass at rate in so many ticks, rounded down."""
    return rate.bytes_per_second * ticks * TICK_NS // 1_000_000_000
