"""From a tenants document and a device to the tree that is wanted on it.

HTB root                     default -> unknown
 root class                  never limits
   host                      everything unmarked; floor = host reserve
   unknown                   marks that no class has; not held back, but counted apart
   budget                    rate = ceil = node budget
     gateway                 the gateway's own bytes before the tenant is known
     unattributed            bytes from gateway ports without a mark
     <tenant>                floor, ceiling, leaf
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.errors import RefusedError, UsageError
from kura_shaper.tenants.marks import TENANT_CLASS_MIN, ReservedClass
from kura_shaper.tree import params
from kura_shaper.tree.allot import Allotment, allot
from kura_shaper.tree.classifier import ClassifierKind, filters
from kura_shaper.tree.model import ROOT, Handle, HostTraffic, HtbClass, HtbQdisc, Leaf, LeafKind, Shape, Tree
from kura_shaper.tree.notes import Note
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.tree.model import Device

# Majors below 0x100 are ours: a tenant's leaf has its class id as major, so none collides.
ROOT_MAJOR = 0x20
# Classes without an entry only hold others.
_LEAF_MAJORS = {
    ReservedClass.HOST: 0x40,
    ReservedClass.GATEWAY: 0x60,
    ReservedClass.UNATTRIBUTED: 0x80,
    ReservedClass.UNKNOWN: 0xA0,
}

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
    leaf: LeafKind = LeafKind.FQ_CODEL
    host_traffic: HostTraffic = HostTraffic.OUTSIDE
    host_reserve: Rate = Rate(50_000_000)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kernel was seen to accept."""

    leaves: frozenset[LeafKind] = frozenset(LeafKind)
    classifiers: frozenset[ClassifierKind] = frozenset(ClassifierKind)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tree to have, and what a person should know about it."""

    tree: Tree
    notes: tuple[Note, ...]


def build(document: TenantsDocument, device: Device, *, settings: TreeSettings, capabilities: Capabilities) -> Wanted:
    """Return the wanted tree for a device.

    Raises UsageError for a shape, a rate or a number of ports that can't be had, RefusedError
    when the promises or the kernel make a tree impossible.
    """
    check_settings(settings)
    shape, shape_note = _shape(settings.shape)
    leaf_kind, leaf_notes = _leaf_kind(settings.leaf, capabilities)
    classifier, classifier_notes = _classifier_kind(capabilities)
    inside = settings.host_traffic is HostTraffic.INSIDE
    allotment = allot(
        document.tenants,
        budget=params.whole_bytes(settings.budget),
        reserved=_host_floor(settings) if inside else Rate(0),
        own_classes=3 if inside else 2,
    )
    root = root_qdisc(classifier)
    classes = _classes(document, device, settings=settings, allotment=allotment)
    tree = Tree(
        shape=shape,
        root=root,
        classes=classes,
        leaves=tuple(_leaves(classes, leaf_kind, device)),
        filters=filters(
            classifier,
            document.marks,
            gateway_ports=document.gateway.ports,
            class_ids=(t.class_id for t in document.tenants),
            root=root.handle,
        ),
    )
    return Wanted(tree, (shape_note, *leaf_notes, *classifier_notes, *_device_notes(device), *allotment.notes))


def root_qdisc(classifier: ClassifierKind = ClassifierKind.BPF) -> HtbQdisc:
    """Return the root qdisc of every tree of ours in shape single.

    fw filters can't tell host traffic from a mark that no class has, so there the default is the host's.
    """
    default = ReservedClass.UNKNOWN if classifier is ClassifierKind.BPF else ReservedClass.HOST
    return HtbQdisc(Handle(ROOT_MAJOR), ROOT, default, params.DIRECT_QLEN_PACKETS)


def owners_of(document: TenantsDocument) -> dict[int, str]:
    """Return the name of each class by its minor: ours in lower case, then the tenants'."""
    return {r.value: r.name.lower() for r in ReservedClass} | {t.class_id: t.name for t in document.tenants}


def check_settings(settings: TreeSettings) -> None:
    """Raise UsageError for settings that no device and no kernel could meet.

    A rate above the root class's would not be a limit any more.
    """
    _shape(settings.shape)
    for name, rate in (("budget", settings.budget), ("host reserve", settings.host_reserve)):
        if rate > params.LINE_RATE:
            raise UsageError(f"a {name} of {rate} bit/s is above {params.LINE_RATE}", remedy="rates are in bit/s")


def _shape(choice: ShapeChoice) -> tuple[Shape, Note]:
    if choice is ShapeChoice.MQ:
        raise UsageError("shape mq is not available in this version", remedy="use shape single, or auto")
    if choice is ShapeChoice.AUTO:
        return Shape.SINGLE, Note("shape", "shape single: auto takes mq only with proven steering, which is not built")
    return Shape.SINGLE, Note("shape", "shape single: asked for")


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


def _device_notes(device: Device) -> tuple[Note, ...]:
    if device.tx_queue_len_packets > 0:
        return ()
    # The kernel sizes the fifo of a new class by it, until the leaf takes its place in the same send.
    message = f"{device.name} has a txqueuelen of 0: a class that is added drops packets until its leaf is there"
    return (Note("txqueuelen-0", f"{message}; `ip link set {device.name} txqueuelen 1000` mends it"),)


def _host_floor(settings: TreeSettings) -> Rate:
    # As the kernel holds it, so that a tree that is read back yields the same promises.
    return params.whole_bytes(max(settings.host_reserve, params.TRICKLE_MIN))


def _classes(
    document: TenantsDocument, device: Device, *, settings: TreeSettings, allotment: Allotment
) -> tuple[HtbClass, ...]:
    def handle(minor: int) -> Handle:
        return Handle(ROOT_MAJOR, minor)

    def make(minor: int, parent: int, floor: Rate, ceil: Rate, prio: int) -> HtbClass:
        return params.htb_class(handle(minor), handle(parent), floor=floor, ceil=ceil, prio=prio, device=device)

    inside = settings.host_traffic is HostTraffic.INSIDE
    budget, trickle = settings.budget, allotment.trickle
    top = ReservedClass.BUDGET
    place = top if inside else ReservedClass.ROOT
    widest = budget if inside else params.LINE_RATE
    host = make(ReservedClass.HOST, place, _host_floor(settings), widest, _HOST_PRIO)
    unknown = make(ReservedClass.UNKNOWN, place, trickle, widest, _HOST_PRIO)
    root = params.inner_class(handle(ReservedClass.ROOT), handle(0), rate=params.LINE_RATE, device=device)
    node = params.inner_class(handle(top), handle(ReservedClass.ROOT), rate=budget, device=device)
    return (
        root,
        *((node, host, unknown) if inside else (host, unknown, node)),
        make(ReservedClass.GATEWAY, top, trickle, budget, _TENANT_PRIO),
        make(ReservedClass.UNATTRIBUTED, top, trickle, budget, _UNATTRIBUTED_PRIO),
        *(
            make(t.class_id, top, allotment.floors[t.name], allotment.ceilings[t.name], _TENANT_PRIO)
            for t in document.tenants
        ),
    )


def _leaves(classes: Iterable[HtbClass], kind: LeafKind, device: Device) -> Iterable[Leaf]:
    for spec in classes:
        minor = spec.classid.minor
        major = minor if minor >= TENANT_CLASS_MIN else _LEAF_MAJORS.get(ReservedClass(minor))
        if major is not None:
            yield Leaf(Handle(major), spec.classid, params.leaf_parameters(kind, spec.ceil, device))
