"""A snapshot read as a tree of ours: who owns each class, and how it differs from the document.

The settings that the tree was made with stand in the tree itself, so a reading needs no
options: the budget is the budget class's ceil, the host's place is its parent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.errors import KuraShaperError
from kura_shaper.tenants.document import TenantsDocument
from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.build import Capabilities, TreeSettings, build, owners_of, root_qdisc
from kura_shaper.tree.classifier import MARK_PRIORITY, ClassifierKind
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import BpfMatch, FwMatch, Handle, HostTraffic, HtbClass, Leaf, LeafKind, OtherQdisc, Shape
from kura_shaper.tree.notes import Weight
from kura_shaper.tree.preflight import Permission, is_ours
from kura_shaper.tree.snapshot import ClassCounters

if TYPE_CHECKING:
    from kura_shaper.tree.snapshot import Snapshot
    from kura_shaper.units import Rate


@dataclass(frozen=True, slots=True)
class ObservedClass:
    """One class with its owner ("" when nobody's), its leaf's kind and its counters."""

    spec: HtbClass
    owner: str
    leaf: str
    counters: ClassCounters


@dataclass(frozen=True, slots=True)
class Observed:
    """What is on the device. drift says what would mend it, a line each; only with a document."""

    actual: Snapshot
    is_ours: bool
    shape: Shape | None
    classes: tuple[ObservedClass, ...]
    drift: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """Settings that an operator wants in force; None where the tree's own are to be taken."""

    budget: Rate | None = None
    leaf: LeafKind | None = None
    host_traffic: HostTraffic | None = None
    host_reserve: Rate | None = None


def observe(actual: Snapshot, document: TenantsDocument | None, asked: Asked | None = None) -> Observed:
    """Return a reading of a device, against a document where there is one.

    What is not asked for is taken as it is in force. Without a document only what every tree
    of ours has is looked for.
    """
    ours = is_ours(actual.root, root_qdisc())
    owners = owners_of(document or TenantsDocument("", ()))
    return Observed(
        actual=actual,
        is_ours=ours,
        shape=Shape.SINGLE if ours else None,
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
    )


def _leaf_kind(leaf: Leaf | OtherQdisc | None) -> str:
    if isinstance(leaf, Leaf):
        return leaf.parameters.kind
    return leaf.kind if leaf else ""


def _found(actual: Snapshot, document: TenantsDocument | None, asked: Asked) -> tuple[str, ...]:
    missing = _missing(actual)
    if missing or document is None:
        return missing
    return _drift(actual, document, asked)


def _missing(actual: Snapshot) -> tuple[str, ...]:
    """Return what a tree of ours has whoever its tenants are, and this one has not."""
    major = root_qdisc().handle.major
    absent = [r for r in ReservedClass if Handle(major, r) not in actual.classes]
    parts = [f"class {Handle(major, r)} {r.name.lower()}" for r in absent]
    if not any(f.priority == MARK_PRIORITY and isinstance(f.match, BpfMatch | FwMatch) for f in actual.filters):
        parts.append("the classifier")
    return tuple(f"{part} is missing; `kura-shaper apply` mends it" for part in parts)


def _drift(actual: Snapshot, document: TenantsDocument, asked: Asked) -> tuple[str, ...]:
    """Return, as one line each, what would have to be done to have the tree that the document wants."""
    root = root_qdisc().handle
    host = actual.classes[Handle(root.major, ReservedClass.HOST)]
    node = actual.classes[Handle(root.major, ReservedClass.BUDGET)]
    in_use = _in_use(actual)
    in_force = HostTraffic.INSIDE if host.parent == node.classid else HostTraffic.OUTSIDE
    settings = TreeSettings(
        budget=asked.budget or node.ceil,
        leaf=asked.leaf or min(in_use.leaves, key=list(LeafKind).index),
        host_traffic=asked.host_traffic or in_force,
        host_reserve=asked.host_reserve or host.floor,
    )
    try:
        wanted = build(document, actual.device, settings=settings, capabilities=in_use)
    except KuraShaperError as error:
        return (f"no tree for this document: {error}",)
    # A root that would have to be rebuilt is drift too, whoever may allow it.
    planned = plan(wanted, actual, Permission.DISRUPTION)
    findings = (note.message for note in planned.notes if note.weight is Weight.FINDING)
    return (*(operation.describe() for operation in planned.operations), *findings)


def _in_use(actual: Snapshot) -> Capabilities:
    """Return the kinds that the tree is made of: a reading must not try the kernel out."""
    leaves = {leaf.parameters.kind for leaf in actual.leaves.values() if isinstance(leaf, Leaf)}
    by_mark = any(isinstance(f.match, FwMatch) for f in actual.filters)
    return Capabilities(
        leaves=frozenset(leaves or {LeafKind.FQ_CODEL}),
        classifiers=frozenset({ClassifierKind.FW if by_mark else ClassifierKind.BPF}),
    )
