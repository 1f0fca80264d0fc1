"""Operations carried out and read back. rc 0 proves nothing: an outcome is what a later reading shows.

What a tree stands on (the root, an mq's queues, the hook) comes first and in one send, since each
of these loses the device's queue; when it is not there afterwards, nothing else is sent.
Everything else goes in bulk, and one class that the kernel refuses does not stop the
others. A class whose owner left goes once it is quiet; one that still sends stays, and is
said, since without it its connections would lose their ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeGuard

from kura_shaper.tree.model import OtherMatch
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
    RemoveTcx,
    RestoreQdisc,
    SetFilter,
    SetLeaf,
    SetQueue,
    SetTcx,
    SetXps,
)
from kura_shaper.tree.snapshot import Snapshot, Unknown

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.device import TrafficControl
    from kura_shaper.kernel.errors import KernelRefusedError
    from kura_shaper.tree.model import Handle
    from kura_shaper.tree.operations import Operation

_FOUNDATION = (AddRoot, DeleteRoot, SetQueue, AddHook)
QUIET_WITHIN_NS = 2_000_000_000
QUIET_FOR_NS = 200_000_000


class Status(StrEnum):
    """What became of an operation."""

    DONE = "done"
    REFUSED = "refused"
    NOT_HELD = "not-held"
    SKIPPED = "skipped"
    UNVERIFIED = "unverified"
    BUSY = "busy"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One operation and what became of it; detail is one line, empty when done."""

    operation: Operation
    status: Status
    detail: str = ""


def execute(
    operations: Sequence[Operation],
    control: TrafficControl,
    *,
    clock: Clock,
    quiet_within_ns: int = QUIET_WITHIN_NS,
) -> tuple[Outcome, ...]:
    """Carry out operations in order and return each one's outcome after reading back.

    A class that goes only when it is quiet is waited for as long as `quiet_within_ns`; it is quiet when it
    neither queues nor sends for QUIET_FOR_NS, so less than that lets none go.
    """
    foundation = [op for op in operations if isinstance(op, _FOUNDATION)]
    rest = [op for op in operations if not isinstance(op, _FOUNDATION)]
    outcomes = _carry_out(foundation, control, clock=clock, quiet_within_ns=quiet_within_ns)
    if any(outcome.status is not Status.DONE for outcome in outcomes):
        skipped = (Outcome(op, Status.SKIPPED, "what the tree stands on is not as wanted") for op in rest)
        return (*outcomes, *skipped)
    return (*outcomes, *_carry_out(rest, control, clock=clock, quiet_within_ns=quiet_within_ns))


def _carry_out(
    operations: Sequence[Operation], control: TrafficControl, *, clock: Clock, quiet_within_ns: int
) -> list[Outcome]:
    if not operations:
        return []
    leaving = [op.classid for op in operations if _waits(op)]
    busy = _still_busy(leaving, control, clock=clock, within_ns=quiet_within_ns)
    sent = [not (_waits(op) and op.classid in busy) for op in operations]
    answers = iter(control.send([op for op, is_sent in zip(operations, sent, strict=True) if is_sent]))
    errors = [next(answers) if is_sent else None for is_sent in sent]
    after = control.snapshot()
    last = {_object_of(op): at for at, op in enumerate(operations)}
    return [
        _outcome(op, errors[at], after, is_sent=sent[at], is_last=last[_object_of(op)] == at)
        for at, op in enumerate(operations)
    ]


def _outcome(
    operation: Operation, error: KernelRefusedError | None, after: Snapshot | Unknown, *, is_sent: bool, is_last: bool
) -> Outcome:
    if error is not None:
        return Outcome(operation, Status.REFUSED, str(error))
    if isinstance(after, Unknown):
        return Outcome(operation, Status.UNVERIFIED, after.reason)
    if not is_sent:
        return Outcome(operation, Status.BUSY, "it still sends; run again when its connections have ended")
    if is_last and not holds(operation, after):
        return Outcome(operation, Status.NOT_HELD, "accepted, but a reading shows something else")
    return Outcome(operation, Status.DONE)


def _waits(operation: Operation) -> TypeGuard[DeleteClass]:
    return isinstance(operation, DeleteClass) and operation.only_when_quiet


def _still_busy(classids: Iterable[Handle], control: TrafficControl, *, clock: Clock, within_ns: int) -> set[Handle]:
    """Return the classes that are not quiet within that time: that queue, or sent between two readings."""
    busy = set(classids)
    before: dict[Handle, int] = {}
    deadline = clock.now_ns() + within_ns
    while busy:
        actual = control.snapshot()
        if isinstance(actual, Unknown):
            return busy
        counters = {c: actual.counters[c] for c in busy if c in actual.counters}
        busy = {c for c, found in counters.items() if found.backlog_bytes or before.get(c) != found.sent_bytes}
        before = {c: found.sent_bytes for c, found in counters.items()}
        if not busy or clock.now_ns() >= deadline:
            return busy
        clock.wait_ns(QUIET_FOR_NS)
    return busy


def _object_of(operation: Operation) -> Hashable:
    """Return what an operation works on: of several on one object only the last must hold."""
    match operation:
        case AddRoot() | DeleteRoot():
            return "root"
        case AddClass(spec) | ChangeClass(spec):
            return ("class", spec.classid)
        case DeleteClass(classid):
            return ("class", classid)
        case SetQueue(qdisc):
            return ("queue", qdisc.parent)
        case AddHook() | DeleteHook():
            return "hook"
        case SetTcx() | RemoveTcx():
            return "tcx"
        case SetXps(queue):
            return ("xps", queue)
        case SetLeaf(leaf):
            return ("leaf", leaf.parent)
        case DeleteLeaf(parent):
            return ("leaf", parent)
        case RestoreQdisc(qdisc):
            return ("leaf", qdisc.parent)
        case SetFilter(filter_) | DeleteFilter(filter_):
            return ("filter", filter_.key)


def holds(operation: Operation, after: Snapshot) -> bool:
    """Whether a reading shows what the operation was for."""
    match operation:
        case AddRoot(qdisc):
            return after.root == qdisc
        case DeleteRoot(handle):
            return after.root is None or after.root.handle != handle
        case SetQueue(qdisc):
            return after.queues.get(qdisc.parent) == qdisc
        case AddHook():
            return after.hook is not None and after.hook.kind == "clsact"
        case DeleteHook():
            return after.hook is None
        case SetTcx(program):
            return bool(after.tcx and after.tcx.programs and after.tcx.programs[0].name == program.name)
        case RemoveTcx():
            return not (after.tcx and any(found.is_ours for found in after.tcx.programs))
        case SetXps(queue, mask):
            return after.xps is not None and after.xps.get(queue, 0) == mask
        case AddClass(spec) | ChangeClass(spec):
            return after.classes.get(spec.classid) == spec
        case DeleteClass(classid):
            return classid not in after.classes
        case SetLeaf(leaf):
            return after.leaves.get(leaf.parent) == leaf
        case DeleteLeaf(parent, handle):
            return parent not in after.leaves or after.leaves[parent].handle != handle
        case RestoreQdisc(qdisc):
            return any((q.kind, q.handle, q.parent) == (qdisc.kind, qdisc.handle, qdisc.parent) for q in after.verbatim)
        case SetFilter(filter_):
            return filter_ in after.filters
        case DeleteFilter(filter_):
            of_priority = [f for f in after.filters if f.key[:3] == filter_.key[:3]]
            if filter_.handle == 0:  # ours may have taken the place of what was not
                return not any(isinstance(f.match, OtherMatch) for f in of_priority)
            return filter_ not in of_priority
