"""Whether the tree lived through whatever was restarted since an earlier report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.tree.observe import shape_in_force
from kura_shaper.tree.snapshot import Snapshot, Unknown
from kura_shaper.verify.values import Check, Code, Finding, Judged, Phase, Severity

if TYPE_CHECKING:
    from kura_shaper.verify.after import Facts
    from kura_shaper.verify.observed import Observed

_SHOWN_MAX = 20

TREE_REBUILT = Code(
    "tree-rebuilt",
    Severity.WARNING,
    "the tree was made anew since the earlier report, though the node was not: for a moment nothing was shaped",
    "find out who took it away: the agent's `repairs_total` and `drift_total`, its log, a CNI that was restarted",
)
SHAPE_CHANGED = Code(
    "shape-changed",
    Severity.WARNING,
    "the tree has another shape than in the earlier report",
    "fix the shape in the settings (`--shape`) instead of `auto`, if it was not meant",
)
CLASS_RENUMBERED = Code(
    "class-renumbered",
    Severity.ERROR,
    "a tenant has another class id than in the earlier report: connections that are open carry the old mark",
    "bring the old id back into the document; `kura-shaper tenants allocate` never changes one",
)


def _after(observed: Observed) -> Judged:
    earlier, node = observed.earlier, observed.node
    if earlier is None:
        return Judged(skipped="no earlier report was given")
    actual = node.snapshot
    if isinstance(actual, Unknown):
        return Judged(unknown=actual.reason)
    findings = list(_renumbered(observed, earlier))
    shape = shape_in_force(actual) or ""
    if shape and earlier.shape and shape != earlier.shape:
        message = f"shape {shape}, and {earlier.shape} in the report of {earlier.started_at}"
        findings.append(Finding(SHAPE_CHANGED, message, evidence={"now": shape, "earlier": earlier.shape}))
    if not node.boot or not earlier.boot:
        return Judged(findings=tuple(findings), unknown="which boot of the node a report is of can't be told")
    if node.boot != earlier.boot:
        seen = f"the node was started anew since {earlier.started_at}: the same ids, and new counters"
        return Judged(seen, tuple(findings))
    if shape and shape == earlier.shape:
        findings += _rebuilt(actual, earlier)
    return Judged(_words(observed, earlier), tuple(findings))


def _renumbered(observed: Observed, earlier: Facts) -> tuple[Finding, ...]:
    now = {tenant.name: tenant.class_id for tenant in observed.question.document.tenants}
    moved = [name for name in sorted(now.keys() & earlier.tenants.keys()) if now[name] != earlier.tenants[name]]
    return tuple(
        Finding(
            CLASS_RENUMBERED,
            f"{name} has class {now[name]:#x}, and had {earlier.tenants[name]:#x}",
            name,
            {"now": f"{now[name]:#x}", "earlier": f"{earlier.tenants[name]:#x}"},
        )
        for name in moved
    )


def _rebuilt(actual: Snapshot, earlier: Facts) -> tuple[Finding, ...]:
    fallen = [
        f"{classid}: {counters.sent_bytes} bytes, and {earlier.sent_bytes[str(classid)]} before"
        for classid, counters in sorted(actual.counters.items())
        if counters.sent_bytes < earlier.sent_bytes.get(str(classid), 0)
    ]
    is_another = actual.device.ifindex != earlier.ifindex
    if not fallen and not is_another:
        return ()
    what = "the device is another one" if is_another else f"the counters of {len(fallen)} classes began again"
    message = f"{what} since {earlier.started_at}"
    return (Finding(TREE_REBUILT, message, evidence={"classes": len(fallen), "first": tuple(fallen[:_SHOWN_MAX])}),)


def _words(observed: Observed, earlier: Facts) -> str:
    holders = observed.node.holders
    now = set() if isinstance(holders, Unknown) else {p.pid for some in holders.by_inode.values() for p in some}
    restarted = "the gateway was restarted" if now != set(earlier.gateway) else "the same gateway"
    return f"the same tree as at {earlier.started_at}: no counter began again, no id changed; {restarted}"


CHECKS = (
    Check(
        "restart",
        "Did the tree live through what was restarted since the earlier report?",
        Phase.AFTER,
        (TREE_REBUILT, SHAPE_CHANGED, CLASS_RENUMBERED),
        _after,
    ),
)
