"""From a tenants document and a device to the tree that is wanted on it.

HTB                          default -> unknown
 root class                  never limits
   host                      everything unmarked; floor = host reserve
   unknown                   marks that no class has; not held back, but counted apart
   proof                     only in shape mq: the frames that prove steering
   budget                    rate = ceil = node budget, or the queue's share of it
     gateway                 the gateway's own bytes before the tenant is known
     unattributed            bytes from gateway ports without a mark
     <tenant>                floor, ceiling, leaf

In shape single the HTB is the device's root. In shape mq the root is an mq: the first tx queues
are shaped, with an HTB each, every tenant is in exactly one of them, and the host's traffic has
the other queues to itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from operator import ge
from typing import TYPE_CHECKING

from kura_shaper.errors import RefusedError, UsageError
from kura_shaper.tenants.marks import PROOF_CLASS, SHAPED_QUEUES_MAX, TENANT_CLASS_MIN, ReservedClass
from kura_shaper.tree import params
from kura_shaper.tree.allot import Allotment, allot
from kura_shaper.tree.classifier import ClassifierKind, filters
from kura_shaper.tree.devices import device_notes
from kura_shaper.tree.model import (
    HTB_HANDLE,
    MQ_HANDLE,
    ROOT,
    Handle,
    HostTraffic,
    HtbClass,
    HtbQdisc,
    Leaf,
    LeafKind,
    MqQdisc,
    Shape,
    SteeringKind,
    Tree,
    htbs_of,
)
from kura_shaper.tree.notes import Note
from kura_shaper.tree.place import place
from kura_shaper.tree.share import QueueDemand, shares
from kura_shaper.tree.steer import InForce, Layout, choose_steering, limits_of, steering
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kura_shaper.tenants.document import Tenant, TenantsDocument
    from kura_shaper.tree.model import Device, Filter, Steering

# Majors below 0x100 are ours: a tenant's leaf has its class id as major, so none collides. Each of
# these is the first of SHAPED_QUEUES_MAX, one for each shaped queue. Classes without an entry only hold others.
_LEAF_MAJORS = {
    ReservedClass.HOST: 0x40,
    ReservedClass.GATEWAY: 0x60,
    ReservedClass.UNATTRIBUTED: 0x80,
    ReservedClass.UNKNOWN: 0xA0,
}
# What is left below 0x100 for the leaves of queues that are not shaped; further queues keep the kernel's default.
_QUEUE_MAJORS = (*range(0xB0, 0x100), *range(0x30, 0x40), *range(0x50, 0x60), *range(0x70, 0x80), *range(0x90, 0xA0))
# Host traffic has these queues to itself, so it gets what Linux distributions give it.
_QUEUE_LEAVES = (LeafKind.FQ, LeafKind.FQ_CODEL)
_PROOF_CEIL = Rate(10_000_000)

# HTB serves lower numbers first where classes borrow. Floors hold whatever the priority.
_HOST_PRIO, _TENANT_PRIO, _UNATTRIBUTED_PRIO = 0, 1, 2


class ShapeChoice(StrEnum):
    """What an operator may ask for; auto takes the best shape that is proven."""

    AUTO = "auto"
    SINGLE = "single"
    MQ = "mq"


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """An operator's choices for a node's tree."""

    budget: Rate
    shape: ShapeChoice = ShapeChoice.AUTO
    shaped_queues: int = 1
    leaf: LeafKind = LeafKind.FQ_CODEL
    host_traffic: HostTraffic = HostTraffic.OUTSIDE
    host_reserve: Rate = Rate(50_000_000)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kernel was seen to accept. steering has the ways that brought packets to their queue."""

    leaves: frozenset[LeafKind] = frozenset(LeafKind)
    classifiers: frozenset[ClassifierKind] = frozenset(ClassifierKind)
    steering: frozenset[SteeringKind] = frozenset()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tree to have, and what a person should know about it."""

    tree: Tree
    notes: tuple[Note, ...]


def build(
    document: TenantsDocument,
    device: Device,
    *,
    settings: TreeSettings,
    capabilities: Capabilities,
    in_force: InForce | None = None,
) -> Wanted:
    """Return the wanted tree for a device. in_force is what is on it already.

    Raises UsageError for a shape, a rate or a number of ports that can't be had, RefusedError
    when the promises or the kernel make a tree impossible.
    """
    check_settings(settings)
    present = in_force or InForce()
    shape, kind, shape_notes = _shape(settings, device, capabilities, present)
    leaf_kind, leaf_notes = _leaf_kind(settings.leaf, capabilities)
    classifier, classifier_notes = _classifier_kind(capabilities)
    count = settings.shaped_queues if shape is Shape.MQ else 1
    inside = settings.host_traffic is HostTraffic.INSIDE
    allotment = allot(
        document.tenants,
        budget=params.whole_bytes(settings.budget),
        reserved=_host_floor(settings) if inside else Rate(0),
        own_classes=3 if inside else 2 * count,
    )
    placement = place(document.tenants, count, floors=allotment.floors, current=present.placement)
    # The class of a tenant that left stays for as long as it sends, and so does what steers to it.
    leaving = {class_id: queue for class_id, queue in present.placement.items() if queue < count}
    layout = Layout(count, device.tx_queues, leaving | placement)
    budgets = _budgets(document.tenants, settings.budget, allotment, layout, present)
    classes = tuple(
        spec
        for queue, budget in enumerate(budgets)
        for spec in _classes(
            [t for t in document.tenants if placement[t.class_id] == queue],
            device,
            settings=settings,
            allotment=allotment,
            major=HTB_HANDLE.major + queue,
            budget=budget,
            is_proven=shape is Shape.MQ,
        )
    )
    root: HtbQdisc | MqQdisc = root_qdisc(classifier)
    queues: tuple[HtbQdisc | Leaf, ...] = ()
    steer: Steering | None = None
    hook_filters: tuple[Filter, ...] = ()
    if kind is not None:
        root = MqQdisc(MQ_HANDLE)
        queues = tuple(_queues(root, classifier, layout, _queue_leaves(capabilities, layout, present), device))
        steer, hook_filters = steering(kind, document, layout)
    htbs = htbs_of(root, queues)
    tree = Tree(
        root=root,
        queues=queues,
        classes=classes,
        leaves=tuple(_leaves(classes, leaf_kind, device)),
        filters=(*_class_filters(classifier, document, htbs, placement), *hook_filters),
        steering=steer,
    )
    notes = (*shape_notes, *leaf_notes, *classifier_notes, *device_notes(device), *allotment.notes)
    return Wanted(tree, notes)


def _class_filters(
    kind: ClassifierKind, document: TenantsDocument, htbs: Iterable[HtbQdisc], placement: Mapping[int, int]
) -> Iterable[Filter]:
    for queue, htb in enumerate(htbs):
        proofs = () if htb.parent == ROOT else (PROOF_CLASS + queue,)
        yield from filters(
            kind,
            document.marks,
            gateway_ports=document.gateway.ports,
            class_ids=(*proofs, *(t.class_id for t in document.tenants if placement[t.class_id] == queue)),
            root=htb.handle,
        )


def _queues(
    root: MqQdisc, classifier: ClassifierKind, layout: Layout, leaves: Mapping[int, LeafKind], device: Device
) -> Iterable[HtbQdisc | Leaf]:
    for queue in range(layout.shaped_queues):
        yield replace(root_qdisc(classifier), handle=Handle(HTB_HANDLE.major + queue), parent=root.child(queue))
    for queue, major in zip(range(layout.shaped_queues, layout.live_queues), _QUEUE_MAJORS, strict=False):
        if queue in leaves:
            yield Leaf(
                Handle(major), root.child(queue), params.leaf_parameters(leaves[queue], params.LINE_RATE, device)
            )


def _queue_leaves(capabilities: Capabilities, layout: Layout, in_force: InForce) -> dict[int, LeafKind]:
    """Return what the host's queues get: the best kind; where the kernel has none, what its own default is stays."""
    kind = next((kind for kind in _QUEUE_LEAVES if kind in capabilities.leaves), None)
    if kind is not None:
        return dict.fromkeys(range(layout.shaped_queues, layout.live_queues), kind)
    # A plain fifo loses the default's bands, but a queue without any qdisc drops everything.
    return dict.fromkeys(in_force.dropping_queues, LeafKind.BFIFO)


def _budgets(
    tenants: Sequence[Tenant], budget: Rate, allotment: Allotment, layout: Layout, in_force: InForce
) -> tuple[Rate, ...]:
    """Return each queue's part of the budget: what is in force where that fits, since demand has moved it there."""
    if layout.shaped_queues == 1:
        return (budget,)
    floors = [2 * allotment.trickle.bits_per_second] * layout.shaped_queues
    for tenant in tenants:
        floors[layout.placement[tenant.class_id]] += allotment.floors[tenant.name].bits_per_second
    present = [share.bits_per_second for share in in_force.shares]
    total = params.whole_bytes(budget).bits_per_second
    # Shares are whole bytes a second, so that many bits may be left over of a budget that is all given out.
    spare = total - sum(present)
    if len(present) == len(floors) and all(map(ge, present, floors)) and 0 <= spare < 8 * len(floors):
        return in_force.shares
    # A queue without a tenant needs no more than its starting room, until one comes.
    inhabited = {layout.placement[tenant.class_id] for tenant in tenants}
    demands = [QueueDemand(Rate(0), is_hungry=queue in inhabited) for queue in range(layout.shaped_queues)]
    return shares(params.whole_bytes(budget), [Rate(floor) for floor in floors], demands)


def root_qdisc(classifier: ClassifierKind = ClassifierKind.BPF) -> HtbQdisc:
    """Return the root qdisc of every tree of ours in shape single, and in shape mq but for its place.

    fw filters can't tell host traffic from a mark that no class has, so there the default is the host's.
    """
    default = ReservedClass.UNKNOWN if classifier is ClassifierKind.BPF else ReservedClass.HOST
    return HtbQdisc(HTB_HANDLE, ROOT, default, params.DIRECT_QLEN_PACKETS)


def owners_of(document: TenantsDocument) -> dict[int, str]:
    """Return the name of each class by its minor: ours in lower case, then the tenants'."""
    proofs = {PROOF_CLASS + queue: "proof" for queue in range(SHAPED_QUEUES_MAX)}
    return {r.value: r.name.lower() for r in ReservedClass} | proofs | {t.class_id: t.name for t in document.tenants}


def check_settings(settings: TreeSettings) -> None:
    """Raise UsageError for settings that no device and no kernel could meet.

    A rate above the root class's would not be a limit any more.
    """
    if not 1 <= settings.shaped_queues <= SHAPED_QUEUES_MAX:
        problem = f"{settings.shaped_queues} shaped queues can't be had"
        raise UsageError(problem, remedy=f"choose 1 to {SHAPED_QUEUES_MAX}")
    if settings.shape is ShapeChoice.MQ and settings.host_traffic is HostTraffic.INSIDE:
        remedy = "use host traffic outside, or shape single"
        raise UsageError("shape mq can't hold host traffic under the budget: it leaves by other queues", remedy=remedy)
    for name, rate in (("budget", settings.budget), ("host reserve", settings.host_reserve)):
        if rate > params.LINE_RATE:
            raise UsageError(f"a {name} of {rate} bit/s is above {params.LINE_RATE}", remedy="rates are in bit/s")


def _shape(
    settings: TreeSettings, device: Device, capabilities: Capabilities, in_force: InForce
) -> tuple[Shape, SteeringKind | None, tuple[Note, ...]]:
    """Return the shape, the way to steer in it, and what to know of both.

    Raises RefusedError when mq was asked for and can't be had.
    """
    if settings.shape is ShapeChoice.SINGLE:
        return Shape.SINGLE, None, (Note("shape", "shape single: asked for"),)
    kind, why = choose_steering(capabilities.steering, in_force, host_traffic=settings.host_traffic)
    is_asked = settings.shape is ShapeChoice.MQ
    problem, remedy = _mq_problem(settings, device, in_force, is_asked=is_asked)
    if not problem and kind is None:
        problem, remedy = why, "use shape single, or auto"
    if problem and is_asked:
        raise RefusedError(f"shape mq on {device.name}: {problem}", remedy=remedy)
    if problem or kind is None:
        return Shape.SINGLE, None, (Note("shape", f"shape single: auto did not take mq, since {problem}"),)
    chosen = "asked for" if is_asked else "auto took it"
    notes = [Note("shape", f"shape mq: {chosen}, steering by {kind}, since {why}")]
    if limits_of(kind):
        notes.append(Note("steering-limits", f"steering by {kind}: {limits_of(kind)}"))
    return Shape.MQ, kind, tuple(notes)


def _mq_problem(settings: TreeSettings, device: Device, in_force: InForce, *, is_asked: bool) -> tuple[str, str]:
    """Return why a device can't or should not have shape mq, and what helps; "" when it can."""
    have, need = device.tx_queues, settings.shaped_queues
    if in_force.shape is Shape.MQ:
        # It goes on working with the one queue that is left, since that is the one that is shaped.
        need = 0 if need == 1 else need
    elif have < 2:
        return "it has a single tx queue", "use shape single"
    if need > have:
        fewer = f"shape at most {have}" if have > 1 else "use shape single"
        return (
            f"it has {have} live tx queue{'s' if have != 1 else ''} and {need} are to be shaped",
            f"{fewer}, or raise the device's channels",
        )
    if is_asked:
        return "", ""
    if in_force.shape is Shape.SINGLE:
        return "single is in force; --shape mq --allow-disruption changes it", ""
    if in_force.shape is None and not device.is_up:
        return "steering can't be proven while the link is down", ""
    return "", ""


def _leaf_kind(wanted: LeafKind, capabilities: Capabilities) -> tuple[LeafKind, tuple[Note, ...]]:
    if wanted in capabilities.leaves:
        return wanted, ()
    for kind in LeafKind:
        if kind in capabilities.leaves:
            cost = ", so flows within a tenant share one queue" if kind is LeafKind.BFIFO else ""
            return kind, (Note("leaf-degraded", f"the kernel has no {wanted}: leaves are {kind}{cost}"),)
    raise RefusedError("the kernel has no usable leaf qdisc", remedy="load sch_fq_codel, or build the kernel with it")


def _classifier_kind(capabilities: Capabilities) -> tuple[ClassifierKind, tuple[Note, ...]]:
    if ClassifierKind.BPF in capabilities.classifiers:
        return ClassifierKind.BPF, ()
    if ClassifierKind.FW in capabilities.classifiers:
        message = "the kernel refuses cls_bpf: one fw filter for each tenant instead of one program"
        return ClassifierKind.FW, (Note("classifier-degraded", message),)
    raise RefusedError("the kernel has neither cls_bpf nor cls_fw with cls_flower", remedy="load the module cls_bpf")


def _host_floor(settings: TreeSettings) -> Rate:
    # As the kernel holds it, so that a tree that is read back yields the same promises.
    return params.whole_bytes(max(settings.host_reserve, params.TRICKLE_MIN))


def _classes(
    tenants: Iterable[Tenant],
    device: Device,
    *,
    settings: TreeSettings,
    allotment: Allotment,
    major: int,
    budget: Rate,
    is_proven: bool,
) -> Iterable[HtbClass]:
    """Yield the classes of one HTB. budget is its part of the node's."""

    def make(minor: int, parent: int, floor: Rate, ceil: Rate, prio: int) -> HtbClass:
        place, above = Handle(major, minor), Handle(major, parent)
        return params.htb_class(place, above, floor=floor, ceil=ceil, prio=prio, device=device)

    inside = settings.host_traffic is HostTraffic.INSIDE
    trickle, whole = allotment.trickle, settings.budget
    top = ReservedClass.BUDGET
    above = top if inside else ReservedClass.ROOT
    widest = whole if inside else params.LINE_RATE
    host = make(ReservedClass.HOST, above, _host_floor(settings), widest, _HOST_PRIO)
    unknown = make(ReservedClass.UNKNOWN, above, trickle, widest, _HOST_PRIO)
    node = params.inner_class(Handle(major, top), Handle(major, ReservedClass.ROOT), rate=budget, device=device)
    yield params.inner_class(Handle(major, ReservedClass.ROOT), Handle(major), rate=params.LINE_RATE, device=device)
    yield from (node, host, unknown) if inside else (host, unknown, node)
    if is_proven:
        minor = PROOF_CLASS + major - HTB_HANDLE.major
        yield make(minor, ReservedClass.ROOT, params.TRICKLE_MIN, _PROOF_CEIL, _HOST_PRIO)
    yield make(ReservedClass.GATEWAY, top, trickle, whole, _TENANT_PRIO)
    yield make(ReservedClass.UNATTRIBUTED, top, trickle, whole, _UNATTRIBUTED_PRIO)
    for tenant in tenants:
        floor, ceil = allotment.floors[tenant.name], allotment.ceilings[tenant.name]
        yield make(tenant.class_id, top, floor, ceil, _TENANT_PRIO)


def _leaves(classes: Iterable[HtbClass], kind: LeafKind, device: Device) -> Iterable[Leaf]:
    for spec in classes:
        minor = spec.classid.minor
        major = minor if minor >= TENANT_CLASS_MIN else _leaf_major(minor, spec.classid.major - HTB_HANDLE.major)
        if major is not None:
            yield Leaf(Handle(major), spec.classid, params.leaf_parameters(kind, spec.ceil, device))


def _leaf_major(minor: int, queue: int) -> int | None:
    """Return the handle of the leaf of a class of ours; None for those that hold others, or need none."""
    if PROOF_CLASS <= minor < PROOF_CLASS + SHAPED_QUEUES_MAX:
        return None
    first = _LEAF_MAJORS.get(ReservedClass(minor))
    return None if first is None else first + queue
