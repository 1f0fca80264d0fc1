"""One whole run on a device: read, plan, keep the former state, carry out, read back."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kura_shaper.kernel.executor import QUIET_WITHIN_NS, Outcome, Status, execute
from kura_shaper.kernel.journal import Former, Journal
from kura_shaper.kernel.prove import prove_steering
from kura_shaper.log import event
from kura_shaper.tree.build import ShapeChoice, build
from kura_shaper.tree.diff import Plan, is_our_filter, plan, plan_removal
from kura_shaper.tree.model import EGRESS, HOOK, ROOT, OtherQdisc, Shape
from kura_shaper.tree.notes import Note
from kura_shaper.tree.observe import in_force_for
from kura_shaper.tree.operations import (
    AddHook,
    AddRoot,
    DeleteClass,
    DeleteHook,
    DeleteRoot,
    RestoreQdisc,
    SetFilter,
    SetQueue,
    SetTcx,
    SetXps,
)
from kura_shaper.tree.preflight import Permission, is_ours
from kura_shaper.tree.snapshot import Snapshot, Unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.device import TrafficControl
    from kura_shaper.kernel.prove import Proof, Prove
    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.tree.build import Capabilities, TreeSettings, Wanted
    from kura_shaper.tree.operations import Operation

_log = logging.getLogger(__name__)

# What hangs below these has its place by itself; elsewhere it hung on a class, and classes are not kept.
_CLASSLESS_PARENTS = frozenset({"mq"})
# Without their classes the first passes everything unshaped and the others drop it.
_NOTHING_WITHOUT_CLASSES = frozenset({"htb", "hfsc", "drr", "qfq"})


@dataclass(frozen=True, slots=True)
class Applied:
    """What was planned and what became of it. proof is None where nothing had to be proven."""

    plan: Plan
    outcomes: tuple[Outcome, ...] = ()
    proof: Proof | None = None

    @property
    def exit_code(self) -> int:
        """0 when all holds, 1 when something is left to do or to mend, 3 when something was refused
        or did not hold, 4 when it is unknown."""
        if self.plan.unknown or any(o.status is Status.UNVERIFIED for o in self.outcomes):
            return 4
        if self.plan.refusals or any(o.status not in (Status.DONE, Status.BUSY) for o in self.outcomes):
            return 3
        is_unproven = self.proof is not None and not self.proof.is_proven
        is_busy = any(o.status is Status.BUSY for o in self.outcomes)
        return 1 if is_unproven or is_busy or self.plan.has_findings else 0


def apply_document(
    document: TenantsDocument,
    control: TrafficControl,
    journal: Journal,
    *,
    settings: TreeSettings,
    capabilities: Capabilities,
    permission: Permission = Permission.NONE,
    clock: Clock,
    prove: Prove = prove_steering,
    quiet_within_ns: int = QUIET_WITHIN_NS,
) -> Applied:
    """Bring the device to the tree that a document wants, and prove that packets come to it.

    Where the shape was ours to choose and its proof fails right after the tree was made, the
    device gets shape single instead. `quiet_within_ns` is that of `execute`. Raises UsageError,
    RefusedError, as `build` does.
    """
    actual = control.snapshot()
    if isinstance(actual, Unknown):
        return Applied(Plan(unknown=actual.reason))

    def wanted(with_settings: TreeSettings) -> Wanted:
        return build(
            document,
            actual.device,
            settings=with_settings,
            capabilities=capabilities,
            in_force=in_force_for(actual, with_settings, permission),
        )

    made = wanted(settings)
    applied = apply_tree(made, control, journal, permission=permission, clock=clock, quiet_within_ns=quiet_within_ns)
    if made.tree.shape is not Shape.MQ or applied.plan.unknown or applied.plan.refusals:
        return applied
    if _has_class_gone(applied) and len(made.tree.htbs) > 1:
        # What steered to a class goes once the class has gone, which only a new reading tells.
        rest = apply_document(
            document,
            control,
            journal,
            settings=settings,
            capabilities=capabilities,
            permission=permission,
            clock=clock,
            prove=prove,
            quiet_within_ns=quiet_within_ns,
        )
        operations = (*applied.plan.operations, *rest.plan.operations)
        return replace(
            rest,
            plan=replace(rest.plan, operations=operations),
            outcomes=(*applied.outcomes, *rest.outcomes),
        )
    why = _why_unsteered(applied)
    if not why:
        applied = replace(applied, proof=prove(control, document.marks, clock=clock))
        why = applied.proof.reason if applied.proof and not applied.proof.is_proven else ""
    is_new = any(isinstance(op, AddRoot) for op in applied.plan.operations)
    if not why or settings.shape is not ShapeChoice.AUTO or not is_new:
        return applied
    single = wanted(replace(settings, shape=ShapeChoice.SINGLE))
    note = Note("shape", f"shape single: steering was not proven: {why}")
    single = replace(single, notes=(note, *(note for note in single.notes if note.code != "shape")))
    return apply_tree(single, control, journal, permission=permission | Permission.DISRUPTION, clock=clock)


def _has_class_gone(applied: Applied) -> bool:
    return any(isinstance(o.operation, DeleteClass) and o.status is Status.DONE for o in applied.outcomes)


def _why_unsteered(applied: Applied) -> str:
    """Return the first of what shape mq stands on that failed, one line; "" when nothing of it did.

    A tenant's class that the kernel refuses is no reason: it must not cost the others anything.
    """
    failed = (o for o in applied.outcomes if o.status in (Status.REFUSED, Status.NOT_HELD, Status.UNVERIFIED))
    first = next((o for o in failed if _is_of_steering(o.operation)), None)
    return f"{first.operation.describe()}: {first.detail}" if first else ""


def _is_of_steering(operation: Operation) -> bool:
    if isinstance(operation, SetFilter):
        return operation.filter.parent == EGRESS
    return isinstance(operation, SetQueue | AddHook | SetTcx | SetXps)


def apply_tree(
    wanted: Wanted,
    control: TrafficControl,
    journal: Journal,
    *,
    permission: Permission,
    clock: Clock,
    quiet_within_ns: int = QUIET_WITHIN_NS,
) -> Applied:
    """Bring the device to the wanted tree. A second run makes no operation."""
    actual = control.snapshot()
    planned = plan(wanted, actual, permission)
    is_kept = isinstance(actual, Snapshot) and _keep_former(actual, planned, journal)
    outcomes = execute(planned.operations, control, clock=clock, quiet_within_ns=quiet_within_ns)
    applied = Applied(planned, outcomes)
    if is_kept and any(o.status is Status.REFUSED for o in applied.outcomes if isinstance(o.operation, AddRoot)):
        # It was not replaced: a later removal must not put back what its owner took away meanwhile.
        journal.remove()
    _log_outcome("tree_applied", applied, actual)
    return applied


def remove_tree(control: TrafficControl, journal: Journal, *, clock: Clock) -> Applied:
    """Take our tree away and bring back what was there before it.

    Raises StateUnknownError when the journal is damaged; then nothing is changed.
    """
    former = journal.read()
    actual = control.snapshot()
    planned = plan_removal(actual)
    is_half_way = _left_half_way(former, actual)
    takes_root = any(isinstance(op, DeleteRoot) for op in planned.operations)
    # A root that somebody chose meanwhile stays.
    restored, note = _restoring(former) if takes_root or is_half_way else ((), ())
    beside = tuple(_restoring_beside(former, actual)) if isinstance(actual, Snapshot) else ()
    if planned.unknown or not (planned.operations or is_half_way or beside):
        return Applied(planned)
    # The former root last: while it is missing an interrupted removal can be told, and finished.
    planned = replace(planned, operations=(*planned.operations, *beside, *restored), notes=(*planned.notes, *note))
    applied = Applied(planned, execute(planned.operations, control, clock=clock))
    if applied.exit_code == 0:
        journal.remove()
    _log_outcome("tree_removed", applied, actual)
    return applied


def _restoring_beside(former: Former | None, actual: Snapshot) -> Iterable[Operation]:
    """Yield what brings the hook and the queues' XPS back to what they were."""
    if former is None:
        return
    # What others hung there since is not ours to take away.
    is_only_ours = all(is_our_filter(f) for f in actual.filters if f.parent.major == HOOK.major)
    if actual.hook is not None and actual.hook.kind == "clsact" and not former.has_hook and is_only_ours:
        yield DeleteHook()
    for queue, mask in sorted(former.xps.items()):
        if queue < actual.device.tx_queues and (actual.xps or {}).get(queue, 0) == 0:
            yield SetXps(queue, mask)


def _log_outcome(name: str, applied: Applied, actual: Snapshot | Unknown) -> None:
    """Log what changed; a run that found nothing to do is silent."""
    if not applied.outcomes:
        return
    count = Counter(outcome.status.value for outcome in applied.outcomes)
    device = actual.device.name if isinstance(actual, Snapshot) else ""
    level = logging.INFO if set(count) <= {Status.DONE, Status.BUSY} else logging.ERROR
    event(_log, name, level=level, device=device, impact=applied.plan.impact, **count)


def _keep_former(actual: Snapshot, planned: Plan, journal: Journal) -> bool:
    """Write down what is about to go and was not kept before; return whether a root was.

    What is ours, or what the kernel put where ours was, is not kept.
    """
    clears_xps = {op.queue for op in planned.operations if isinstance(op, SetXps)}
    xps = {queue: mask for queue, mask in (actual.xps or {}).items() if queue in clears_xps}
    adds_root = any(isinstance(op, AddRoot) for op in planned.operations)
    if not (adds_root or xps):
        return False
    kept = journal.read()
    is_new = adds_root and not (is_ours(actual.root) or (actual.has_default_root and kept is not None))
    if is_new:
        journal.write(Former(actual.verbatim, xps))
    elif xps and kept is not None:
        # Masks that were kept earlier are older, so they count.
        journal.write(replace(kept, xps=xps | dict(kept.xps)))
    elif xps:
        journal.write(Former((), xps))
    return is_new


def _left_half_way(former: Former | None, actual: Snapshot | Unknown) -> bool:
    """Whether an earlier removal was cut off after our root went and before the former one came back."""
    if former is None or not former.restorable or isinstance(actual, Unknown):
        return False
    return actual.has_default_root


def _restoring(former: Former | None) -> tuple[tuple[RestoreQdisc, ...], tuple[Note, ...]]:
    if former is None:
        message = "no journal of this device: the kernel's default qdisc stays in place of what was there before"
        return (), (Note("no-journal", message),)
    kinds = {q.handle.major: q.kind for q in former.qdiscs}
    back = [q for q in former.restorable if _comes_back(q, kinds)]
    lost = len(former.restorable) - len(back)
    message = f"{lost} qdiscs had classes or hung below some, which are not kept: they do not come back"
    return tuple(RestoreQdisc(q) for q in back), (Note("not-restored", message),) if lost else ()


def _comes_back(qdisc: OtherQdisc, kinds: Mapping[int, str]) -> bool:
    has_its_place = qdisc.parent == ROOT or kinds.get(qdisc.parent.major) in _CLASSLESS_PARENTS
    return has_its_place and qdisc.kind not in _NOTHING_WITHOUT_CLASSES
