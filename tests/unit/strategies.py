"""Random regions and nodes, and trees brought onto a fake kernel: what the planner is tested on.

Values come mostly from small pools, so that two random cases share tenants, rates and
marks, and a plan from one to the other has something to leave alone.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from kura_shaper.kernel.fake import FakeKernel
from kura_shaper.kernel.fake_beside import FakeBeside
from kura_shaper.tenants.document import Gateway, Tenant, TenantsDocument
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, Wanted, build
from kura_shaper.tree.classifier import ClassifierKind
from kura_shaper.tree.diff import plan
from kura_shaper.tree.ebpf import TcxProgram, TcxState
from kura_shaper.tree.model import (
    HOOK,
    ROOT,
    Device,
    Handle,
    HostTraffic,
    Leaf,
    LeafKind,
    MqQdisc,
    OtherQdisc,
    SteeringKind,
)
from kura_shaper.tree.params import TRICKLE_MIN
from kura_shaper.tree.snapshot import Snapshot
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.tree.model import HtbQdisc
    from kura_shaper.tree.operations import Operation
    from kura_shaper.tree.steer import InForce

ETH0 = Device("eth0", 2)


@dataclass(frozen=True)
class Case:
    """Everything that a wanted tree follows from."""

    document: TenantsDocument
    settings: TreeSettings
    device: Device = ETH0
    capabilities: Capabilities = field(default_factory=Capabilities)

    def wanted(self, in_force: InForce | None = None) -> Wanted:
        return build(
            self.document, self.device, settings=self.settings, capabilities=self.capabilities, in_force=in_force
        )


def document(*tenants: Tenant, mask: int = 0xFFFF0000, ports: tuple[int, ...] = (443, 7443)) -> TenantsDocument:
    return TenantsDocument("test", tenants, MarkLayout(mask), Gateway(https_ports=ports, peer_ports=()))


def tenant(class_id: int, floor: str = "25M", ceiling: str = "500M") -> Tenant:
    return Tenant(f"t{class_id:x}", class_id, Rate.parse(floor), Rate.parse(ceiling))


def case(
    *tenants: Tenant,
    budget: str = "3G",
    mask: int = 0xFFFF0000,
    ports: tuple[int, ...] = (443, 7443),
    classifier: ClassifierKind = ClassifierKind.BPF,
    leaf: LeafKind = LeafKind.FQ_CODEL,
    host_traffic: HostTraffic = HostTraffic.OUTSIDE,
    device: Device = ETH0,
) -> Case:
    return Case(
        document(*tenants, mask=mask, ports=ports),
        TreeSettings(Rate.parse(budget), leaf=leaf, host_traffic=host_traffic),
        device,
        Capabilities(classifiers=frozenset({classifier})),
    )


def mq_case(
    *tenants: Tenant,
    shaped: int = 1,
    live: int = 4,
    steering: SteeringKind = SteeringKind.SKBEDIT,
    shape: ShapeChoice = ShapeChoice.MQ,
    budget: str = "3G",
    mask: int = 0xFFFF0000,
    classifier: ClassifierKind = ClassifierKind.BPF,
) -> Case:
    """A case of shape mq on a device with so many live queues, where one way of steering was proven."""
    made = case(*tenants, budget=budget, mask=mask, classifier=classifier, device=replace(ETH0, tx_queues=live))
    return replace(
        made,
        settings=replace(made.settings, shape=shape, shaped_queues=shaped),
        capabilities=replace(made.capabilities, steering=frozenset({steering})),
    )


MASKS = st.sampled_from([0xFFFF0000, 0x0FFF0000, 0x01FF0000, 0x03FE0000, 0x0000FFFF, 0x001FFFE0])
CLASS_IDS = [*range(0x100, 0x110), 0x200, 0x1FE, 0x8001, 0xFFFE]
RATES = [0, 8, 62_500, 300_000, 999_999, 1_000_000, 25_000_000, 250_000_000, 2_000_000_000]
CEILING_MIN = 64_000
PORTS = st.sampled_from([(), (443,), (443, 7443), (400, 443), (443, 7443, 8443)])
DEVICES = st.sampled_from(
    [Device("eth0", 2, mtu, gso_max) for mtu in (1280, 1500, 9000, 65536) for gso_max in (16_384, 65_536, 524_280)]
)


@st.composite
def tenants(draw: st.DrawFn, class_id_max: int = 0xFFFE, count_max: int = 12) -> tuple[Tenant, ...]:
    """Tenants by class id. Rates come from the pool, or are one that no other case has."""
    class_ids = [class_id for class_id in CLASS_IDS if class_id <= class_id_max]
    pool = [*RATES, draw(st.integers(0, 10**10))]
    rates = st.sampled_from(pool)
    each = st.tuples(st.sampled_from(class_ids), rates, rates)
    drawn = draw(st.lists(each, max_size=count_max, unique_by=lambda parts: parts[0]))
    return tuple(
        Tenant(f"t{class_id:x}", class_id, Rate(floor), Rate(max(floor, ceiling, CEILING_MIN)))
        for class_id, floor, ceiling in sorted(drawn)
    )


@st.composite
def documents(draw: st.DrawFn) -> TenantsDocument:
    marks = MarkLayout(draw(MASKS))
    gateway = Gateway(https_ports=draw(PORTS), peer_ports=())
    return TenantsDocument("test", draw(tenants(marks.class_id_max)), marks, gateway)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A case that a tree can be built for: its budget holds at least a trickle for everyone."""
    region = draw(documents())
    host_traffic, reserve = draw(st.sampled_from(HostTraffic)), Rate(draw(st.sampled_from(RATES)))
    # Our own two or three classes, the host, and what rounding to whole bytes takes.
    needed = (len(region.tenants) + 4) * TRICKLE_MIN.bits_per_second + 8
    if host_traffic is HostTraffic.INSIDE:
        needed += reserve.bits_per_second
    leaf, spare = draw(st.sampled_from(LeafKind)), draw(st.sampled_from(RATES) | st.integers(0, 10**10))
    return Case(
        region,
        TreeSettings(Rate(max(needed, spare)), leaf=leaf, host_traffic=host_traffic, host_reserve=reserve),
        draw(DEVICES),
        Capabilities(frozenset({leaf}), frozenset({draw(st.sampled_from(ClassifierKind))})),
    )


STEERING = st.sampled_from(SteeringKind)


@st.composite
def mq_cases(draw: st.DrawFn, shaped_max: int = 16) -> Case:
    """A case of shape mq: the budget holds a trickle for our classes on every shaped queue too."""
    made = draw(cases())
    shaped = draw(st.integers(1, shaped_max))
    live = draw(st.integers(max(2, shaped), 24) | st.sampled_from([64, 300]))
    budget = Rate(made.settings.budget.bits_per_second + 2 * shaped * TRICKLE_MIN.bits_per_second)
    return replace(
        made,
        device=replace(made.device, tx_queues=live),
        settings=replace(
            made.settings,
            budget=budget,
            shape=ShapeChoice.MQ,
            shaped_queues=shaped,
            host_traffic=HostTraffic.OUTSIDE,
        ),
        capabilities=replace(made.capabilities, steering=frozenset({draw(STEERING)})),
    )


OURS_BY_NAME = TcxProgram(7, "ks_0123456789ab", is_ours=True)
FOREIGN_PROGRAM = TcxProgram(9, "cil_to_netdev", is_ours=False)
CLSACT = OtherQdisc("clsact", Handle(0xFFFF), HOOK)


def unshaped(device: Device) -> Snapshot:
    """What a device with several queues has before anybody touches it."""
    mq = OtherQdisc("mq", Handle(0), ROOT)
    queues = [OtherQdisc("fq_codel", Handle(0), Handle(0, queue + 1)) for queue in range(device.tx_queues)]
    return Snapshot(device, mq, verbatim=(mq, *queues), tcx=TcxState(supported=True))


def snapshot_of(wanted: Wanted, device: Device) -> Snapshot:
    """A reading of a device that has just this tree."""
    tree = wanted.tree
    qdiscs = [OtherQdisc("", qdisc.handle, qdisc.parent) for qdisc in (tree.root, *tree.queues, *tree.leaves)]
    queues: dict[Handle, HtbQdisc | Leaf | OtherQdisc] = {}
    if isinstance(tree.root, MqQdisc):
        places = [tree.root.child(queue) for queue in range(device.tx_queues)]
        queues = {place: OtherQdisc("pfifo", Handle(0), place) for place in places}
    programs: tuple[TcxProgram, ...] = ()
    if tree.steering and tree.steering.kind is SteeringKind.TCX and tree.steering.program:
        programs = (TcxProgram(1, tree.steering.program.name, is_ours=True),)
    # A class without a leaf of ours, such as a proof's, keeps the plain fifo that the kernel gives it.
    inner = {spec.parent for spec in tree.classes}
    plain = {c.classid: OtherQdisc("pfifo", Handle(0), c.classid) for c in tree.classes if c.classid not in inner}
    return Snapshot(
        device,
        tree.root,
        queues={**queues, **{qdisc.parent: qdisc for qdisc in tree.queues}},
        classes={spec.classid: spec for spec in tree.classes},
        leaves={**plain, **{leaf.parent: leaf for leaf in tree.leaves}},
        filters=tuple(sorted(tree.filters, key=lambda f: f.key)),
        verbatim=(*qdiscs, CLSACT) if tree.has_hook else tuple(qdiscs),
        hook=CLSACT if tree.has_hook else None,
        tcx=TcxState(supported=True, programs=programs),
    )


def kernel_in(actual: Snapshot) -> FakeKernel:
    """A fake kernel that is in this state."""
    kernel = FakeKernel(actual.device, unshaped(actual.device).root, default_kind="pfifo")
    kernel._root, kernel._hook = actual.root, actual.hook
    if isinstance(actual.root, MqQdisc):
        places = {*actual.queues, *(actual.root.child(queue) for queue in range(actual.device.tx_queues))}
        kernel._queues = {place: actual.queues.get(place) for place in sorted(places)}
    kernel._classes, kernel._leaves = dict(actual.classes), dict(actual.leaves)
    kernel._filters = {found.key: found for found in actual.filters}
    kernel._beside = FakeBeside(actual.tcx or TcxState(supported=False), dict(actual.xps or {}))
    return kernel


def replayed(actual: Snapshot, operations: Iterable[Operation]) -> Snapshot:
    """What a device has after these operations, of which a kernel refuses none."""
    kernel = kernel_in(actual)
    refused = [str(error) for error in kernel.send([*operations]) if error]
    assert not refused, refused
    return kernel.snapshot()


def kernel_with(wanted: Wanted, device: Device = ETH0) -> FakeKernel:
    """A fake kernel that a tree was brought onto, from nothing."""
    kernel = FakeKernel(device)
    bring(kernel, wanted)
    return kernel


def bring(kernel: FakeKernel, wanted: Wanted) -> None:
    """Plan and carry out; nothing may be refused."""
    refused = [error for error in kernel.send(plan(wanted, kernel.snapshot()).operations) if error]
    assert not refused
    assert_tree(kernel.snapshot(), wanted)


def fork(kernel: FakeKernel) -> FakeKernel:
    """A kernel in the same state, whose changes the first does not see."""
    twin = copy(kernel)
    twin.sent, twin._others = list(kernel.sent), list(kernel._others)
    twin._classes, twin._leaves, twin._filters = dict(kernel._classes), dict(kernel._leaves), dict(kernel._filters)
    return twin


def assert_tree(actual: Snapshot, wanted: Wanted) -> None:
    """What is there is the wanted tree, nothing less and nothing more."""
    tree = wanted.tree
    assert actual.root == tree.root
    assert dict(actual.classes) == {spec.classid: spec for spec in tree.classes}
    assert dict(actual.leaves) == {leaf.parent: leaf for leaf in tree.leaves}
    assert actual.filters == tuple(sorted(tree.filters, key=lambda f: f.key))
