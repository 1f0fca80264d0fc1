"""An in-memory kernel with the real one's refusals and silences.

Held to the real kernel by tests/contract: the same operations, the same errnos, the
same tree afterwards. It knows one device.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

from kura_shaper.kernel.errors import KernelRefusedError, refusal
from kura_shaper.tree.model import (
    ROOT,
    Filter,
    FlowerMatch,
    FqCodel,
    FwMatch,
    Handle,
    HtbClass,
    HtbQdisc,
    Leaf,
    OtherQdisc,
)
from kura_shaper.tree.operations import (
    AddClass,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteLeaf,
    DeleteRoot,
    Operation,
    RestoreQdisc,
    SetFilter,
    SetLeaf,
)
from kura_shaper.tree.snapshot import ClassCounters, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kura_shaper.tree.model import Device

_HTB_LEVELS, _HTB_PRIO_MAX = 8, 7


class FakeKernel:
    """One device's qdiscs, changed by operations as the real kernel would."""

    def __init__(self, device: Device, root: OtherQdisc | None = None) -> None:
        self.device = device
        self.sent: list[Operation] = []
        # What the kernel puts where a root goes is its own default, never what somebody chose before.
        chosen = root is not None and not root.is_kernel_default
        self._default_root = OtherQdisc("pfifo_fast", Handle(0), ROOT) if chosen else root
        self._root: HtbQdisc | OtherQdisc | None = root
        self._classes: dict[Handle, HtbClass] = {}
        self._leaves: dict[Handle, Leaf | OtherQdisc] = {}
        self._filters: dict[tuple[int, int, int, int], Filter] = {}
        # Filters that were set before their class was there: they find it, but don't hold it.
        self._unbound: set[tuple[int, int, int, int]] = set()
        self._others: list[OtherQdisc] = []

    def snapshot(self) -> Snapshot:
        """Return the present state."""
        return Snapshot(
            device=self.device,
            root=self._root,
            classes=dict(self._classes),
            leaves=dict(self._leaves),
            filters=tuple(sorted(self._filters.values(), key=lambda f: f.key)),
            verbatim=tuple(self._verbatim()),
            counters={classid: ClassCounters() for classid in self._classes},
        )

    def _verbatim(self) -> Iterable[OtherQdisc]:
        if isinstance(self._root, OtherQdisc):
            yield self._root
        yield from self._others
        yield from (leaf for leaf in self._leaves.values() if isinstance(leaf, OtherQdisc))

    def send(self, operations: Sequence[Operation]) -> list[KernelRefusedError | None]:
        """Carry the operations out in order; each has its own outcome."""
        return [self._one(operation) for operation in operations]

    def _one(self, operation: Operation) -> KernelRefusedError | None:
        self.sent.append(operation)
        number = self._carry_out(operation)
        return refusal(number, doing=operation.describe()) if number else None

    def _carry_out(self, operation: Operation) -> int:
        match operation:
            case AddRoot(qdisc):
                return self._add_root(qdisc)
            case RestoreQdisc(qdisc):
                return self._restore(qdisc)
            case DeleteRoot(handle):
                return self._delete_root(handle)
            case AddClass(spec):
                return self._add_class(spec)
            case ChangeClass(spec):
                return self._change_class(spec)
            case DeleteClass(classid):
                return self._delete_class(classid)
            case SetLeaf(leaf, _, in_place):
                return self._set_leaf(leaf, in_place=in_place)
            case DeleteLeaf(parent, handle):
                return self._delete_leaf(parent, handle)
            case SetFilter(filter_):
                return self._set_filter(filter_)
            case DeleteFilter(filter_):
                return self._delete_filter(filter_)

    def _clear(self, root: HtbQdisc | OtherQdisc | None) -> int:
        self._root = root
        self._classes, self._leaves, self._filters, self._others = {}, {}, {}, []
        self._unbound = set()
        return 0

    def _add_root(self, qdisc: HtbQdisc) -> int:
        if self._root_handle() == qdisc.handle or self._is_leaf_handle(qdisc.handle):
            # Same handle: the kernel takes it for a change, which htb does not know.
            return errno.EINVAL
        return self._clear(qdisc)

    def _restore(self, qdisc: OtherQdisc) -> int:
        if qdisc.parent == ROOT:
            other_kind = not isinstance(self._root, OtherQdisc) or self._root.kind != qdisc.kind
            if self._is_leaf_handle(qdisc.handle) or (self._root_handle() == qdisc.handle and other_kind):
                return errno.EINVAL
            return self._clear(qdisc)
        self._others.append(qdisc)
        return 0

    def _delete_root(self, handle: Handle) -> int:
        if handle.major and self._root_handle() != handle:
            return errno.EINVAL
        if self._root_handle().major == 0:
            return errno.ENOENT
        return self._clear(self._default_root)

    def _no_classes(self, classid: Handle, parent: Handle | None = None) -> int:
        """Return the errno of naming a class, or a place for one, that no HTB here can have; 0 when it can."""
        if parent is not None and parent.major != classid.major:
            return errno.EINVAL
        if classid.major != self._root_handle().major:
            # A leaf of ours that has this handle is there, but has no classes.
            return errno.EINVAL if self._is_leaf_handle(Handle(classid.major)) else errno.ENOENT
        return 0 if isinstance(self._root, HtbQdisc) else errno.EINVAL

    def _add_class(self, spec: HtbClass) -> int:
        problem = self._no_classes(spec.classid, spec.parent)
        if problem:
            return problem
        if spec.classid in self._classes:
            return errno.EEXIST
        if (
            not (spec.floor.bytes_per_second and spec.ceil.bytes_per_second)
            or self._depth_below(spec.parent) > _HTB_LEVELS
        ):
            return errno.EINVAL
        # A parent that does not exist is taken without a word, and the class put at the top.
        parent = spec.parent if spec.parent in self._classes else self._root_handle()
        self._classes[spec.classid] = replace(spec, parent=parent, prio=min(spec.prio, _HTB_PRIO_MAX))
        # A child turns its parent into an inner class, whose leaf goes with its backlog.
        self._leaves.pop(parent, None)
        self._leaves[spec.classid] = OtherQdisc("pfifo", Handle(0), spec.classid)
        return 0

    def _depth_below(self, parent: Handle) -> int:
        depth = 1
        while parent in self._classes:
            depth, parent = depth + 1, self._classes[parent].parent
        return depth

    def _root_handle(self) -> Handle:
        return self._root.handle if self._root is not None else Handle(0)

    def _is_leaf_handle(self, handle: Handle) -> bool:
        return handle.major != 0 and any(leaf.handle == handle for leaf in self._leaves.values())

    def _has_children(self, classid: Handle) -> bool:
        return any(c.parent == classid for c in self._classes.values())

    def _change_class(self, spec: HtbClass) -> int:
        problem = self._no_classes(spec.classid, spec.parent)
        if problem:
            return problem
        old = self._classes.get(spec.classid)
        if old is None:
            return errno.ENOENT
        if not (spec.floor.bytes_per_second and spec.ceil.bytes_per_second):
            return errno.EINVAL
        # A new parent is taken without a word, and ignored. So are quantum and prio of a class with children.
        new = replace(spec, parent=old.parent, prio=min(spec.prio, _HTB_PRIO_MAX))
        if self._has_children(spec.classid):
            new = replace(new, quantum_bytes=old.quantum_bytes, prio=old.prio)
        self._classes[spec.classid] = new
        return 0

    def _delete_class(self, classid: Handle) -> int:
        problem = self._no_classes(classid)
        if problem:
            return problem
        if classid not in self._classes:
            return errno.ENOENT
        holders = {key for key, filter_ in self._filters.items() if _named_class(filter_) == classid}
        if self._has_children(classid) or holders - self._unbound:
            return errno.EBUSY
        gone = self._classes.pop(classid)
        self._leaves.pop(classid, None)
        if gone.parent in self._classes and not self._has_children(gone.parent):
            self._leaves[gone.parent] = OtherQdisc("pfifo", Handle(0), gone.parent)
        return 0

    def _no_leaf(self, parent: Handle) -> int:
        """Return the errno of a leaf where there is no class; 0 when there is one."""
        if parent.major != self._root_handle().major:
            return errno.ENOENT
        if not isinstance(self._root, HtbQdisc):
            return errno.EOPNOTSUPP
        return 0 if parent in self._classes else errno.ENOENT

    def _set_leaf(self, leaf: Leaf, *, in_place: bool) -> int:
        problem = self._no_leaf(leaf.parent)
        if problem:
            return problem
        old = self._leaves.get(leaf.parent)
        if old is None:
            return errno.EINVAL
        if old.handle != leaf.handle and (leaf.handle == self._root_handle() or self._is_leaf_handle(leaf.handle)):
            # A qdisc does not move to another parent.
            return errno.EINVAL
        if old.handle == leaf.handle:
            # Same handle: the kernel takes it for a change of the qdisc that is there.
            if not isinstance(old, Leaf) or old.parameters.kind != leaf.parameters.kind:
                return errno.EINVAL
            if isinstance(old.parameters, FqCodel) and isinstance(leaf.parameters, FqCodel):
                if not in_place:
                    return errno.EINVAL
                leaf = replace(leaf, parameters=replace(leaf.parameters, flows=old.parameters.flows))
        self._leaves[leaf.parent] = leaf
        return 0

    def _delete_leaf(self, parent: Handle, handle: Handle) -> int:
        problem = self._no_leaf(parent)
        if problem:
            return problem
        old = self._leaves.get(parent)
        if old is None:
            return errno.ENOENT
        if old.handle != handle:
            return errno.EINVAL
        self._leaves[parent] = OtherQdisc("pfifo", Handle(0), parent)
        return 0

    def _delete_filter(self, filter_: Filter) -> int:
        if self._root_handle() != filter_.parent or not isinstance(self._root, HtbQdisc):
            return errno.EINVAL
        of_priority = [f for f in self._filters.values() if f.priority == filter_.priority]
        if not of_priority:
            return errno.ENOENT
        other = of_priority[0]
        if other.ethertype != filter_.ethertype or type(other.match) is not type(filter_.match):
            return errno.EINVAL
        if filter_.handle == 0:
            self._filters = {key: f for key, f in self._filters.items() if f not in of_priority}
            return 0
        return 0 if self._filters.pop(filter_.key, None) else errno.ENOENT

    def _set_filter(self, filter_: Filter) -> int:
        if self._root_handle() != filter_.parent or not isinstance(self._root, HtbQdisc):
            return errno.EINVAL
        for other in self._filters.values():
            if other.priority == filter_.priority:
                problem = _clash(filter_, other, replacing=filter_.key in self._filters)
                if problem:
                    return problem
        # A class that does not exist is taken without a word.
        self._filters[filter_.key] = filter_
        self._unbound.discard(filter_.key)
        if _named_class(filter_) not in self._classes:
            self._unbound.add(filter_.key)
        return 0


def _clash(new: Filter, other: Filter, *, replacing: bool) -> int:
    """Return the errno of setting a filter where there is another one of its priority."""
    if other.ethertype != new.ethertype or type(other.match) is not type(new.match):
        return errno.EINVAL
    match new.match, other.match:
        case FwMatch(mask=mask), FwMatch(mask=shared):
            # All fw filters of a priority share the mask of the first (net/sched/cls_fw.c).
            return 0 if mask == shared else errno.EINVAL
        case FlowerMatch() as key, FlowerMatch() as taken:
            # No two flower filters match alike, unless one replaces a third (net/sched/cls_flower.c).
            alike = replace(key, classid=taken.classid) == taken
            return errno.EEXIST if alike and not replacing else 0
    return 0


def _named_class(filter_: Filter) -> Handle | None:
    """Return the class that a filter names; a program only returns a number and names none."""
    return filter_.match.classid if isinstance(filter_.match, FwMatch | FlowerMatch) else None
