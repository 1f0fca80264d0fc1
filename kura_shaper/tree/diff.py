"""From what is there to what is wanted: operations in an order that is safe at every step.

1. Everything that shrinks goes to the smaller of old and new, children before parents,
   and what has to go goes.
2. Then everything grows or is added, parents before children: class, leaf, and last the
   filter that sends packets there.

So at every instant floor <= ceil <= the parent's ceil, and floors never add up to more
than the parent's rate: a kill between any two operations leaves a valid tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.allot import Note
from kura_shaper.tree.classifier import OUR_PRIORITIES
from kura_shaper.tree.model import Leaf, OtherQdisc
from kura_shaper.tree.operations import (
    AddClass,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteRoot,
    Impact,
    Operation,
    SetFilter,
    SetLeaf,
)
from kura_shaper.tree.preflight import Permission, Refusal, is_ours, preflight
from kura_shaper.tree.snapshot import Snapshot, Unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kura_shaper.tree.build import Wanted
    from kura_shaper.tree.model import Filter, Handle, HtbClass, HtbQdisc, Tree

_OUR_MINORS = frozenset(ReservedClass)


@dataclass(frozen=True, slots=True)
class Plan:
    """Operations in order. With refusals, or when the state is unknown, there are none."""

    operations: tuple[Operation, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[Note, ...] = ()
    unknown: str = ""

    @property
    def impact(self) -> Impact | None:
        """The worst impact of its operations; None when there are none."""
        order = list(Impact)
        return max((op.impact for op in self.operations), key=order.index, default=None)


def plan(wanted: Wanted, actual: Snapshot | Unknown, permission: Permission = Permission.NONE) -> Plan:
    """Return what leads from the actual tree to the wanted one. An unknown state yields nothing."""
    if isinstance(actual, Unknown):
        return Plan(notes=wanted.notes, unknown=actual.reason)
    tree = wanted.tree
    refusals = preflight(tree, actual, permission)
    if refusals:
        return Plan(refusals=refusals, notes=wanted.notes)
    root_operations, base = _root(tree, actual)
    operations = (*root_operations, *_shrink(tree, base), *_grow(tree, base))
    return Plan(operations, notes=(*wanted.notes, *_foreign_notes(base)))


def plan_removal(root: HtbQdisc, actual: Snapshot | Unknown) -> Plan:
    """Return the operations that take a tree of ours with this root away again."""
    if isinstance(actual, Unknown):
        return Plan(unknown=actual.reason)
    if not is_ours(actual.root, root):
        note = Note("not-ours", f"the root qdisc of {actual.device.name} is not of our making: nothing to remove")
        return Plan(notes=(note,))
    return Plan((DeleteRoot(root.handle),))


def is_stale(classid: Handle) -> bool:
    """Whether a class that nobody wants is ours to delete: minors that we hand out."""
    return classid.minor in _OUR_MINORS or classid.minor >= 0x100


def _root(tree: Tree, actual: Snapshot) -> tuple[tuple[Operation, ...], Snapshot]:
    """Return the operations on the root, and the snapshot that the rest starts from."""
    if actual.root == tree.root:
        return (), actual
    empty = Snapshot(device=actual.device, root=tree.root)
    # An HTB can't be changed in place, nor replaced under the same handle.
    if actual.root is not None and actual.root.handle == tree.root.handle:
        return (DeleteRoot(tree.root.handle), AddRoot(tree.root)), empty
    return (AddRoot(tree.root),), empty


def _shrink(tree: Tree, actual: Snapshot) -> Iterable[Operation]:
    wanted_filters = {f.key: f for f in tree.filters}
    for found in actual.filters:
        if found.priority in OUR_PRIORITIES and not _same_kind(found, wanted_filters.get(found.key)):
            yield DeleteFilter(found)
    wanted = {c.classid: c for c in tree.classes}
    leaving = _leaving(tree, actual)
    for classid in reversed(_parents_first(actual.classes)):
        old = actual.classes[classid]
        if classid in leaving:
            yield DeleteClass(classid)
        elif classid in wanted:
            least = _shrunk(old, wanted[classid])
            if least != old:
                yield ChangeClass(least)


def _grow(tree: Tree, actual: Snapshot) -> Iterable[Operation]:
    leaves = {leaf.parent: leaf for leaf in tree.leaves}
    leaving = _leaving(tree, actual)
    for new in tree.classes:
        old = None if new.classid in leaving else actual.classes.get(new.classid)
        if old is None:
            yield AddClass(new)
        elif _shrunk(old, new) != new:
            yield ChangeClass(new)
        if new.classid in leaves:
            yield from _set_leaf(leaves[new.classid], actual, class_is_new=old is None)
    present = {f.key: f for f in actual.filters}
    for filter_ in tree.filters:
        if present.get(filter_.key) != filter_:
            yield SetFilter(filter_)


def _set_leaf(leaf: Leaf, actual: Snapshot, *, class_is_new: bool) -> Iterable[Operation]:
    old = None if class_is_new else actual.leaves.get(leaf.parent)
    if old == leaf:
        return
    in_place = isinstance(old, Leaf) and (old.handle, old.parameters.kind) == (leaf.handle, leaf.parameters.kind)
    yield SetLeaf(leaf, Impact.HITLESS if class_is_new or in_place else Impact.LEAF_LOSS, in_place)


def _leaving(tree: Tree, actual: Snapshot) -> frozenset[Handle]:
    """Return the classes that can't stay: not wanted, or below a parent that is not theirs or leaves.

    The kernel takes a change of parent without a word and does not move the class.
    """
    parents = {c.classid: c.parent for c in tree.classes}
    leaving: set[Handle] = set()
    for classid in _parents_first(actual.classes):
        parent = actual.classes[classid].parent
        if parent in leaving or (parents.get(classid) != parent and is_stale(classid)):
            leaving.add(classid)
    return frozenset(leaving)


def _shrunk(old: HtbClass, new: HtbClass) -> HtbClass:
    """Return the class with the smaller floor and ceil of both, each with its own bucket."""
    floor_from = old if old.floor < new.floor else new
    ceil_from = old if old.ceil < new.ceil else new
    if (floor_from.floor, ceil_from.ceil) == (old.floor, old.ceil):
        return old
    return replace(
        new,
        floor=floor_from.floor,
        burst_ticks=floor_from.burst_ticks,
        ceil=ceil_from.ceil,
        cburst_ticks=ceil_from.cburst_ticks,
    )


def _same_kind(found: Filter, wanted: Filter | None) -> bool:
    """Whether the kernel can swap one filter for the other in one step."""
    return wanted is not None and type(found.match) is type(wanted.match)


def _parents_first(classes: Mapping[Handle, HtbClass]) -> list[Handle]:
    def depth(classid: Handle) -> int:
        steps, parent = 0, classes[classid].parent
        while parent in classes and steps < len(classes):
            steps, parent = steps + 1, classes[parent].parent
        return steps

    return sorted(classes, key=lambda classid: (depth(classid), classid))


def _foreign_notes(actual: Snapshot) -> Iterable[Note]:
    for classid in actual.classes:
        if not is_stale(classid):
            yield Note("foreign-class", f"class {classid} is not of our making and was left alone")
    for found in actual.filters:
        if found.priority not in OUR_PRIORITIES:
            message = f"filter prio {found.priority} on {found.parent} is not of our making and was left alone"
            yield Note("foreign-filter", message)
    for parent, leaf in actual.leaves.items():
        if isinstance(leaf, OtherQdisc) and not is_stale(parent):
            yield Note("foreign-leaf", f"qdisc {leaf.kind} below {parent} is not of our making and was left alone")
