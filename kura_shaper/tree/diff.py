"""From what is there to what is wanted: operations in an order that is safe at every step.

0. The foundation: the root qdisc, in shape mq what hangs below it for each tx queue, and the egress
   hook. Putting any of these in place loses what is queued on the device, so they go together.
1. What has to go goes: filters, then classes, children before parents, in one run, so that
   those that must be quiet first are waited for together.
2. Everything that shrinks goes to the smaller of old and new, children before parents.
3. Then everything grows or is added, parents before children: class and leaf, then the
   filters, the default class, and last what steers packets to a queue. A class and its leaf
   travel in one send, since the constant program sends packets to a class as soon as it is there.

So at every instant floor <= ceil, which is <= the parent's ceil (with several shaped queues: than
the whole budget), and floors never add up to more than the parent's rate: a kill between any two
operations leaves a valid tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kura_shaper.tenants.marks import PROOF_CLASS, SHAPED_QUEUES_MAX, TENANT_CLASS_MIN, ReservedClass
from kura_shaper.tree.classifier import MARK_PRIORITY, OUR_PRIORITIES
from kura_shaper.tree.model import (
    EGRESS,
    HOOK,
    INGRESS,
    BpfMatch,
    FlowerMatch,
    FqCodel,
    FwMatch,
    Handle,
    HtbQdisc,
    Leaf,
    OtherMatch,
    OtherQdisc,
    SteeringKind,
)
from kura_shaper.tree.notes import Note, Weight
from kura_shaper.tree.operations import (
    AddClass,
    AddHook,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteLeaf,
    DeleteRoot,
    Impact,
    Operation,
    RemoveTcx,
    SetFilter,
    SetLeaf,
    SetQueue,
    SetTcx,
    SetXps,
)
from kura_shaper.tree.preflight import Permission, Refusal, is_ours, misfits, preflight
from kura_shaper.tree.snapshot import Snapshot, Unknown
from kura_shaper.tree.steer import is_ours_at_hook

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kura_shaper.tree.build import Wanted
    from kura_shaper.tree.model import Filter, HtbClass, Tree

_OUR_MINORS = frozenset({*ReservedClass, *range(PROOF_CLASS, PROOF_CLASS + SHAPED_QUEUES_MAX)})
# Roots that were seen to come back from what the kernel shows of them; of others that is not known.
_RESTORABLE = frozenset(
    {"mq", "fq", "fq_codel", "codel", "cake", "pfifo", "bfifo", "pfifo_fast", "sfq", "tbf", "taprio"}
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Operations in order. With refusals, or when the state is unknown, there are none."""

    operations: tuple[Operation, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[Note, ...] = ()
    unknown: str = ""

    @property
    def has_findings(self) -> bool:
        """Whether something on the device is to be mended that no operation of ours may touch."""
        return any(note.weight is Weight.FINDING for note in self.notes)

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
    foundation, base = _foundation(tree, actual, may_disrupt=Permission.DISRUPTION in permission)
    out = _outgoing(tree, base)
    operations = (
        *foundation,
        *_remove(tree, base, out),
        *_shrink(tree, base, out),
        *_grow(tree, base, out),
        *_steer(tree, base),
        *_unsteer(tree, base),
    )
    notes = (*_take_over_notes(actual), *_queue_notes(tree, base), *_foreign_notes(tree, base, out))
    return Plan(operations, notes=(*wanted.notes, *notes))


def plan_removal(actual: Snapshot | Unknown) -> Plan:
    """Return the operations that take a tree of ours away again, and what steers packets to it."""
    if isinstance(actual, Unknown):
        return Plan(unknown=actual.reason)
    if not is_ours(actual.root):
        note = Note("not-ours", f"the root qdisc of {actual.device.name} is not of our making: nothing to remove")
        return Plan(tuple(_unsteer(None, actual)), notes=(note,))
    root = (DeleteRoot(actual.root.handle),) if actual.root else ()
    return Plan((*root, *_unsteer(None, actual)))


def has_minor_of_ours(classid: Handle) -> bool:
    """Whether we hand out this class's minor, so that it is ours to delete when nobody wants it."""
    return classid.minor in _OUR_MINORS or classid.minor >= TENANT_CLASS_MIN


def _foundation(tree: Tree, actual: Snapshot, *, may_disrupt: bool) -> tuple[tuple[Operation, ...], Snapshot]:
    """Return what loses the whole device's queue, and the snapshot that the rest starts from.

    Where the tree stands but for a part that nobody chose otherwise, that part is put back: there is no
    promise without it. A queue without an HTB of ours only waits for the next occasion.
    """
    waiting = [q for q in tree.queues if actual.queues.get(q.parent) != q]
    free = [q for q in waiting if _is_free(q.handle, actual)]
    if actual.root != tree.root or misfits(tree, actual) or (may_disrupt and free != waiting):
        root_operations, base = _root(tree, actual)
        queues: Iterable[HtbQdisc | Leaf] = tree.queues
    else:
        root_operations, base = (), actual
        must = [q for q in waiting if isinstance(q, HtbQdisc) or q.parent not in actual.queues]
        is_occasion = must or may_disrupt or (tree.has_hook and actual.hook is None)
        queues = free if is_occasion else ()
    hook = (AddHook(),) if tree.has_hook and base.hook is None else ()
    operations = (*root_operations, *(SetQueue(qdisc) for qdisc in queues), *hook)
    return operations, _with_queues(base, queues)


def _is_free(handle: Handle, actual: Snapshot) -> bool:
    """Whether no qdisc has a handle: the kernel takes SetQueue with one for a change of it, or refuses it."""
    return all(found.handle != handle for found in (*actual.queues.values(), *actual.leaves.values()))


def _root(tree: Tree, actual: Snapshot) -> tuple[tuple[Operation, ...], Snapshot]:
    """Return the operations on the root, and what there is then: nothing but what is not part of a tree."""
    empty = replace(
        actual,
        root=tree.root,
        queues={},
        classes={},
        leaves={},
        filters=tuple(f for f in actual.filters if f.parent == EGRESS),
    )
    # A qdisc can't be turned into another with the same handle, nor can a handle be in two places for the
    # moment of the swap.
    handles = {tree.root.handle, *(qdisc.handle for qdisc in tree.queues)}
    is_in_the_way = any(qdisc.handle in handles for qdisc in actual.verbatim) or (
        actual.root is not None and actual.root.handle in handles
    )
    if is_in_the_way and actual.root is not None and actual.root.handle.major:
        return (DeleteRoot(actual.root.handle), AddRoot(tree.root)), empty
    return (AddRoot(tree.root),), empty


def _with_queues(base: Snapshot, queues: Iterable[HtbQdisc | Leaf]) -> Snapshot:
    """Return a snapshot in which these qdiscs were put below the mq root, new and empty."""
    fresh = {qdisc.parent: qdisc for qdisc in queues}
    majors = {qdisc.handle.major for qdisc in fresh.values()}
    return replace(
        base,
        queues={**base.queues, **fresh},
        classes={c: spec for c, spec in base.classes.items() if c.major not in majors},
        leaves={c: leaf for c, leaf in base.leaves.items() if c.major not in majors},
        filters=tuple(f for f in base.filters if f.parent.major not in majors),
    )


def _steer(tree: Tree, actual: Snapshot) -> Iterable[Operation]:
    """Yield what brings packets to the shaped queues, last of all, since the classes must be there."""
    if tree.steering is None:
        return
    if tree.steering.kind.needs_xps_off:
        yield from (SetXps(queue, 0) for queue in sorted(actual.xps or {}))
    wanted = [f for f in tree.filters if f.parent == EGRESS]
    staying = {*actual.filters} - {*(masked := _other_masks(wanted, actual))}
    yield from (DeleteFilter(f) for f in masked)
    yield from (SetFilter(f) for f in wanted if f not in staying)
    program = tree.steering.program
    if tree.steering.kind is SteeringKind.TCX and program is not None:
        first = actual.tcx.programs[:1] if actual.tcx else ()
        if not first or first[0].name != program.name:
            yield SetTcx(program)


def _other_masks(wanted: Iterable[Filter], actual: Snapshot) -> list[Filter]:
    """Return the fw filters of ours at the hook with another mask: all of a priority share one (net/sched/cls_fw.c)."""
    masks = {f.match.mask for f in wanted if isinstance(f.match, FwMatch)}
    ours = [f for f in actual.filters if _steers(f)]
    return [f for f in ours if isinstance(f.match, FwMatch) and masks and f.match.mask not in masks]


def _unsteer(tree: Tree | None, actual: Snapshot) -> Iterable[Operation]:
    """Yield the removal of what of ours steers packets and is not wanted, after what replaces it is there."""
    wanted = {f.key for f in tree.filters} if tree else set()
    if tree:
        wanted |= {f.key for f in _other_masks(tree.filters, actual)}
    yield from (DeleteFilter(f) for f in actual.filters if _steers(f) and f.key not in wanted)
    keeps_tcx = tree is not None and tree.steering is not None and tree.steering.kind is SteeringKind.TCX
    if not keeps_tcx and actual.tcx and any(program.is_ours for program in actual.tcx.programs):
        yield RemoveTcx()


def is_our_filter(found: Filter) -> bool:
    """Whether we made a filter, as far as its priority tells; at the hook, where others live too, also its kind."""
    return _steers(found) if found.parent.major == HOOK.major else found.priority in OUR_PRIORITIES


def _steers(found: Filter) -> bool:
    return found.parent == EGRESS and is_ours_at_hook(found)


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """What is there and can't stay."""

    filters: frozenset[Filter]
    classes: frozenset[Handle]


def _outgoing(tree: Tree, actual: Snapshot) -> _Outgoing:
    classes = _leaving(tree, actual)
    wanted = {f.key: f for f in tree.filters}
    # Those at the hook go last, when what takes their place is there.
    ours = [f for f in actual.filters if is_our_filter(f) and f.parent != EGRESS]
    seized = {_place(f) for f in ours if isinstance(f.match, OtherMatch)}
    return _Outgoing(
        frozenset(f for f in ours if _place(f) in seized or _must_go(f, wanted.get(f.key), classes)), classes
    )


def _place(found: Filter) -> Filter:
    """Return what stands for all filters of a priority: one kind holds it, and it goes as a whole."""
    return replace(found, handle=0, match=OtherMatch(""))


def _remove(tree: Tree, actual: Snapshot, out: _Outgoing) -> Iterable[Operation]:
    # Filters of other kinds may consist of parts that can't be taken away one by one (u32's hash tables).
    seized = {_place(f): f for f in actual.filters if f in out.filters and isinstance(f.match, OtherMatch)}
    yield from (DeleteFilter(replace(found, handle=0)) for found in seized.values())
    yield from (DeleteFilter(f) for f in actual.filters if f in out.filters and _place(f) not in seized)
    wanted = {c.classid.minor for c in tree.classes}
    for classid in reversed(_parents_first(actual.classes)):
        if classid in out.classes:
            # One that is only made anew elsewhere can't be waited for: its packets keep coming.
            yield DeleteClass(classid, only_when_quiet=classid.minor not in wanted)


def _shrink(tree: Tree, actual: Snapshot, out: _Outgoing) -> Iterable[Operation]:
    wanted = {c.classid: c for c in tree.classes}
    for classid in reversed(_parents_first(actual.classes)):
        old = actual.classes[classid]
        if classid in wanted and classid not in out.classes:
            least = _shrunk(old, wanted[classid])
            if least != old:
                yield ChangeClass(least)


def _grow(tree: Tree, actual: Snapshot, out: _Outgoing) -> Iterable[Operation]:
    misplaced = _misplaced(tree, actual, out)
    yield from (DeleteLeaf(parent, actual.leaves[parent].handle) for parent in misplaced)
    here = replace(actual, leaves={p: leaf for p, leaf in actual.leaves.items() if p not in misplaced})
    yield from _grow_classes(tree, here, out, [c for c in tree.classes if not _is_default(c, tree)])
    staying = {*actual.filters} - out.filters
    yield from (SetFilter(f) for f in tree.filters if f.parent != EGRESS and f not in staying)
    # Last: until it is there, what no filter places is passed on, neither held back nor counted.
    yield from _grow_classes(tree, here, out, [c for c in tree.classes if _is_default(c, tree)])


def _is_default(spec: HtbClass, tree: Tree) -> bool:
    return any(spec.classid == Handle(htb.handle.major, htb.default_minor) for htb in tree.htbs)


def _grow_classes(tree: Tree, actual: Snapshot, out: _Outgoing, classes: Iterable[HtbClass]) -> Iterable[Operation]:
    leaves = {leaf.parent: leaf for leaf in tree.leaves}
    for new in classes:
        old = None if new.classid in out.classes else actual.classes.get(new.classid)
        if old is None:
            yield AddClass(new)
        elif _shrunk(old, new) != new:
            yield ChangeClass(new)
        if new.classid in leaves:
            leaf = leaves[new.classid]
            yield from [SetLeaf(leaf)] if old is None else _change_leaf(leaf, actual.leaves.get(new.classid))


def _misplaced(tree: Tree, actual: Snapshot, out: _Outgoing) -> tuple[Handle, ...]:
    """Return the staying classes whose leaf has a handle that another class's leaf is to have."""
    places = {leaf.handle: leaf.parent for leaf in tree.leaves}
    return tuple(
        parent
        for parent, leaf in actual.leaves.items()
        if parent not in out.classes and places.get(leaf.handle, parent) != parent
    )


def _change_leaf(leaf: Leaf, old: Leaf | OtherQdisc | None) -> Iterable[Operation]:
    if old == leaf:
        return
    in_place = isinstance(old, Leaf) and _changes_in_place(old, leaf)
    if old is not None and old.handle == leaf.handle and not in_place:
        # The kernel takes the same handle for a change of what is there, and refuses another kind.
        yield DeleteLeaf(leaf.parent, old.handle)
    yield SetLeaf(leaf, Impact.HITLESS if in_place else Impact.LEAF_LOSS, in_place)


def _changes_in_place(old: Leaf, new: Leaf) -> bool:
    """Whether the kernel can turn one leaf into the other; fq_codel's number of flows can't change."""
    if isinstance(old.parameters, FqCodel) and isinstance(new.parameters, FqCodel):
        return (old.handle, old.parameters.flows) == (new.handle, new.parameters.flows)
    return (old.handle, old.parameters.kind) == (new.handle, new.parameters.kind)


def _leaving(tree: Tree, actual: Snapshot) -> frozenset[Handle]:
    """Return the classes that can't stay.

    Those that are not wanted, or below a parent that is not theirs: the kernel takes a change
    of parent without a word and does not move the class. And whatever hangs below a class that
    leaves or must hold a leaf: packets for a class with children go to the default class.
    """
    parents = {c.classid: c.parent for c in tree.classes}
    childless = {leaf.parent for leaf in tree.leaves}
    leaving: set[Handle] = set()
    for classid in _parents_first(actual.classes):
        parent = actual.classes[classid].parent
        is_misplaced = has_minor_of_ours(classid) and parents.get(classid) != parent
        if is_misplaced or parent in leaving or parent in childless:
            leaving.add(classid)
    return frozenset(leaving)


def _must_go(found: Filter, wanted: Filter | None, leaving: frozenset[Handle]) -> bool:
    """Whether a filter of ours can't stay until the wanted one with its key takes its place.

    A class that a filter names can't be deleted, and not every filter can be swapped for another
    in one step: fw filters share one mask, and no two flower filters may match alike.
    """
    match found.match, wanted and wanted.match:
        case BpfMatch(), BpfMatch():
            return False
        case FwMatch(mask=mask, classid=classid), FwMatch(mask=wanted_mask):
            return mask != wanted_mask or classid in leaving
        case FlowerMatch(classid=classid), FlowerMatch():
            return found != wanted or classid in leaving
        case _:
            return True


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


def _parents_first(classes: Mapping[Handle, HtbClass]) -> list[Handle]:
    def depth(classid: Handle) -> int:
        steps, parent = 0, classes[classid].parent
        while parent in classes and steps < len(classes):
            steps, parent = steps + 1, classes[parent].parent
        return steps

    return sorted(classes, key=lambda classid: (depth(classid), classid))


def _take_over_notes(actual: Snapshot) -> Iterable[Note]:
    """Say before a root of somebody else's is replaced what of it can't be brought back."""
    root = actual.root
    if root is None or actual.has_default_root or is_ours(root):
        return
    back = "brings it back with its options" if root.kind in _RESTORABLE else "may not be able to bring it back"
    message = f"{root.kind} {root.handle} goes: `uninstall` {back}, and not its classes, filters and size tables"
    yield Note("take-over", f"{message}; keep a copy of what you need")


def _queue_notes(tree: Tree, actual: Snapshot) -> Iterable[Note]:
    """Say which queues without an HTB of ours have something else than they would get at the next occasion."""
    other = [str(q.parent.minor - 1) for q in tree.queues if isinstance(q, Leaf) and actual.queues.get(q.parent) != q]
    if other:
        message = f"tx queue {', '.join(other)} has another qdisc than planned; it carries host traffic only"
        yield Note("queue-default", f"{message}, so it is changed only with --allow-disruption")


def _foreign_notes(tree: Tree, actual: Snapshot, out: _Outgoing) -> Iterable[Note]:
    for classid in actual.classes:
        if not has_minor_of_ours(classid):
            goes = classid in out.classes
            fate = "goes, since its parent goes or must be a leaf" if goes else "was left alone"
            yield Note("foreign-class", f"class {classid} is not of our making and {fate}")
    for found in actual.filters:
        if not is_our_filter(found) and found.parent != INGRESS:
            yield _foreign_filter_note(found)
    misplaced = frozenset(_misplaced(tree, actual, out))
    for parent, leaf in actual.leaves.items():
        if isinstance(leaf, OtherQdisc) and not has_minor_of_ours(parent) and parent not in out.classes:
            fate = "goes, since it has the handle of a leaf of ours" if parent in misplaced else "was left alone"
            yield Note("foreign-leaf", f"qdisc {leaf.kind} below {parent} is not of our making and {fate}")


def _foreign_filter_note(found: Filter) -> Note:
    at_hook = found.parent == EGRESS
    place = "the egress hook" if at_hook else str(found.parent)
    message = f"filter prio {found.priority} on {place} is not of our making and was left alone"
    # What comes first at the hook is the steering's concern, which a proof decides.
    if at_hook or found.priority >= MARK_PRIORITY:
        return Note("foreign-filter", message)
    message += "; it comes before ours and may take tenants' packets: find its owner"
    return Note("foreign-filter", message, weight=Weight.FINDING)
