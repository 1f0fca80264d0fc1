"""The single steps that a plan is made of. Each knows its cost and how to say itself.

Costs were measured on real kernels: changing a class keeps every backlog and counter,
replacing a leaf loses that leaf's backlog, and grafting a root loses every queue of
the device, uncounted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.tree.model import (
    EGRESS,
    ROOT,
    BpfMatch,
    DirectBpf,
    FlowerMatch,
    Fq,
    FqCodel,
    FwMatch,
    Handle,
    HtbQdisc,
    Leaf,
    LeafKind,
    MqQdisc,
)

if TYPE_CHECKING:
    from kura_shaper.tree.ebpf import EbpfProgram
    from kura_shaper.tree.model import Filter, HtbClass, OtherQdisc


class Impact(StrEnum):
    """What an operation costs traffic that is queued at that moment."""

    HITLESS = "hitless"
    LEAF_LOSS = "leaf-loss"
    DEVICE_LOSS = "device-loss"


@dataclass(frozen=True, slots=True)
class AddRoot:
    """Put an HTB or an mq at the root; the kernel swaps it for what is there in one step."""

    qdisc: HtbQdisc | MqQdisc
    impact: Impact = Impact.DEVICE_LOSS

    def describe(self) -> str:
        """Return the operation as one line."""
        return f"add root qdisc {_qdisc(self.qdisc)}"


@dataclass(frozen=True, slots=True)
class SetQueue:
    """Put an HTB or a leaf below an mq, for one tx queue. The kernel stops the whole device for it."""

    qdisc: HtbQdisc | Leaf
    impact: Impact = Impact.DEVICE_LOSS

    def describe(self) -> str:
        """Return the operation as one line."""
        what = _qdisc(self.qdisc) if isinstance(self.qdisc, HtbQdisc) else _leaf(self.qdisc)
        return f"set qdisc of tx queue {self.qdisc.parent.minor - 1} to {what}"


@dataclass(frozen=True, slots=True)
class AddHook:
    """Make the hooks that packets pass before a tx queue is chosen. The first one stops the device."""

    impact: Impact = Impact.DEVICE_LOSS

    def describe(self) -> str:
        """Return the operation as one line."""
        return "add qdisc clsact, for the egress hook"


@dataclass(frozen=True, slots=True)
class DeleteHook:
    """Take the hooks away, with whatever hangs there. The kernel stops the device for it."""

    impact: Impact = Impact.DEVICE_LOSS

    def describe(self) -> str:
        """Return the operation as one line."""
        return "delete qdisc clsact"


@dataclass(frozen=True, slots=True)
class SetTcx:
    """Put our program first among those that run ahead of the egress hook, or swap the one that is there."""

    program: EbpfProgram
    impact: Impact = Impact.HITLESS

    def describe(self) -> str:
        """Return the operation as one line."""
        return f"set first tcx egress program to {self.program.name} of {len(self.program.instructions)} instructions"


@dataclass(frozen=True, slots=True)
class RemoveTcx:
    """Take our tcx program away."""

    impact: Impact = Impact.HITLESS

    def describe(self) -> str:
        """Return the operation as one line."""
        return "remove tcx egress program"


@dataclass(frozen=True, slots=True)
class SetXps:
    """Set which CPUs prefer a tx queue; 0 for none (Documentation/networking/scaling.rst)."""

    queue: int
    mask: int
    impact: Impact = Impact.HITLESS

    def describe(self) -> str:
        """Return the operation as one line."""
        return (
            f"set XPS of tx queue {self.queue} to {self.mask:#x}"
            if self.mask
            else f"clear XPS of tx queue {self.queue}"
        )


@dataclass(frozen=True, slots=True)
class RestoreQdisc:
    """Put a qdisc of somebody else's back as it was."""

    qdisc: OtherQdisc
    impact: Impact = Impact.DEVICE_LOSS

    def describe(self) -> str:
        """Return the operation as one line."""
        return f"restore qdisc {self.qdisc.kind} {self.qdisc.handle} parent {_parent(self.qdisc.parent)}"


@dataclass(frozen=True, slots=True)
class DeleteRoot:
    """Take the root qdisc away; the kernel's default takes its place."""

    handle: Handle
    impact: Impact = Impact.DEVICE_LOSS

    def describe(self) -> str:
        """Return the operation as one line."""
        return f"delete root qdisc {self.handle}"


@dataclass(frozen=True, slots=True)
class AddClass:
    """Create a class; the kernel gives it a plain fifo until its leaf is there."""

    spec: HtbClass
    impact: Impact = Impact.HITLESS

    def describe(self) -> str:
        """Return the operation as one line."""
        return f"add class {_class(self.spec)}"


@dataclass(frozen=True, slots=True)
class ChangeClass:
    """Change a class in place."""

    spec: HtbClass
    impact: Impact = Impact.HITLESS

    def describe(self) -> str:
        """Return the operation as one line."""
        return f"change class {_class(self.spec)}"


@dataclass(frozen=True, slots=True)
class DeleteClass:
    """Remove a class and its leaf. One whose owner left stays for as long as it still sends:

    without it its connections would carry a mark that no class has, and lose their ceiling.
    """

    classid: Handle
    only_when_quiet: bool = True
    impact: Impact = Impact.LEAF_LOSS

    def describe(self) -> str:
        """Return the operation as one line."""
        return f"delete class {self.classid}{' once it is quiet' if self.only_when_quiet else ''}"


@dataclass(frozen=True, slots=True)
class SetLeaf:
    """Put a leaf below a class, or change the one that is there in place."""

    leaf: Leaf
    impact: Impact = Impact.HITLESS
    in_place: bool = False

    def describe(self) -> str:
        """Return the operation as one line."""
        return f"set leaf of {self.leaf.parent} to {_leaf(self.leaf)}"


@dataclass(frozen=True, slots=True)
class DeleteLeaf:
    """Take a leaf away; the kernel puts a plain fifo in its place."""

    parent: Handle
    handle: Handle
    impact: Impact = Impact.LEAF_LOSS

    def describe(self) -> str:
        """Return the operation as one line."""
        return f"delete leaf {self.handle} of {self.parent}"


@dataclass(frozen=True, slots=True)
class SetFilter:
    """Add a filter, or replace the one with the same key in one step."""

    filter: Filter
    impact: Impact = Impact.HITLESS

    def describe(self) -> str:
        """Return the operation as one line."""
        return f"set filter prio {self.filter.priority} on {_parent(self.filter.parent)}: {_match(self.filter)}"


@dataclass(frozen=True, slots=True)
class DeleteFilter:
    """Remove a filter; handle 0 stands for all of its priority."""

    filter: Filter
    impact: Impact = Impact.HITLESS

    def describe(self) -> str:
        """Return the operation as one line."""
        return f"delete filter prio {self.filter.priority} on {_parent(self.filter.parent)}: {_match(self.filter)}"


Operation = (
    AddRoot
    | SetQueue
    | AddHook
    | DeleteHook
    | SetTcx
    | RemoveTcx
    | SetXps
    | RestoreQdisc
    | DeleteRoot
    | AddClass
    | ChangeClass
    | DeleteClass
    | SetLeaf
    | DeleteLeaf
    | SetFilter
    | DeleteFilter
)


def _parent(handle: Handle) -> str:
    names = {ROOT: "root", EGRESS: "the egress hook"}
    return names.get(handle, str(handle))


def _qdisc(qdisc: HtbQdisc | MqQdisc) -> str:
    default = f" default {qdisc.default_minor:x}" if isinstance(qdisc, HtbQdisc) else ""
    return f"{qdisc.kind} {qdisc.handle}{default}"


def _class(spec: HtbClass) -> str:
    return (
        f"{spec.classid} parent {spec.parent} floor {spec.floor} ceil {spec.ceil}"
        f" burst {spec.burst_bytes}b cburst {spec.cburst_bytes}b quantum {spec.quantum_bytes}b prio {spec.prio}"
    )


def _leaf(leaf: Leaf) -> str:
    match leaf.parameters:
        case FqCodel() as p:
            return f"{LeafKind.FQ_CODEL} limit {p.limit_packets}p target {p.target_us}us"
        case Fq() as p:
            return f"{LeafKind.FQ} limit {p.limit_packets}p flow_limit {p.flow_limit_packets}p"
        case p:
            return f"{LeafKind.BFIFO} limit {p.limit_bytes}b"


def _match(found: Filter) -> str:
    match found.match:
        case BpfMatch(instructions) if found.action:
            what = f"bpf of {len(instructions)} instructions"
        case BpfMatch(instructions):
            what = f"bpf of {len(instructions)} instructions: class id from the mark, gateway ports"
        case FwMatch(mark, mask, classid):
            what = f"fw mark {mark:#x}/{mask:#x}{f' to {classid}' if classid else ''}"
        case FlowerMatch(_, protocol, port, classid):
            what = f"flower ip protocol {protocol} source port {port} to {classid}"
        case DirectBpf(name):
            what = f"eBPF {name}, which sets the tx queue"
        case other:
            what = other.kind
    if found.action is None:
        return what
    last = "" if found.action.last is None else f" to {found.action.last}, by hash"
    return f"{what}, tx queue {found.action.first}{last}"
