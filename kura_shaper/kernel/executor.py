"""Operations carried out and read back. rc 0 proves nothing: an outcome is what a later reading shows.

The root comes first and alone; when it is not there afterwards, nothing else is sent.
Everything else goes in bulk, and one class that the kernel refuses does not stop the
others. A class that has to go is drained first, for a bounded time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

from kura_shaper.tree.operations import (
    AddClass,
    AddRoot,
    ChangeClass,
    DeleteClass,
    DeleteFilter,
    DeleteLeaf,
    DeleteRoot,
    RestoreQdisc,
    SetFilter,
    SetLeaf,
)
from kura_shaper.tree.snapshot import Snapshot, Unknown

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.device import TrafficControl
    from kura_shaper.tree.model import Handle
    from kura_shaper.tree.operations import Operation

_DRAIN_NS = 2_000_000_000
_DRAIN_POLL_NS = 20_000_000


class Status(StrEnum):
    """What became of an operation."""

    DONE = "done"
    REFUSED = "refused"
    NOT_HELD = "not-held"
    SKIPPED = "skipped"
    UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One operation and what became of it; detail is one line, empty when done."""

    operation: Operation
    status: Status
    detail: str = ""


def execute(operations: Sequence[Operation], control: TrafficControl, *, clock: Clock) -> tuple[Outcome, ...]:
    """Carry out operations in order and return each one's outcome after reading back."""
    on_root = [op for op in operations if isinstance(op, AddRoot | DeleteRoot)]
    rest = [op for op in operations if not isinstance(op, AddRoot | DeleteRoot)]
    outcomes = _carry_out(on_root, control, clock=clock)
    if any(outcome.status is not Status.DONE for outcome in outcomes):
        skipped = (Outcome(op, Status.SKIPPED, "the root qdisc is not as wanted") for op in rest)
        return (*outcomes, *skipped)
    return (*outcomes, *_carry_out(rest, control, clock=clock))


def _carry_out(operations: Sequence[Operation], control: TrafficControl, *, clock: Clock) -> list[Outcome]:
    if not operations:
        return []
    errors = []
    for deleting, group in groupby(operations, key=lambda op: isinstance(op, DeleteClass)):
        run = list(group)
        if deleting:
            _drain([op.classid for op in run if isinstance(op, DeleteClass)], control, clock=clock)
        errors += control.send(run)
    after = control.snapshot()
    last = {_object_of(op): at for at, op in enumerate(operations)}
    outcomes = []
    for at, (operation, error) in enumerate(zip(operations, errors, strict=True)):
        if error is not None:
            outcomes.append(Outcome(operation, Status.REFUSED, str(error)))
        elif isinstance(after, Unknown):
            outcomes.append(Outcome(operation, Status.UNVERIFIED, after.reason))
        elif last[_object_of(operation)] == at and not holds(operation, after):
            outcomes.append(Outcome(operation, Status.NOT_HELD, "accepted, but a reading shows something else"))
        else:
            outcomes.append(Outcome(operation, Status.DONE))
    return outcomes


def _drain(classids: Iterable[Handle], control: TrafficControl, *, clock: Clock) -> None:
    """Wait until the classes queue nothing, at most two seconds: deleting one drops its queue."""
    waiting = set(classids)
    deadline = clock.now_ns() + _DRAIN_NS
    while clock.now_ns() < deadline:
        actual = control.snapshot()
        if isinstance(actual, Unknown):
            return
        waiting = {c for c in waiting if c in actual.counters and actual.counters[c].backlog_bytes}
        if not waiting:
            return
        clock.wait_ns(_DRAIN_POLL_NS)


def _object_of(operation: Operation) -> Hashable:
    """Return what an operation works on: of several on one object only the last must hold."""
    match operation:
        case AddRoot() | DeleteRoot():
            return "root"
        case AddClass(spec) | ChangeClass(spec):
            return ("class", spec.classid)
        case DeleteClass(classid):
            return ("class", classid)
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
            return filter_ not in after.filters
