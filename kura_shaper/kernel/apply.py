"""One whole run on a device: read, plan, keep the former state, carry out, read back."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kura_shaper.kernel.executor import Outcome, Status, execute
from kura_shaper.kernel.journal import Former, Journal
from kura_shaper.log import event
from kura_shaper.tree.diff import Plan, plan, plan_removal
from kura_shaper.tree.model import ROOT, HtbQdisc, OtherQdisc
from kura_shaper.tree.notes import Note
from kura_shaper.tree.operations import AddRoot, RestoreQdisc
from kura_shaper.tree.preflight import Permission, is_ours
from kura_shaper.tree.snapshot import Snapshot, Unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kura_shaper.clock import Clock
    from kura_shaper.kernel.device import TrafficControl
    from kura_shaper.tree.build import Wanted

_log = logging.getLogger(__name__)

# What hangs below these has its place by itself; elsewhere it hung on a class, and classes are not kept.
_CLASSLESS_PARENTS = frozenset({"mq"})
# Without their classes the first passes everything unshaped and the others drop it.
_NOTHING_WITHOUT_CLASSES = frozenset({"htb", "hfsc", "drr", "qfq"})


@dataclass(frozen=True, slots=True)
class Applied:
    """What was planned and what became of it."""

    plan: Plan
    outcomes: tuple[Outcome, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 when all holds, 1 when something is left to do or to mend, 3 when something was refused
        or did not hold, 4 when it is unknown."""
        if self.plan.unknown or any(o.status is Status.UNVERIFIED for o in self.outcomes):
            return 4
        if self.plan.refusals or any(o.status not in (Status.DONE, Status.BUSY) for o in self.outcomes):
            return 3
        return 1 if self.plan.has_findings or any(o.status is Status.BUSY for o in self.outcomes) else 0


def apply_tree(
    wanted: Wanted, control: TrafficControl, journal: Journal, *, permission: Permission, clock: Clock
) -> Applied:
    """Bring the device to the wanted tree. A second run makes no operation."""
    actual = control.snapshot()
    planned = plan(wanted, actual, permission)
    is_kept = (
        isinstance(actual, Snapshot)
        and any(isinstance(op, AddRoot) for op in planned.operations)
        and _keep_former(actual, wanted, journal)
    )
    applied = Applied(planned, execute(planned.operations, control, clock=clock))
    if is_kept and any(o.status is Status.REFUSED for o in applied.outcomes if isinstance(o.operation, AddRoot)):
        # It was not replaced: a later removal must not put back what its owner took away meanwhile.
        journal.remove()
    _log_outcome("tree_applied", applied, actual)
    return applied


def remove_tree(root: HtbQdisc, control: TrafficControl, journal: Journal, *, clock: Clock) -> Applied:
    """Take our tree away and bring back what was there before it.

    Raises StateUnknownError when the journal is damaged; then nothing is changed.
    """
    former = journal.read()
    actual = control.snapshot()
    planned = plan_removal(root, actual)
    if planned.unknown or (not planned.operations and not _left_half_way(former, actual)):
        return Applied(planned)
    restored, note = _restoring(former)
    planned = replace(planned, operations=(*planned.operations, *restored), notes=(*planned.notes, *note))
    applied = Applied(planned, execute(planned.operations, control, clock=clock))
    if applied.exit_code == 0:
        journal.remove()
    _log_outcome("tree_removed", applied, actual)
    return applied


def _log_outcome(name: str, applied: Applied, actual: Snapshot | Unknown) -> None:
    """Log what changed; a run that found nothing to do is silent."""
    if not applied.outcomes:
        return
    count = Counter(outcome.status.value for outcome in applied.outcomes)
    device = actual.device.name if isinstance(actual, Snapshot) else ""
    level = logging.INFO if set(count) <= {Status.DONE, Status.BUSY} else logging.ERROR
    event(_log, name, level=level, device=device, impact=applied.plan.impact, **count)


def _keep_former(actual: Snapshot, wanted: Wanted, journal: Journal) -> bool:
    """Write down what is about to go, unless that is ours, or what the kernel put where ours was."""
    if is_ours(actual.root, wanted.tree.root) or (actual.has_default_root and journal.read() is not None):
        return False
    journal.write(Former(actual.verbatim))
    return True


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
