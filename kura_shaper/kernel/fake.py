"""An in-memory kernel with the real one's refusals and silences.

Held to the real kernel by tests/contract: the same operations, the same errnos, the
same tree afterwards. It knows one device. It carries no packets, so its counters stay 0.
"""

from __future__ import annotations

import errno
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from kura_shaper.kernel.errors import KernelRefusedError, refusal
from kura_shaper.kernel.fake_beside import FakeBeside
from kura_shaper.kernel.fake_filters import delete_filter, is_named, named_class, set_filter
from kura_shaper.kernel.fake_qdiscs import changed_to, kind_of, plain
from kura_shaper.tree.ebpf import TcxState
from kura_shaper.tree.model import (
    EGRESS,
    HOOK,
    INGRESS,
    ROOT,
    Handle,
    HtbQdisc,
    Leaf,
    MqQdisc,
    OtherQdisc,
    htbs_of,
)
from kura_shaper.tree.operations import (
    AddClass,
    AddHook,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteHook,
    DeleteLeaf,
    DeleteRoot,
    Operation,
    RemoveTcx,
    RestoreQdisc,
    SetFilter,
    SetLeaf,
    SetQueue,
    SetTcx,
    SetXps,
)
from kura_shaper.tree.snapshot import ClassCounters, Snapshot

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence
    from typing import Self

    from kura_shaper.kernel.fake_filters import Key
    from kura_shaper.kernel.fake_qdiscs import Qdisc
    from kura_shaper.tree.model import Device, Filter, HtbClass, Root

_HTB_LEVELS, _HTB_PRIO_MAX = 8, 7
_CLSACT = OtherQdisc("clsact", Handle(HOOK.major), HOOK)


class FakeKernel:
    """One device's qdiscs, changed by operations as the real kernel would."""

    def __init__(
        self,
        device: Device,
        root: Root = None,
        *,
        tx_queues_max: int = 0,
        default_kind: str = "pfifo_fast",
        has_tcx: bool = True,
    ) -> None:
        """tx_queues_max is what the device was made with, as many as are live when 0."""
        self.device = device
        self.sent: list[Operation] = []
        self._tx_queues_max = max(tx_queues_max, device.tx_queues)
        self._default_kind = default_kind
        # What the kernel puts where a root goes is its own default, never what somebody chose before.
        chosen = root is not None and root.handle.major != 0
        own = OtherQdisc("mq" if self._tx_queues_max > 1 else default_kind, Handle(0), ROOT)
        self._default_root: Root = own if chosen else root
        self._root: Root = None
        # By the place below an mq. None is what drops every packet: the kernel's noop, which it does not show.
        self._queues: dict[Handle, HtbQdisc | Leaf | OtherQdisc | None] = {}
        self._classes: dict[Handle, HtbClass] = {}
        self._leaves: dict[Handle, Leaf | OtherQdisc] = {}
        self._filters: dict[Key, Filter] = {}
        # Filters that were set before their class was there: they find it, but don't hold it.
        self._unbound: set[Key] = set()
        self._others: list[OtherQdisc] = []
        self._hook: OtherQdisc | None = None
        self._had_hook = False
        self._beside = FakeBeside(TcxState(supported=has_tcx))
        self._clear(root)

    def __copy__(self) -> Self:
        """Return a kernel in the same state, whose changes this one does not see."""
        twin = object.__new__(type(self))
        mutable = (dict, set, list, FakeBeside)
        vars(twin).update(
            {name: copy(held) if isinstance(held, mutable) else held for name, held in vars(self).items()}
        )
        return twin

    def snapshot(self) -> Snapshot:
        """Return the present state."""
        queues = {place: qdisc for place, qdisc in self._queues.items() if qdisc and self._is_shown(qdisc)}
        # A reading leaves out what hangs below an HTB in a place that is not ours.
        majors = {htb.handle.major for htb in htbs_of(self._root, queues.values())}
        classes = {classid: spec for classid, spec in self._classes.items() if classid.major in majors}
        return Snapshot(
            device=self.device,
            root=self._root,
            queues=queues,
            classes=classes,
            leaves={parent: leaf for parent, leaf in self._leaves.items() if parent in classes},
            filters=tuple(sorted(self._shown_filters(majors), key=lambda f: f.key)),
            verbatim=tuple(self._verbatim()),
            counters={classid: ClassCounters() for classid in classes},
            hook=self._hook,
            tcx=self._beside.tcx,
            xps=self._beside.xps,
        )

    def _is_shown(self, qdisc: HtbQdisc | Leaf | OtherQdisc) -> bool:
        """Whether a dump has it: the kernel's own defaults only of live queues (net/sched/sch_mq.c)."""
        return qdisc.handle.major != 0 or qdisc.parent.minor <= self.device.tx_queues

    def _verbatim(self) -> Iterable[OtherQdisc]:
        shown = [qdisc for qdisc in self._queues.values() if qdisc and self._is_shown(qdisc)]
        below = [*self._others, *shown, *self._leaves.values()]
        yield from (plain(q) for q in (self._root, *below, self._hook) if q is not None)

    def set_live_tx_queues(self, count: int) -> None:
        """Have so many queues live, as `ethtool -L` would.

        What somebody chose for a queue that is not live stays, and is still shown. A new queue has the default
        qdisc from when the mq was made, unshaped; XPS of queues that go is forgotten.
        """
        if not 1 <= count <= self._tx_queues_max:
            raise ValueError(f"{count} live queues of at most {self._tx_queues_max}")
        self.device = replace(self.device, tx_queues=count)
        self._beside.forget_xps(live=count)

    def attach_foreign_tcx(self, name: str) -> None:
        """Have somebody else's program run first."""
        self._beside.attach_foreign(name)

    def send(self, operations: Sequence[Operation]) -> list[KernelRefusedError | None]:
        """Carry the operations out in order; each has its own outcome."""
        return [self._one(operation) for operation in operations]

    def _one(self, operation: Operation) -> KernelRefusedError | None:
        self.sent.append(operation)
        number = self._carry_out(operation)
        return refusal(number, doing=operation.describe()) if number else None

    def _carry_out(self, operation: Operation) -> int:
        match operation:
            case AddClass(spec):
                return self._add_class(spec)
            case ChangeClass(spec):
                return self._change_class(spec)
            case DeleteClass(classid):
                return self._delete_class(classid)
            case AddRoot(qdisc):
                return self._put_root(qdisc)
            case RestoreQdisc(qdisc):
                return self._restore(qdisc)
            case DeleteRoot(handle):
                return self._delete_root(handle)
            case SetQueue(qdisc):
                return self._put_below(qdisc)
            case SetLeaf(leaf, _, in_place):
                return self._put_below(leaf, in_place=in_place)
            case DeleteLeaf(parent, handle):
                return self._delete_leaf(parent, handle)
            case SetFilter(filter_):
                return self._set_filter(filter_)
            case DeleteFilter(filter_):
                return self._no_filters(filter_.parent) or delete_filter(self._filters, self._placed(filter_))
            case _:
                return self._carry_out_beside(operation)

    def _carry_out_beside(self, operation: Operation) -> int:
        """Carry out what is about no tree of qdiscs."""
        match operation:
            case AddHook():
                return self._put_hook(_CLSACT)
            case DeleteHook():
                return self._delete_hook()
            case SetTcx(program):
                return self._beside.set_tcx(program)
            case RemoveTcx():
                self._beside.remove_tcx()
            case SetXps(queue, mask):
                return self._beside.set_xps(queue, mask, live=self.device.tx_queues)
        return 0

    # Qdiscs: what is where.

    def _by_major(self, major: int) -> Qdisc | None:
        """Return the qdisc that has a handle."""
        everyone = (self._root, self._hook, *self._queues.values(), *self._leaves.values(), *self._others)
        return next((q for q in everyone if q is not None and major and q.handle.major == major), None)

    def _clear(self, root: Root) -> int:
        """Put a root in place, and with an mq the kernel's default for each queue."""
        if isinstance(root, OtherQdisc) and root.kind == "mq" and root.handle.major:
            root = MqQdisc(root.handle)
        self._root = root
        self._classes, self._leaves, self._others, self._queues = {}, {}, [], {}
        self._filters = {key: f for key, f in self._filters.items() if f.parent.major == HOOK.major}
        self._unbound = {key for key in self._unbound if key in self._filters}
        if isinstance(root, MqQdisc):
            live = self.device.tx_queues
            for queue in range(self._tx_queues_max):
                # The chosen default is for the queues that are live at that moment (net/sched/sch_generic.c).
                kind = self._default_kind if queue < live else "pfifo_fast"
                self._queues[root.child(queue)] = OtherQdisc(kind, Handle(0), root.child(queue))
        return 0

    def _clash(self, handle: Handle, kind: str, here: Qdisc | None) -> int:
        """Return the errno of a qdisc with this handle where another, or none, is now."""
        found = self._by_major(handle.major)
        # Same handle: the kernel takes it for a change of the qdisc that is there. One does not move.
        return 0 if found is None or (found is here and kind_of(found) == kind) else errno.EINVAL

    def _put_root(self, qdisc: HtbQdisc | MqQdisc | OtherQdisc) -> int:
        is_same = self._root is not None and self._root.handle == qdisc.handle
        problem = self._clash(qdisc.handle, qdisc.kind, self._root)
        if problem:
            return problem
        if qdisc.kind == "mq":
            if self._tx_queues_max == 1:
                return errno.EOPNOTSUPP
            # It has nothing that could be changed, so the same one again is no error and changes nothing.
            return 0 if is_same else self._clear(qdisc)
        if is_same and qdisc.kind == "htb":
            return errno.EINVAL  # htb knows no change
        return self._clear(qdisc)

    def _restore(self, qdisc: OtherQdisc) -> int:
        if qdisc.parent == ROOT:
            return self._put_root(qdisc)
        if qdisc.parent == HOOK:
            return self._put_hook(qdisc)
        return self._put_below(qdisc)

    def _delete_root(self, handle: Handle) -> int:
        present = self._root.handle if self._root is not None else Handle(0)
        if handle.major and present != handle:
            return errno.EINVAL
        if present.major == 0:
            return errno.ENOENT
        return self._clear(self._default_root)

    def _no_place(self, parent: Handle) -> int:
        """Return the errno of naming a place below a qdisc that is not there; 0 when it is."""
        above = self._by_major(parent.major)
        if above is None:
            return errno.ENOENT
        if isinstance(above, HtbQdisc):
            return 0 if parent in self._classes else errno.ENOENT
        if isinstance(above, MqQdisc):
            # Queues that are not live are places too.
            return 0 if parent in self._queues else errno.ENOENT
        return errno.EOPNOTSUPP

    def _put_below(self, qdisc: HtbQdisc | Leaf | OtherQdisc, *, in_place: bool = False) -> int:
        place = qdisc.parent
        problem = self._no_place(place)
        if problem:
            return problem
        is_queue = place in self._queues
        here = self._queues[place] if is_queue else self._leaves.get(place)
        if not is_queue and here is None:
            return errno.EINVAL  # a class with children
        problem = self._clash(qdisc.handle, kind_of(qdisc), here)
        if problem:
            return problem
        if here is not None and here.handle == qdisc.handle:
            changed = changed_to(here, qdisc, in_place=in_place)
            if changed is None:
                return errno.EINVAL
            qdisc = changed
        elif here is not None:
            self._forget(here.handle.major)
        if is_queue:
            self._queues[place] = qdisc
        else:
            self._leaves[place] = plain(qdisc) if isinstance(qdisc, HtbQdisc) else qdisc
        return 0

    def _forget(self, major: int) -> None:
        """Take away what hung below a qdisc that goes."""
        self._classes = {classid: spec for classid, spec in self._classes.items() if classid.major != major}
        self._leaves = {parent: leaf for parent, leaf in self._leaves.items() if parent.major != major}
        self._filters = {key: each for key, each in self._filters.items() if each.parent.major != major}
        self._unbound = {key for key in self._unbound if key in self._filters}

    def _delete_leaf(self, parent: Handle, handle: Handle) -> int:
        problem = self._no_place(parent)
        if problem:
            return problem
        is_queue = parent in self._queues
        here = self._queues[parent] if is_queue else self._leaves.get(parent)
        if here is None and not is_queue:
            return errno.ENOENT
        present = here.handle if here is not None else Handle(0)
        if handle.major and present != handle:
            return errno.EINVAL
        if present.major == 0:
            return errno.ENOENT
        if is_queue:
            # No default takes its place: the queue drops everything from now on.
            self._forget(present.major)
            self._queues[parent] = None
        else:
            self._leaves[parent] = OtherQdisc("pfifo", Handle(0), parent)
        return 0

    # Classes.

    def _no_classes(self, classid: Handle, parent: Handle | None = None) -> int:
        """Return the errno of naming a class, or a place for one, that no qdisc here can have; 0 when one can."""
        if parent is not None and parent.major != classid.major:
            return errno.EINVAL
        above = self._by_major(classid.major)
        if above is None:
            return errno.ENOENT
        return 0 if isinstance(above, HtbQdisc | MqQdisc) else errno.EINVAL

    def _is_of_mq(self, classid: Handle) -> bool:
        """Whether a class could only be an mq's, which come and go with it, one for each queue."""
        return isinstance(self._by_major(classid.major), MqQdisc)

    def _add_class(self, spec: HtbClass) -> int:
        problem = self._no_classes(spec.classid, spec.parent)
        if problem:
            return problem
        if spec.classid in self._classes or spec.classid in self._queues:
            return errno.EEXIST
        if self._is_of_mq(spec.classid):
            return errno.EOPNOTSUPP
        if (
            not (spec.floor.bytes_per_second and spec.ceil.bytes_per_second)
            or self._depth_below(spec.parent) > _HTB_LEVELS
        ):
            return errno.EINVAL
        # A parent that does not exist is taken without a word, and the class put at the top.
        parent = spec.parent if spec.parent in self._classes else Handle(spec.classid.major)
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

    def _has_children(self, classid: Handle) -> bool:
        return any(c.parent == classid for c in self._classes.values())

    def _change_class(self, spec: HtbClass) -> int:
        problem = self._no_classes(spec.classid, spec.parent)
        if problem:
            return problem
        if spec.classid in self._queues:
            return errno.EOPNOTSUPP
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
        if classid in self._queues:
            return errno.EOPNOTSUPP
        if classid not in self._classes:
            return errno.ENOENT
        if self._has_children(classid) or is_named(classid, self._filters.values(), unbound=self._unbound):
            return errno.EBUSY
        gone = self._classes.pop(classid)
        self._leaves.pop(classid, None)
        if gone.parent in self._classes and not self._has_children(gone.parent):
            self._leaves[gone.parent] = OtherQdisc("pfifo", Handle(0), gone.parent)
        return 0

    # Filters, hooks and what is beside the tree.

    def _no_filters(self, parent: Handle) -> int:
        """Return the errno of a filter where there is nothing that has any; 0 when there is."""
        if parent in (INGRESS, EGRESS):
            return 0 if self._hook is not None else errno.EINVAL
        above = self._by_major(parent.major)
        if isinstance(above, MqQdisc):
            return errno.EOPNOTSUPP
        return 0 if isinstance(above, HtbQdisc) and above.handle == parent else errno.EINVAL

    def _placed(self, filter_: Filter) -> Filter:
        """Return a filter where it comes to hang: an ingress qdisc takes those for egress too, among its own."""
        is_taken_in = filter_.parent.major == HOOK.major and self._hook is not None and self._hook.kind == "ingress"
        return replace(filter_, parent=INGRESS) if is_taken_in else filter_

    def _shown_filters(self, majors: Container[int]) -> Iterable[Filter]:
        """Yield what a reading has; it does not look at those of an ingress qdisc."""
        has_clsact = self._hook is not None and self._hook.kind == "clsact"
        for each in self._filters.values():
            if has_clsact if each.parent.major == HOOK.major else each.parent.major in majors:
                yield each

    def _set_filter(self, filter_: Filter) -> int:
        filter_ = self._placed(filter_)
        problem = self._no_filters(filter_.parent) or set_filter(self._filters, filter_)
        if problem:
            return problem
        # A class that does not exist is taken without a word.
        self._unbound.discard(filter_.key)
        if named_class(filter_) not in self._classes:
            self._unbound.add(filter_.key)
        return 0

    def _put_hook(self, qdisc: OtherQdisc) -> int:
        self._had_hook = True
        problem = self._clash(qdisc.handle, qdisc.kind, self._hook)
        if not problem:
            self._hook = qdisc
        return problem

    def _delete_hook(self) -> int:
        """Take away whatever stands at the hook: a deletion names no kind, so an ingress qdisc goes too."""
        if self._hook is None:
            # The kernel keeps the place of the first hook for ever, even when that was refused.
            return errno.EINVAL if self._had_hook else errno.ENOENT
        self._forget(HOOK.major)
        self._hook = None
        return 0
