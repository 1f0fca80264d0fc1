"""What was read of a node, and over a while of its traffic. What could not be read is Unknown, never left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kura_shaper.tree.observe import Asked
from kura_shaper.tree.snapshot import Unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kura_shaper.haproxy.sessions import Attribution
    from kura_shaper.kernel.byways import HardwareFilter, Link, MarkRule, Port
    from kura_shaper.kernel.processes import Holders
    from kura_shaper.kernel.prove import Proof
    from kura_shaper.kernel.sockets import Connection, Listener, XdpSocket
    from kura_shaper.kernel.softnet import Softnet
    from kura_shaper.measure import Series
    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.tree.build import Wanted
    from kura_shaper.tree.model import Device
    from kura_shaper.tree.observe import Compared
    from kura_shaper.tree.snapshot import Snapshot
    from kura_shaper.verify.active import Load
    from kura_shaper.verify.after import Facts
    from kura_shaper.verify.deployments import Deployment


NOT_READ = Unknown("not read")


@dataclass(frozen=True, slots=True)
class Question:
    """What was promised, and what to look at it by.

    gateway is the short name of the gateway's processes. An old worker of it may live for old_worker_s after a
    reload, and so many of a million segments may be sent again before that is a finding. deployments are those of the
    cluster, None when nobody gave them.
    """

    document: TenantsDocument
    asked: Asked = field(default_factory=Asked)
    gateway: str = "haproxy"
    old_worker_s: int = 1_800
    resent_per_million: int = 20_000
    deployments: tuple[Deployment, ...] | None = None


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One reading of everything that stands still.

    proof is None where no steering is in force to prove; default_devices are those of the default routes, other_trees
    the others of them that have a tree of ours; attribution is None when no gateway was to be asked;
    bandwidth_manager is the path of what Cilium's leaves behind while it is on, "" without that; boot names this
    boot of the node.
    """

    device: Device
    snapshot: Snapshot | Unknown
    proof: Proof | None = None
    links: tuple[Link, ...] | Unknown = ()
    rules: tuple[MarkRule, ...] | Unknown = ()
    port: Port | Unknown = NOT_READ
    xdp_sockets: tuple[XdpSocket, ...] | Unknown = ()
    hardware_filters: tuple[HardwareFilter, ...] | Unknown = ()
    default_devices: tuple[str, ...] | Unknown = ()
    other_trees: tuple[str, ...] = ()
    listeners: tuple[Listener, ...] | Unknown = ()
    holders: Holders | Unknown = NOT_READ
    attribution: Attribution | Unknown | None = None
    bandwidth_manager: str = ""
    boot: str = ""


@dataclass(frozen=True, slots=True)
class Sockets:
    """The gateway's connections at one moment, and whose they are by the gateway's own account."""

    connections: tuple[Connection, ...]
    attribution: Attribution | Unknown | None = None


@dataclass(frozen=True, slots=True)
class Hungry:
    """A stretch of time during which a class always had packets waiting, and what it and the node sent meanwhile."""

    start_ns: int
    end_ns: int
    sent_bytes: int
    budget_bytes: int

    @property
    def duration_ns(self) -> int:
        """How long it was."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Traffic:
    """A while of a node's traffic, by its counters.

    `sent` has the bytes of each class id (a tenant's on all its queues together), `hungry` the longest stretches
    by class id, `device` and `root` what the device and its root qdisc counted, `outside_bytes` what the device sent
    beyond its root qdisc, at the most cautious count. `broken` says, by class id, why a counter can't be used.
    before and after are the gateway's connections at both ends; `ways` has the device that a peer is reached by.
    backlog_bytes waited in each class at the end, dropped_packets were dropped there meanwhile.
    """

    start_ns: int
    end_ns: int
    window_ns: int
    readings: int
    sent: Mapping[int, Series]
    device: Series
    root: Series
    device_packets: int = 0
    outside_bytes: int = 0
    direct_packets: int = 0
    longest_window_ns: int = 0
    vanished_at_ns: int | None = None
    hungry: Mapping[int, tuple[Hungry, ...]] = field(default_factory=dict)
    broken: Mapping[int, str] = field(default_factory=dict)
    before: Sockets | Unknown = NOT_READ
    after: Sockets | Unknown = NOT_READ
    backlog_bytes: Mapping[int, int] = field(default_factory=dict)
    dropped_packets: Mapping[int, int] = field(default_factory=dict)
    ways: Mapping[str, int] = field(default_factory=dict)
    softnet: tuple[Softnet, Softnet] | Unknown = NOT_READ

    @property
    def duration_ns(self) -> int:
        """How long it was looked."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Observed:
    """All that checks are made of.

    `expected` is the document's tree on this device and what it would take to have it, Unknown where there is no
    tree of ours to compare; `wanted` is that tree alone, also where none is there yet. `impossible` is why there can
    be none at all. traffic, load and earlier are None when they were not looked at, made or given.
    """

    question: Question
    node: NodeReading
    wanted: Wanted | Unknown
    expected: Compared | Unknown
    impossible: str = ""
    traffic: Traffic | Unknown | None = None
    load: Load | Unknown | None = None
    earlier: Facts | None = None
