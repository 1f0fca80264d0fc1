"""A snapshot read as a tree of ours: who owns each class, and how it differs from the document.

The settings that the tree was made with stand in the tree itself, so a reading needs no
options: the budget is the budget class's ceil, the host's place is its parent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kura_shaper.errors import KuraShaperError
from kura_shaper.tenants.document import TenantsDocument
from kura_shaper.tenants.marks import TENANT_CLASS_MIN, MarkLayout, ReservedClass
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, build, owners_of
from kura_shaper.tree.classifier import MARK_PRIORITY, ClassifierKind
from kura_shaper.tree.diff import plan
from kura_shaper.tree.ebpf import shaped_queues_of
from kura_shaper.tree.model import (
    HTB_HANDLE,
    BpfMatch,
    DirectBpf,
    FwMatch,
    Handle,
    HostTraffic,
    HtbClass,
    Leaf,
    LeafKind,
    MqQdisc,
    OtherQdisc,
    Shape,
    SteeringKind,
)
from kura_shaper.tree.notes import Weight
from kura_shaper.tree.preflight import Permission, is_ours
from kura_shaper.tree.snapshot import ClassCounters
from kura_shaper.tree.steer import (
    TENANT_PRIORITY,
    InForce,
    has_foreign_filter,
    is_ours_at_hook,
    steering_cautions,
    steering_faults,
    steering_in_force,
)
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.tree.build import Wanted
    from kura_shaper.tree.diff import Plan
    from kura_shaper.tree.model import HtbQdisc
    from kura_shaper.tree.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class ObservedClass:
    """One class with its owner ("" when nobody's), its leaf's kind and its counters."""

    spec: HtbClass
    owner: str
    leaf: str
    counters: ClassCounters


@dataclass(frozen=True, slots=True)
class SteeringState:
    """How packets come to the shaped queues, and why that can't be trusted, a line each."""

    kind: SteeringKind | None
    faults: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.faults


@dataclass(frozen=True, slots=True)
class Observed:
    """What is on the device. drift says what would mend it, a line each; only with a document.

    steering is None in shape single, which needs none.
    """

    actual: Snapshot
    is_ours: bool
    shape: Shape | None
    classes: tuple[ObservedClass, ...]
    drift: tuple[str, ...] = ()
    steering: SteeringState | None = None

    @property
    def is_fine(self) -> bool:
        """Whether a tree of ours is there as wanted, and its packets come to it as far as a reading tells."""
        return self.is_ours and not self.drift and (self.steering is None or self.steering.is_ok)


@dataclass(frozen=True, slots=True)
class Asked:
    """Settings that an operator wants in force; None where the tree's own are to be taken."""

    budget: Rate | None = None
    shape: Shape | None = None
    shaped_queues: int | None = None
    leaf: LeafKind | None = None
    host_traffic: HostTraffic | None = None
    host_reserve: Rate | None = None
    # What the kernel has, where a leaf is asked for: a reading alone can't tell of kinds that are not in use.
    leaves: frozenset[LeafKind] | None = None


def observe(actual: Snapshot, document: TenantsDocument | None, asked: Asked | None = None) -> Observed:
    """Return a reading of a device, against a document where there is one.

    What is not asked for is taken as it is in force. Without a document only what every tree
    of ours has is looked for.
    """
    ours = is_ours(actual.root)
    shape = shape_in_force(actual)
    owners = owners_of(document or TenantsDocument("", ()))
    return Observed(
        actual=actual,
        is_ours=ours,
        shape=shape,
        classes=tuple(
            ObservedClass(
                spec=spec,
                owner=owners.get(classid.minor, ""),
                leaf=_leaf_kind(actual.leaves.get(classid)),
                counters=actual.counters.get(classid, ClassCounters()),
            )
            for classid, spec in sorted(actual.classes.items())
        ),
        drift=_found(actual, document, asked or Asked()) if ours else (),
        steering=_steering(actual) if shape is Shape.MQ else None,
    )


def _steering(actual: Snapshot) -> SteeringState:
    return SteeringState(steering_in_force(actual), steering_faults(actual), steering_cautions(actual))


def shape_in_force(actual: Snapshot) -> Shape | None:
    """Return the shape of the tree of ours on a device; None when there is none."""
    if not is_ours(actual.root):
        return None
    return Shape.MQ if isinstance(actual.root, MqQdisc) else Shape.SINGLE


def in_force_for(actual: Snapshot, settings: TreeSettings, permission: Permission) -> InForce:
    """Return what a new plan must heed. Where the queues may be made anew, in another number, nobody has a place."""
    present = in_force(actual)
    if Permission.DISRUPTION in permission and present.shaped_queues not in (0, settings.shaped_queues):
        return replace(present, placement={}, shares=())
    return present


def _shaped_queues(actual: Snapshot) -> int:
    """Return how many queues are shaped, those counted whose HTB is missing, as far as others tell of them."""
    told = [f.action.first for f in actual.filters if f.action and f.priority == TENANT_PRIORITY and is_ours_at_hook(f)]
    names = [f.match.name for f in actual.filters if isinstance(f.match, DirectBpf)]
    names += [program.name for program in (actual.tcx.programs if actual.tcx else ()) if program.is_ours]
    there = (htb.handle.major - HTB_HANDLE.major for htb in actual.htbs)
    return 1 + max((0, *told, *(shaped_queues_of(name) - 1 for name in names), *there))


def marks_in_force(actual: Snapshot) -> MarkLayout | None:
    """Return the marks that the tree on a device goes by; None when it has no classifier of ours."""
    first = (f.match for f in actual.filters if f.parent == HTB_HANDLE and f.priority == MARK_PRIORITY)
    match next(first, None):
        case BpfMatch(instructions) if len(instructions) > 1:
            mask = instructions[1][3]  # the second instruction of `bpf_program` cuts the mask out
        case FwMatch(_, mask, _):
            pass
        case _:
            return None
    try:
        return MarkLayout(mask)
    except KuraShaperError:
        return None


def in_force(actual: Snapshot) -> InForce:
    """Return what a new plan for a device must know of what is on it."""
    shape = shape_in_force(actual)
    count = _shaped_queues(actual) if shape else 0
    majors = range(HTB_HANDLE.major, HTB_HANDLE.major + count)
    budgets = [actual.classes.get(Handle(major, ReservedClass.BUDGET)) for major in majors]
    foreign_tcx = [p.name or str(p.program_id) for p in (actual.tcx.programs if actual.tcx else ()) if not p.is_ours]
    return InForce(
        shape=shape,
        placement={
            classid.minor: classid.major - HTB_HANDLE.major
            for classid in actual.classes
            if shape is Shape.MQ and classid.minor >= TENANT_CLASS_MIN
        },
        shares=tuple(budget.ceil for budget in budgets if budget) if all(budgets) else (),
        shaped_queues=count,
        steering=steering_in_force(actual),
        dropping_queues=actual.dropping_queues,
        hook=actual.hook.kind if actual.hook else "",
        foreign_tcx=tuple(foreign_tcx),
        has_foreign_filter=has_foreign_filter(actual),
    )


def _leaf_kind(leaf: Leaf | OtherQdisc | None) -> str:
    if isinstance(leaf, Leaf):
        return leaf.parameters.kind
    return leaf.kind if leaf else ""


def _found(actual: Snapshot, document: TenantsDocument | None, asked: Asked) -> tuple[str, ...]:
    missing = missing_parts(actual)
    if missing or document is None:
        return missing
    return _drift(actual, document, asked)


def missing_parts(actual: Snapshot) -> tuple[str, ...]:
    """Return what a tree of ours has whoever its tenants are, and this one has not, a line each."""
    majors = range(HTB_HANDLE.major, HTB_HANDLE.major + _shaped_queues(actual))
    there = {htb.handle.major for htb in actual.htbs}
    parts = [f"HTB {Handle(m)} of tx queue {m - HTB_HANDLE.major}" for m in majors if m not in there]
    hosts = (queue for queue in actual.dropping_queues if HTB_HANDLE.major + queue not in majors)
    parts += [f"tx queue {queue} drops whatever comes to it: its qdisc" for queue in hosts]
    for htb in actual.htbs:
        classids = [Handle(htb.handle.major, reserved) for reserved in ReservedClass]
        absent = (classid for classid in classids if classid not in actual.classes)
        parts += [f"class {classid} {ReservedClass(classid.minor).name.lower()}" for classid in absent]
        if not any(
            f.parent == htb.handle and f.priority == MARK_PRIORITY and isinstance(f.match, BpfMatch | FwMatch)
            for f in actual.filters
        ):
            parts.append("the classifier" if len(actual.htbs) == 1 else f"the classifier of {htb.handle}")
    return tuple(f"{part} is missing; `kura-shaper apply` mends it" for part in parts)


def _drift(actual: Snapshot, document: TenantsDocument, asked: Asked) -> tuple[str, ...]:
    """Return, as one line each, what would have to be done to have the tree that the document wants."""
    try:
        compared = compare(actual, document, asked)
    except KuraShaperError as error:
        return (f"no tree for this document: {error}",)
    findings = (note.message for note in compared.plan.notes if note.weight is Weight.FINDING)
    return (*(operation.describe() for operation in compared.plan.operations), *findings)


@dataclass(frozen=True, slots=True)
class Compared:
    """The tree that a document wants on a device that has one of ours, and what it would take to have it."""

    wanted: Wanted
    settings: TreeSettings
    plan: Plan


def compare(actual: Snapshot, document: TenantsDocument, asked: Asked) -> Compared:
    """Compare a whole tree of ours (`missing_parts` has nothing) with a document; what is not asked for is as it is.

    Raises UsageError and RefusedError when there is no tree for this document.
    """
    present = in_force(actual)
    first = HTB_HANDLE.major
    host = actual.classes[Handle(first, ReservedClass.HOST)]
    node = actual.classes[Handle(first, ReservedClass.BUDGET)]
    in_use = _in_use(actual)
    if asked.leaves:
        in_use = replace(in_use, leaves=asked.leaves)
    beside = HostTraffic.INSIDE if host.parent == node.classid else HostTraffic.OUTSIDE
    settings = TreeSettings(
        budget=asked.budget or Rate(sum(share.bits_per_second for share in present.shares)),
        shape=ShapeChoice(asked.shape or present.shape or Shape.SINGLE),
        shaped_queues=asked.shaped_queues or len(actual.htbs),
        leaf=asked.leaf or min(_kinds(actual.leaves.values()), key=list(LeafKind).index),
        host_traffic=asked.host_traffic or beside,
        host_reserve=asked.host_reserve or host.floor,
    )
    wanted = build(document, actual.device, settings=settings, capabilities=in_use, in_force=present)
    planned = plan(wanted, actual)
    if planned.refusals:
        # A root that would have to be rebuilt is drift too, whoever may allow it.
        planned = plan(wanted, actual, Permission.DISRUPTION)
    return Compared(wanted, settings, planned)


def _in_use(actual: Snapshot) -> Capabilities:
    """Return the kinds that the tree is made of: a reading must not try the kernel out."""
    by_mark = any(isinstance(f.match, FwMatch) and f.match.classid for f in actual.filters)
    steers = {steering_in_force(actual) or SteeringKind.SKBEDIT}
    if actual.tcx and actual.tcx.supported:
        steers.add(SteeringKind.TCX)
    return Capabilities(
        leaves=_kinds((*actual.leaves.values(), *actual.queues.values())),
        classifiers=frozenset({ClassifierKind.FW if by_mark else ClassifierKind.BPF}),
        steering=frozenset(steers),
    )


def _kinds(found: Iterable[HtbQdisc | Leaf | OtherQdisc]) -> frozenset[LeafKind]:
    return frozenset(leaf.parameters.kind for leaf in found if isinstance(leaf, Leaf)) or frozenset({LeafKind.FQ_CODEL})
