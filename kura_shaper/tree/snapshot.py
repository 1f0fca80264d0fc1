"""What a device's tree is at one moment, or Unknown: a failed read never looks like an empty kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kura_shaper.tree.model import MqQdisc, OtherQdisc, htbs_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kura_shaper.tree.ebpf import TcxState
    from kura_shaper.tree.model import Device, Filter, Handle, HtbClass, HtbQdisc, Leaf, Root


@dataclass(frozen=True, slots=True)
class Unknown:
    """The state could not be read; reason is one line for people."""

    reason: str


class ClassCounters(NamedTuple):
    """Counters of one class since it was created. A tuple, since every scrape makes thousands."""

    sent_bytes: int = 0
    sent_packets: int = 0
    dropped_packets: int = 0
    overlimits: int = 0
    backlog_bytes: int = 0
    backlog_packets: int = 0
    lended: int = 0
    borrowed: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One reading of a device's qdiscs, classes and filters.

    root is None when the device has no qdisc at all. leaves maps a class to the qdisc
    below it, queues an mq's place to the qdisc there. verbatim has every qdisc as the kernel's
    own bytes, which is what a journal can bring back. hook is what stands at the ingress and
    egress hooks, tcx the programs ahead of it (None when that could not be asked), xps the CPU masks
    of the queues that have one (None when unknown), xps_rxqs the queues that are chosen by the rx queue
    of a connection, ahead of those masks.
    """

    device: Device
    root: Root
    queues: Mapping[Handle, HtbQdisc | Leaf | OtherQdisc] = field(default_factory=dict)
    classes: Mapping[Handle, HtbClass] = field(default_factory=dict)
    leaves: Mapping[Handle, Leaf | OtherQdisc] = field(default_factory=dict)
    filters: tuple[Filter, ...] = ()
    verbatim: tuple[OtherQdisc, ...] = ()
    counters: Mapping[Handle, ClassCounters] = field(default_factory=dict)
    hook: OtherQdisc | None = None
    tcx: TcxState | None = None
    xps: Mapping[int, int] | None = field(default_factory=dict)
    xps_rxqs: frozenset[int] = frozenset()
    direct_packets: int = 0
    taken_at_ns: int = 0

    @property
    def htbs(self) -> tuple[HtbQdisc, ...]:
        """The HTB at the root, or those of ours below an mq root, in the order of their queues."""
        return htbs_of(self.root, self.queues.values())

    @property
    def dropping_queues(self) -> tuple[int, ...]:
        """The live tx queues below an mq root that have no qdisc: the kernel drops whatever comes to them."""
        if not isinstance(self.root, MqQdisc) or not self.device.is_up:
            return ()
        return tuple(q for q in range(self.device.tx_queues) if self.root.child(q) not in self.queues)

    @property
    def has_default_root(self) -> bool:
        """Whether nobody chose what is at the root: there is nothing, or the kernel's own default."""
        return self.root is None or (isinstance(self.root, OtherQdisc) and self.root.is_kernel_default)
