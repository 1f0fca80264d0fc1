"""Whether the promises fit the node, and whether tenants' marks mean the same to everybody on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.tenants.marks import ReservedClass
from kura_shaper.tree.snapshot import Snapshot, Unknown
from kura_shaper.tree.steer import FaultKind, typed_faults
from kura_shaper.units import Rate
from kura_shaper.verify.values import Check, Code, Evidence, Finding, Judged, Phase, Severity

if TYPE_CHECKING:
    from kura_shaper.kernel.byways import MarkRule
    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.tenants.marks import MarkUser
    from kura_shaper.verify.observed import Observed

# Devices that software which uses the mark brings along, by how their names begin.
_SIGNS = {
    "calico": ("cali", "vxlan.calico"),
    "weave": ("weave",),
    "tailscale": ("tailscale",),
    "aws-vpc-cni": ("eni",),
    "cilium": ("cilium_",),
}
_NAMES_MAX = 20

PROMISES_IMPOSSIBLE = Code(
    "promises-impossible",
    Severity.ERROR,
    "no tree can hold what was promised on this node",
    "raise the budget, or move tenants to another node",
)
FLOORS_OVERSUBSCRIBED = Code(
    "floors-oversubscribed",
    Severity.WARNING,
    "floors add up to more than the budget: they are scaled to fit, so tenants have less than was promised",
    "lower floors, raise the budget, or move tenants to another node",
)
BUDGET_ABOVE_LINK = Code(
    "budget-above-link",
    Severity.WARNING,
    "the budget is more than the link carries: the driver's queue decides who gets what, not the tree",
    "set the budget below the link's speed",
)
MARK_COLLISION = Code(
    "mark-collision",
    Severity.WARNING,
    "software on this node uses bits of the mark that tenants' class ids are written in",
    "choose another mask (`marks.mask`), or acknowledge the neighbour in the document",
)
MARK_ROUTED = Code(
    "mark-routed",
    Severity.ERROR,
    "a rule of policy routing takes packets with tenants' marks to another table, and maybe another device",
    "choose another mask (`marks.mask`), or have the rule's owner use other bits",
)


def _promises(observed: Observed) -> Judged:
    actual = observed.node.snapshot
    if isinstance(actual, Snapshot) and any(fault.kind is FaultKind.DEAD_QUEUE for fault in typed_faults(actual)):
        return Judged(unknown="the tree does not fit the live tx queues: see the check `steering`")
    if observed.impossible:
        return Judged(findings=(Finding(PROMISES_IMPOSSIBLE, observed.impossible),))
    if isinstance(observed.wanted, Unknown):
        return Judged(unknown=observed.wanted.reason)
    document, budget = observed.question.document, _budget(observed)
    floors = Rate(sum(tenant.floor.bits_per_second for tenant in document.tenants))
    scaled = [note for note in observed.wanted.notes if note.code == "floors-scaled"]
    findings = []
    if scaled:
        evidence: Evidence = {
            "floors_bits_per_second": floors.bits_per_second,
            "budget_bits_per_second": budget.bits_per_second,
            "tenants": tuple(n.tenant for n in observed.wanted.notes if n.code == "floor-scaled")[:_NAMES_MAX],
        }
        findings.append(Finding(FLOORS_OVERSUBSCRIBED, scaled[0].message, evidence=evidence))
    link, speed = "its link's speed can't be read", 0
    if not isinstance(observed.node.port, Unknown):
        speed = observed.node.port.speed_bits_per_second
        link = f"a link of {Rate(speed)}" if speed else "a link that tells no speed"
    # What a virtual device says of its speed is made up.
    if speed and not observed.node.device.kind and budget.bits_per_second > speed:
        message = f"a budget of {budget} on {observed.node.device.name}, whose link has {Rate(speed)}"
        numbers: Evidence = {"budget_bits_per_second": budget.bits_per_second, "link_bits_per_second": speed}
        findings.append(Finding(BUDGET_ABOVE_LINK, message, evidence=numbers))
    seen = f"{len(document.tenants)} tenants, floors of {floors} in a budget of {budget}, on {link}"
    return Judged(seen, tuple(findings))


def _budget(observed: Observed) -> Rate:
    if observed.question.asked.budget:
        return observed.question.asked.budget
    return Rate(0) if isinstance(observed.expected, Unknown) else observed.expected.settings.budget


def _marks(observed: Observed) -> Judged:
    node, document = observed.node, observed.question.document
    if isinstance(node.links, Unknown):
        return Judged(unknown=node.links.reason)
    if isinstance(node.rules, Unknown):
        return Judged(unknown=node.rules.reason)
    names = [link.name for link in node.links]
    findings = []
    for user in document.marks.overlaps():
        signs = [name for name in names if name.startswith(_SIGNS.get(user.name, ("\0",)))]
        if signs or user.on_every_node:
            findings.append(_collision(user, document, ", ".join(signs[:3]) or "on every node"))
    findings += [found for rule in node.rules if (found := _routed(rule, document))]
    seen = f"mask {document.marks.mask:#010x}: {len(node.rules)} routing rules by mark take none of its values"
    return Judged(seen, tuple(findings))


def _collision(user: MarkUser, document: TenantsDocument, where: str) -> Finding:
    message = f"{user} uses bits {user.mask & document.marks.mask:#010x} of the mask, and is here: {where}"
    return Finding(MARK_COLLISION, message, evidence={"user": user.name, "mask": f"{user.mask:#010x}"})


def _routed(rule: MarkRule, document: TenantsDocument) -> Finding | None:
    marks = document.marks
    if not rule.mask & marks.mask:
        return None
    taken = [tenant.name for tenant in document.tenants if rule.matches(marks.mark(tenant.class_id))]
    if rule.matches(marks.mark(ReservedClass.GATEWAY)):
        taken.insert(0, "the gateway's own")
    if not taken:
        return None
    message = f"{rule} takes the packets of {', '.join(taken[:5])}{', ...' if len(taken) > 5 else ''}"
    return Finding(MARK_ROUTED, message, evidence={"tenants": len(taken), "first": tuple(taken[:_NAMES_MAX])})


CHECKS = (
    Check(
        "promises",
        "Do the promised floors and ceilings fit this node?",
        Phase.STATIC,
        (PROMISES_IMPOSSIBLE, FLOORS_OVERSUBSCRIBED, BUDGET_ABOVE_LINK),
        _promises,
    ),
    Check(
        "marks",
        "Does nobody else on this node use the bits of the mark?",
        Phase.STATIC,
        (MARK_COLLISION, MARK_ROUTED),
        _marks,
    ),
)
