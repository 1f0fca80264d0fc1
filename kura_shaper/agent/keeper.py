"""One device kept as its document wants it: one look, one decision, and a word for what it was.

Level-triggered: a look reads everything and compares it with what is wanted, whatever the
reason for looking. So an event that got lost costs time and nothing else. What has to be
done is one of three things, which are counted apart: the first install, a change that the
document or the settings asked for, or drift, which is a change that nobody asked for.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.errors import KuraShaperError, RefusedError
from kura_shaper.kernel.apply import apply_document
from kura_shaper.kernel.executor import Status
from kura_shaper.kernel.prove import prove_steering
from kura_shaper.tree.build import build
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import MqQdisc, Shape
from kura_shaper.tree.notes import Weight
from kura_shaper.tree.observe import in_force_for, shape_in_force
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
from kura_shaper.tree.preflight import Permission, is_ours
from kura_shaper.tree.snapshot import Unknown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.device import TrafficControl
    from kura_shaper.kernel.journal import Journal
    from kura_shaper.kernel.prove import Proof, Prove
    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.tree.build import Capabilities, TreeSettings
    from kura_shaper.tree.diff import Plan
    from kura_shaper.tree.operations import Operation
    from kura_shaper.tree.snapshot import Snapshot

REBUILDS_AN_HOUR = 3
_HOUR_NS = 3600 * 1_000_000_000
# Proofs send frames; a burst of events must not become a burst of frames.
_PROOF_EVERY_NS = 10_000_000_000


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


@dataclass(frozen=True, slots=True)
class Looked:
    """One look at a device. `reasons` say, a line each, what keeps it from being in step; `operations` were
    done, or in observe mode would be. `shape` and `why_shape` are of the tree that is wanted.

    `proof` is the newest proof of steering, None where none is needed or none was made yet. `foreign`
    names whoever else has a hand on the device, `findings` what a person should mend.
    """

    verdict: Verdict
    reasons: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    drift: tuple[tuple[DriftKind, int], ...] = ()
    shape: Shape | None = None
    shaped_queues: int = 0
    why_shape: str = ""
    proof: Proof | None = None
    foreign: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


@dataclass(slots=True)
class Tally:
    """Counts since the agent started."""

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
        self._left: tuple[TenantsDocument, TreeSettings] | None = None
        self._rebuilds_ns: deque[int] = deque()
        self._proof: Proof | None = None
        self._proved_at_ns = -_PROOF_EVERY_NS

    def follow(self, before: DeviceKeeper) -> None:
        """Go on where another keeper of the same device stops, so that nothing is counted from 0 or taken for new."""
        self.tally, self._left, self._rebuilds_ns = before.tally, before._left, before._rebuilds_ns

    def look(
        self,
        document: TenantsDocument,
        settings: TreeSettings,
        *,
        observe: bool = False,
        permission: Permission = Permission.NONE,
    ) -> Looked:
        """Look once and, unless `observe`, do what is to be done. Never raises for what a kernel can do."""
        try:
            actual = self._control.snapshot()
            if isinstance(actual, Unknown):
                return Looked(Verdict.UNKNOWN, (actual.reason,))
            wanted = build(
                document,
                actual.device,
                settings=settings,
                capabilities=self._capabilities,
                in_force=in_force_for(actual, settings, permission),
            )
            planned = plan(wanted, actual, permission)
            seen = _Seen(actual, planned, wanted.tree.shape, len(wanted.tree.htbs))
            if planned.unknown:
                return Looked(Verdict.UNKNOWN, (planned.unknown,))
            if planned.refusals:
                return self._waiting(seen, tuple(map(str, planned.refusals)))
            if not planned.operations:
                return self._settled(seen, document, settings)
            if observe:
                return self._looked(seen, Verdict.WOULD_CHANGE)
            return self._act(seen, document, settings, permission)
        except RefusedError as error:
            return Looked(Verdict.WAITS, (str(error),))
        except KuraShaperError as error:
            return Looked(Verdict.FAILED, (str(error),))

    def _settled(self, seen: _Seen, document: TenantsDocument, settings: TreeSettings) -> Looked:
        self._left = (document, settings)
        if seen.shape is Shape.MQ and self._clock.now_ns() - self._proved_at_ns >= _PROOF_EVERY_NS:
            self._proved(self._prove(self._control, document.marks, clock=self._clock))
        unproven = self._unproven(seen)
        return self._looked(seen, Verdict.FAILED if unproven else Verdict.IN_STEP, unproven)

    def _act(self, seen: _Seen, document: TenantsDocument, settings: TreeSettings, permission: Permission) -> Looked:
        if seen.planned.impact is Impact.DEVICE_LOSS and not self._may_rebuild():
            words = f"the tree was rebuilt {REBUILDS_AN_HOUR} times within an hour: somebody takes it away"
            return self._waiting(seen, (f"{words}; find out who, the next try is within the hour",))
        nature = self._nature(seen, document, settings)
        with self._journal.locked():
            applied = apply_document(
                document,
                self._control,
                self._journal,
                settings=settings,
                capabilities=self._capabilities,
                permission=permission,
                clock=self._clock,
                prove=self._prove,
            )
        if applied.plan.impact is Impact.DEVICE_LOSS:
            self._rebuilds_ns.append(self._clock.now_ns())
        self._proved(applied.proof)
        failed = [o for o in applied.outcomes if o.status not in {Status.DONE, Status.BUSY}]
        reasons = (*(f"{o.operation.describe()}: {o.detail}" for o in failed), *map(str, applied.plan.refusals))
        if applied.plan.unknown:
            return Looked(Verdict.UNKNOWN, (applied.plan.unknown,))
        if not applied.outcomes and not reasons:
            return self._settled(seen, document, settings)
        drift = self._count(nature, applied.plan.operations)
        done = [o.operation.describe() for o in applied.outcomes if o.status is Status.DONE]
        if not reasons:
            self._left = (document, settings)
        verdict = Verdict.FAILED if reasons else nature
        return self._looked(seen, verdict, (*reasons, *self._unproven(seen)), operations=done, drift=drift)

    def _nature(self, seen: _Seen, document: TenantsDocument, settings: TreeSettings) -> Verdict:
        """Tell what doing something now would be: it is drift only when nobody asked for anything else."""
        if self._left == (document, settings):
            return Verdict.REPAIRED
        return Verdict.CHANGED if is_ours(seen.actual.root) else Verdict.INSTALLED

    def _count(self, nature: Verdict, operations: Iterable[Operation]) -> tuple[tuple[DriftKind, int], ...]:
        if nature is Verdict.INSTALLED:
            self.tally.installs += 1
        elif nature is Verdict.CHANGED:
            self.tally.changes += 1
        else:
            found = drift_of(operations)
            self.tally.repairs += 1
            self.tally.drift.update(found)
            return tuple(sorted(found.items()))
        return ()

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

    def _waiting(self, seen: _Seen, reasons: tuple[str, ...]) -> Looked:
        return self._looked(seen, Verdict.WAITS, reasons, operations=())

    def _looked(
        self,
        seen: _Seen,
        verdict: Verdict,
        reasons: tuple[str, ...] = (),
        *,
        operations: Iterable[str] | None = None,
        drift: tuple[tuple[DriftKind, int], ...] = (),
    ) -> Looked:
        planned = (operation.describe() for operation in seen.planned.operations)
        why = next((note.message for note in seen.planned.notes if note.code == "shape"), "")
        findings = tuple(note.message for note in seen.planned.notes if note.weight is Weight.FINDING)
        return Looked(
            verdict=verdict,
            reasons=reasons,
            operations=tuple(planned if operations is None else operations),
            drift=drift,
            shape=seen.shape,
            shaped_queues=seen.shaped_queues,
            why_shape=why,
            proof=self._proof if seen.shape is Shape.MQ else None,
            foreign=foreign_owners(seen.actual),
            findings=findings,
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a look found and what it would take."""

    actual: Snapshot
    planned: Plan
    shape: Shape
    shaped_queues: int


def drift_of(operations: Iterable[Operation]) -> Counter[DriftKind]:
    """Return which parts of a tree operations mend, each once. Without its root everything else is gone as well."""
    kinds = {_drift_kind(operation) for operation in operations}
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


def foreign_owners(actual: Snapshot) -> tuple[str, ...]:
    """Return, by stable names, whoever else has a hand on a device's way out."""
    found = []
    root = actual.root
    if root is not None and not is_ours(root) and not actual.has_default_root:
        found.append("cilium-bandwidth-manager" if _is_bandwidth_manager(actual) else "root")
    programs = actual.tcx.programs if actual.tcx else ()
    if any(not program.is_ours for program in programs):
        found.append("tcx")
    return tuple(found)


def _is_bandwidth_manager(actual: Snapshot) -> bool:
    """Cilium's bandwidth manager puts an mq of its own with an fq on every queue."""
    if not isinstance(actual.root, MqQdisc) or not actual.queues or shape_in_force(actual):
        return False
    return all(getattr(q, "kind", "") == "fq" or _leaf_kind(q) == "fq" for q in actual.queues.values())


def _leaf_kind(qdisc: object) -> str:
    parameters = getattr(qdisc, "parameters", None)
    return str(getattr(parameters, "kind", ""))
