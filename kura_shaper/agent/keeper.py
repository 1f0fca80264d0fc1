"""One device kept as its document wants it: one look, one decision, and a word for what it was.

Level-triggered: a look reads everything and compares it with what is wanted, whatever the
reason for looking. So an event that got lost costs time and nothing else. What has to be
done is one of three things, which are counted apart: the first install, a change that the
document or the settings asked for, or drift, which is a change that nobody asked for.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.errors import KuraShaperError, RefusedError
from kura_shaper.kernel.apply import apply_document
from kura_shaper.kernel.executor import QUIET_FOR_NS, Status
from kura_shaper.kernel.prove import prove_steering
from kura_shaper.tree.build import build
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import EGRESS, Shape
from kura_shaper.tree.notes import Weight
from kura_shaper.tree.observe import in_force_for
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
    Impact,
    RemoveTcx,
    RestoreQdisc,
    SetFilter,
    SetLeaf,
    SetQueue,
    SetTcx,
    SetXps,
)
from kura_shaper.tree.owners import foreign_owners
from kura_shaper.tree.preflight import Permission, is_ours
from kura_shaper.tree.snapshot import Unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.apply import Applied
    from kura_shaper.kernel.device import TrafficControl
    from kura_shaper.kernel.journal import Journal
    from kura_shaper.kernel.prove import Proof, Prove
    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.tree.build import Capabilities, TreeSettings
    from kura_shaper.tree.diff import Plan
    from kura_shaper.tree.model import Device
    from kura_shaper.tree.operations import Operation
    from kura_shaper.tree.snapshot import Snapshot

REBUILDS_AN_HOUR = 3
_HOUR_NS = 3600 * 1_000_000_000
# Proofs send frames; a burst of events must not become a burst of frames.
_PROOF_EVERY_NS = 10_000_000_000
# Whether a class has fallen silent takes two seconds to see, in which nothing else is mended.
_DRAIN_EVERY_NS = 30_000_000_000
# Two readings: what still sends is looked at again later, and the next device need not wait for it.
_QUIET_WITHIN_NS = QUIET_FOR_NS
_LOCK_WITHIN_NS, _LOCK_EVERY_NS = 1_000_000_000, 20_000_000


class DriftKind(StrEnum):
    """What of a tree was not as it had been left."""

    ROOT = "root"
    QUEUE = "queue"
    CLASS = "class"
    LEAF = "leaf"
    FILTER = "filter"
    HOOK = "hook"
    STEERING = "steering"


class Verdict(StrEnum):
    """What a look came to."""

    IN_STEP = "in step"
    INSTALLED = "installed"
    CHANGED = "changed"
    REPAIRED = "repaired"
    WOULD_CHANGE = "would change"
    WAITS = "waits"
    FAILED = "failed"
    UNKNOWN = "unknown"
    DRAINING = "draining"

    @property
    def is_well(self) -> bool:
        """Whether the device is as wanted, but for classes that go when their last connection has ended."""
        return self in _WELL


_WELL = frozenset({Verdict.IN_STEP, Verdict.INSTALLED, Verdict.CHANGED, Verdict.REPAIRED, Verdict.DRAINING})


@dataclass(frozen=True, slots=True)
class Looked:
    """One look at a device. `reasons` say, a line each, what keeps it from being in step; `operations` were
    done, or in observe mode would be, and `pending` are left to do. `shape` and `why_shape` are of the tree
    that is wanted. After `again_in_ns` another look is due even if nothing is heard (0: there is no such need).

    `proof` is the newest proof of steering, None where none is needed or none was made yet. `foreign`
    names whoever else has a hand on the device, `findings` what a person should mend.
    """

    verdict: Verdict
    reasons: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    pending: int = 0
    drift: tuple[tuple[DriftKind, int], ...] = ()
    shape: Shape | None = None
    shaped_queues: int = 0
    why_shape: str = ""
    proof: Proof | None = None
    foreign: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    again_in_ns: int = 0


@dataclass(slots=True)
class Tally:
    """Counts since the agent started. A look that finds both counts as a change and as a repair."""

    installs: int = 0
    changes: int = 0
    repairs: int = 0
    drift: Counter[DriftKind] = field(default_factory=Counter)


class DeviceKeeper:
    """Keeps one device. Not for several threads at once."""

    def __init__(
        self,
        control: TrafficControl,
        journal: Journal,
        capabilities: Capabilities,
        *,
        clock: Clock,
        prove: Prove = prove_steering,
    ) -> None:
        self.tally = Tally()
        self._control, self._journal, self._capabilities = control, journal, capabilities
        self._clock, self._prove = clock, prove
        # What was asked for at the last look, and what of it could not be done or has to wait.
        self._left: _Asked | None = None
        self._undone: frozenset[Operation] = frozenset()
        self._rebuilds_ns: deque[int] = deque()
        self._proof: Proof | None = None
        self._proved_at_ns = -_PROOF_EVERY_NS

    def follow(self, before: DeviceKeeper) -> None:
        """Go on where another keeper of the same device stops, so that nothing is counted from 0 or taken for new."""
        self.tally, self._left, self._undone = before.tally, before._left, before._undone
        self._rebuilds_ns = before._rebuilds_ns

    def look(
        self,
        document: TenantsDocument,
        settings: TreeSettings,
        *,
        observe: bool = False,
        permission: Permission = Permission.NONE,
    ) -> Looked:
        """Look once and, unless `observe`, do what is to be done. Never raises for what a kernel can do."""
        if observe:
            # What others do to the tree while we keep off is their business, not drift.
            self._left = None
        try:
            actual = self._control.snapshot()
            if isinstance(actual, Unknown):
                return Looked(Verdict.UNKNOWN, (actual.reason,))
            asked = _Asked(document, settings, permission, actual.device)
            seen = self._seen(asked, actual)
            if seen.planned.unknown:
                return Looked(Verdict.UNKNOWN, (seen.planned.unknown,))
            if seen.planned.refusals:
                return self._looked(seen, Verdict.WAITS, tuple(map(str, seen.planned.refusals)))
            if not seen.planned.operations:
                return self._settled(seen, asked, observe=observe)
            if observe:
                planned = seen.planned.operations
                return self._looked(seen, Verdict.WOULD_CHANGE, operations=planned, pending=len(planned))
            return self._act(seen, asked)
        except RefusedError as error:
            return Looked(Verdict.WAITS, (str(error),))
        except KuraShaperError as error:
            return Looked(Verdict.FAILED, (str(error),))

    def _seen(self, asked: _Asked, actual: Snapshot) -> _Seen:
        wanted = build(
            asked.document,
            asked.device,
            settings=asked.settings,
            capabilities=self._capabilities,
            in_force=in_force_for(actual, asked.settings, asked.permission),
        )
        return _Seen(actual, plan(wanted, actual, asked.permission), wanted.tree.shape, len(wanted.tree.htbs))

    def _settled(self, seen: _Seen, asked: _Asked, *, observe: bool = False) -> Looked:
        self._left, self._undone = None if observe else asked, frozenset()
        again_in_ns = 0
        if seen.shape is Shape.MQ:
            again_in_ns = max(0, self._proved_at_ns + _PROOF_EVERY_NS - self._clock.now_ns())
            if not again_in_ns:
                self._proved(self._prove(self._control, asked.document.marks, clock=self._clock))
        unproven = self._unproven(seen)
        return self._looked(seen, Verdict.FAILED if unproven else Verdict.IN_STEP, unproven, again_in_ns=again_in_ns)

    def _act(self, seen: _Seen, asked: _Asked) -> Looked:
        if seen.planned.impact is Impact.DEVICE_LOSS and not self._may_rebuild():
            words = f"the tree was rebuilt {REBUILDS_AN_HOUR} times within an hour: somebody takes it away"
            reasons = (f"{words}; find out who, the next try is within the hour",)
            return self._looked(seen, Verdict.WAITS, reasons, pending=len(seen.planned.operations))
        drifted = self._drifted(seen, asked)
        with self._locked():
            applied = apply_document(
                asked.document,
                self._control,
                self._journal,
                settings=asked.settings,
                capabilities=self._capabilities,
                permission=asked.permission,
                clock=self._clock,
                prove=self._prove,
                quiet_within_ns=_QUIET_WITHIN_NS,
            )
        if applied.plan.impact is Impact.DEVICE_LOSS:
            self._rebuilds_ns.append(self._clock.now_ns())
        self._proved(applied.proof)
        if applied.plan.unknown:
            return Looked(Verdict.UNKNOWN, (applied.plan.unknown,))
        if not applied.outcomes and not applied.plan.refusals:
            return self._settled(seen, asked)
        return self._told(seen, asked, applied, drifted)

    def _told(self, seen: _Seen, asked: _Asked, applied: Applied, drifted: frozenset[Operation]) -> Looked:
        """Count what was done and say what was not."""
        done = [o.operation for o in applied.outcomes if o.status is Status.DONE]
        undone = [o for o in applied.outcomes if o.status is not Status.DONE]
        failed = [f"{o.operation.describe()}: {o.detail}" for o in undone if o.status is not Status.BUSY]
        busy = tuple(f"{o.operation.describe()}: {o.detail}" for o in undone if o.status is Status.BUSY)
        if self._left is not None and self._left.is_like(asked):
            drifted = frozenset(applied.plan.operations) - self._undone
        verdict = self._count(seen, asked, drifted, is_done=bool(done))
        drift = tuple(sorted(drift_of(drifted).items()))
        self._left, self._undone = asked, frozenset(o.operation for o in undone)
        reasons = (*failed, *map(str, applied.plan.refusals), *self._unproven(seen))
        if reasons:
            verdict = Verdict.FAILED if failed or not applied.plan.refusals else Verdict.WAITS
        return self._looked(
            seen,
            verdict,
            (*reasons, *busy),
            operations=done,
            pending=len(undone),
            drift=drift,
            again_in_ns=_DRAIN_EVERY_NS if busy else 0,
        )

    def _drifted(self, seen: _Seen, asked: _Asked) -> frozenset[Operation]:
        """Return what would bring back what was left, where something else is asked for now.

        Else that is what `apply_document` does once it has the lock: until then whoever balances the budget
        may have moved a part of it between the reading of one queue and of another.
        """
        if self._left is None or self._left.is_like(asked):
            return frozenset()
        try:
            return frozenset(self._seen(self._left, seen.actual).planned.operations) - self._undone
        except KuraShaperError:
            return frozenset()

    def _count(self, seen: _Seen, asked: _Asked, drifted: frozenset[Operation], *, is_done: bool) -> Verdict:
        """Count one act and tell what it was. Drift counts once, even when it can't be mended at once."""
        drift = drift_of(drifted)
        self.tally.drift.update(drift)
        if not is_done:
            return Verdict.DRAINING
        if not is_ours(seen.actual.root) and DriftKind.ROOT not in drift:
            self.tally.installs += 1
            return Verdict.INSTALLED
        self.tally.repairs += bool(drifted)
        if self._left is not None and self._left.is_like(asked):
            return Verdict.REPAIRED if drifted else Verdict.CHANGED
        self.tally.changes += 1
        return Verdict.CHANGED

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the device, and wait a moment for it: who balances its budget takes it ten times a second."""
        deadline_ns = self._clock.now_ns() + _LOCK_WITHIN_NS
        with ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(self._journal.locked())
                    break
                except RefusedError:
                    if self._clock.now_ns() >= deadline_ns:
                        raise
                self._clock.wait_ns(_LOCK_EVERY_NS)
            yield

    def _may_rebuild(self) -> bool:
        while self._rebuilds_ns and self._clock.now_ns() - self._rebuilds_ns[0] >= _HOUR_NS:
            self._rebuilds_ns.popleft()
        return len(self._rebuilds_ns) < REBUILDS_AN_HOUR

    def _proved(self, proof: Proof | None) -> None:
        if proof is not None:
            self._proof, self._proved_at_ns = proof, self._clock.now_ns()

    def _unproven(self, seen: _Seen) -> tuple[str, ...]:
        if seen.shape is not Shape.MQ or self._proof is None or self._proof.is_proven:
            return ()
        return (f"steering is not proven: {self._proof.reason}",)

    def _looked(
        self,
        seen: _Seen,
        verdict: Verdict,
        reasons: tuple[str, ...] = (),
        *,
        operations: Iterable[Operation] = (),
        pending: int = 0,
        drift: tuple[tuple[DriftKind, int], ...] = (),
        again_in_ns: int = 0,
    ) -> Looked:
        why = next((note.message for note in seen.planned.notes if note.code == "shape"), "")
        findings = tuple(note.message for note in seen.planned.notes if note.weight is Weight.FINDING)
        return Looked(
            verdict=verdict,
            reasons=reasons,
            operations=tuple(operation.describe() for operation in operations),
            pending=pending,
            drift=drift,
            shape=seen.shape,
            shaped_queues=seen.shaped_queues,
            why_shape=why,
            proof=self._proof if seen.shape is Shape.MQ else None,
            foreign=foreign_owners(seen.actual),
            findings=findings,
            again_in_ns=again_in_ns,
        )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a device is to be, and what the device itself was then, which a tree follows from as well."""

    document: TenantsDocument
    settings: TreeSettings
    permission: Permission
    device: Device

    def is_like(self, other: _Asked) -> bool:
        """Whether it is the same tree that is asked for, whatever may be done for it."""
        return self._tree == other._tree

    @property
    def _tree(self) -> tuple[object, ...]:
        device = self.device
        sizes = (device.mtu_bytes, device.gso_max_bytes, device.tx_queue_len_packets, device.tx_queues)
        return self.document, self.settings, sizes


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a look found and what it would take."""

    actual: Snapshot
    planned: Plan
    shape: Shape
    shaped_queues: int


def drift_of(operations: Iterable[Operation]) -> Counter[DriftKind]:
    """Return which parts of a tree operations mend, each once. What went with a part that carried it is not told."""
    all_of_it = tuple(operations)
    queues = {op.qdisc.handle.major for op in all_of_it if isinstance(op, SetQueue)}
    classes = {op.spec.classid for op in all_of_it if isinstance(op, AddClass)}
    hooks = {EGRESS for op in all_of_it if isinstance(op, AddHook)}

    def is_carried(operation: Operation) -> bool:
        match operation:
            case AddClass(spec):
                return spec.classid.major in queues
            case SetLeaf(leaf):
                return leaf.parent in classes or leaf.parent.major in queues
            case SetFilter(filter_):
                return filter_.parent in hooks or filter_.parent.major in queues
            case _:
                return False

    kinds = {_drift_kind(operation) for operation in all_of_it if not is_carried(operation)}
    return Counter({DriftKind.ROOT} if DriftKind.ROOT in kinds else kinds)


def _drift_kind(operation: Operation) -> DriftKind:
    match operation:
        case AddRoot() | DeleteRoot() | RestoreQdisc():
            return DriftKind.ROOT
        case SetQueue():
            return DriftKind.QUEUE
        case AddClass() | ChangeClass() | DeleteClass():
            return DriftKind.CLASS
        case SetLeaf() | DeleteLeaf():
            return DriftKind.LEAF
        case SetFilter() | DeleteFilter():
            return DriftKind.FILTER
        case AddHook() | DeleteHook():
            return DriftKind.HOOK
        case SetTcx() | RemoveTcx() | SetXps():
            return DriftKind.STEERING
