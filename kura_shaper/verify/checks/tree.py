"""Whether the tree is there, ours, and the one that was promised; and whether packets come to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.tree.ebpf import TcxState
from kura_shaper.tree.model import EGRESS, MqQdisc
from kura_shaper.tree.notes import Weight
from kura_shaper.tree.observe import missing_parts
from kura_shaper.tree.operations import (
    AddHook,
    DeleteFilter,
    DeleteHook,
    RemoveTcx,
    SetFilter,
    SetQueue,
    SetTcx,
    SetXps,
)
from kura_shaper.tree.owners import BANDWIDTH_MANAGER, foreign_owners
from kura_shaper.tree.preflight import is_ours
from kura_shaper.tree.snapshot import Unknown
from kura_shaper.tree.steer import FaultKind, steering_cautions, steering_in_force, typed_faults
from kura_shaper.verify.values import Check, Code, Finding, Judged, Phase, Severity

if TYPE_CHECKING:
    from kura_shaper.tree.model import Root
    from kura_shaper.tree.operations import Operation
    from kura_shaper.tree.snapshot import Snapshot
    from kura_shaper.verify.observed import Observed

_LINES_MAX = 20

TREE_FOREIGN = Code(
    "tree-foreign",
    Severity.ERROR,
    "the device's root qdisc is somebody else's, so no ceiling is enforced",
    "find its owner, then `kura-shaper apply --take-over`",
)
BANDWIDTH_MANAGER_ON = Code(
    "bandwidth-manager-on",
    Severity.ERROR,
    "Cilium's bandwidth manager is on: it owns the root qdisc, or takes it back when its agent starts",
    "set enable-bandwidth-manager to false for these nodes (CiliumNodeConfig), restart the agent, verify again",
)
TREE_ABSENT = Code(
    "tree-absent",
    Severity.ERROR,
    "there is no tree on the device: nothing is shaped",
    "`kura-shaper apply`, and find out who removed it: `kura-shaper status`, the agent's log",
)
TREE_DIFFERS = Code(
    "tree-differs",
    Severity.ERROR,
    "the tree is not the one that the document and the settings ask for",
    "`kura-shaper plan` shows each difference, `kura-shaper apply` mends them",
)
QUEUE_DROPS = Code(
    "queue-drops",
    Severity.ERROR,
    "a live tx queue has no qdisc, so the kernel drops whatever comes to it",
    "`kura-shaper apply` gives it one",
)
FILTER_FOREIGN = Code(
    "filter-foreign",
    Severity.ERROR,
    "a filter of somebody else's comes before the classifier and may take tenants' packets",
    "find its owner (`tc filter show dev DEVICE parent 20:`) and have it removed",
)
STEERING_ABSENT = Code(
    "steering-absent",
    Severity.ERROR,
    "nothing steers packets to the shaped queue, so flows spread over queues that no ceiling holds",
    "`kura-shaper apply` puts it back; find out who took it away",
)
STEERING_SHADOWED = Code(
    "steering-shadowed",
    Severity.ERROR,
    "a program or filter of somebody else's runs ahead of the steering and may end the chain before it",
    "`kura-shaper apply --shape auto` goes ahead of it as a tcx link, or takes shape single",
)
STEERING_LEFT_OVER = Code(
    "steering-left-over",
    Severity.ERROR,
    "a steering program of an earlier run is still there and steers as well",
    "`kura-shaper uninstall`, then `kura-shaper apply --allow-disruption`",
)
XPS_OVERRIDES = Code(
    "xps-overrides",
    Severity.ERROR,
    "XPS is set on a tx queue and overrides the steering",
    "`kura-shaper apply` clears it; keep irqbalance or the driver from setting it again",
)
QUEUE_DEAD = Code(
    "queue-dead",
    Severity.ERROR,
    "a shaped queue is not live: the kernel takes another one, without an error",
    "raise the device's channels (`ethtool -L`), or `kura-shaper apply --allow-disruption` with fewer shaped queues",
)
STEERING_UNPROVEN = Code(
    "steering-unproven",
    Severity.ERROR,
    "frames with a proof's mark did not come to the class that they are steered to",
    "look for what changes marks or queues on the way out: `nft list ruleset`, `bpftool net`, the link's state",
)

_FAULTS = {
    FaultKind.ABSENT: STEERING_ABSENT,
    FaultKind.SHADOWED: STEERING_SHADOWED,
    FaultKind.LEFT_OVER: STEERING_LEFT_OVER,
    FaultKind.DEAD_QUEUE: QUEUE_DEAD,
    FaultKind.XPS: XPS_OVERRIDES,
}


def _owner(observed: Observed) -> Judged:
    actual = observed.node.snapshot
    if isinstance(actual, Unknown):
        return Judged(unknown=actual.reason)
    owners, device = foreign_owners(actual), actual.device.name
    pin = observed.node.bandwidth_manager
    if BANDWIDTH_MANAGER in owners:
        message = f"{device} has the qdiscs of Cilium's bandwidth manager: mq, and fq on every queue"
        return Judged(findings=(Finding(BANDWIDTH_MANAGER_ON, message, evidence={"root": _words(actual.root)}),))
    if pin:
        message = f"Cilium's bandwidth manager is on ({pin}); its qdiscs come back over {device} when its agent starts"
        return Judged(findings=(Finding(BANDWIDTH_MANAGER_ON, message, evidence={"map": pin}),))
    if "root" in owners:
        message = f"the root qdisc of {device} is {_words(actual.root)}, which is not of our making"
        return Judged(findings=(Finding(TREE_FOREIGN, message, evidence={"root": _words(actual.root)}),))
    return Judged(f"root {_words(actual.root)}; no map of Cilium's bandwidth manager is pinned where it keeps it")


def _tree(observed: Observed) -> Judged:
    actual = observed.node.snapshot
    if isinstance(actual, Unknown):
        return Judged(unknown=actual.reason)
    if not is_ours(actual.root):
        if not actual.has_default_root:
            return Judged(skipped="the root qdisc is somebody else's")
        evidence = {"root": _words(actual.root), "link_up": str(actual.device.is_up).lower()}
        message = f"{actual.device.name} has no tree of ours: its root qdisc is {_words(actual.root)}"
        return Judged(findings=(Finding(TREE_ABSENT, message, evidence=evidence),))
    dropping = tuple(_drops(actual))
    missing = tuple(line for line in missing_parts(actual) if "drops whatever comes" not in line)
    if missing:
        return Judged(findings=(*dropping, _differs(actual, missing)))
    if isinstance(observed.expected, Unknown):
        return Judged(unknown=observed.expected.reason, findings=dropping)
    plan = observed.expected.plan
    lines = tuple(op.describe() for op in plan.operations if not _is_told_elsewhere(op, actual))
    differs = (_differs(actual, lines),) if lines else ()
    foreign = (note.message for note in plan.notes if note.weight is Weight.FINDING)
    strangers = tuple(Finding(FILTER_FOREIGN, message) for message in foreign)
    seen = f"{len(actual.classes)} classes, {len(actual.leaves)} leaves, {len(actual.filters)} filters as wanted"
    return Judged(f"{seen}, shape {observed.expected.wanted.tree.shape}", (*dropping, *differs, *strangers))


def _is_told_elsewhere(operation: Operation, actual: Snapshot) -> bool:
    """Whether a finding of its own says what this operation would mend."""
    match operation:
        case SetQueue(qdisc):
            return qdisc.parent.minor - 1 in actual.dropping_queues
        case SetXps():
            return True
        case AddHook() | DeleteHook() | SetTcx() | RemoveTcx():
            return bool(typed_faults(actual))
        case SetFilter(filter_) | DeleteFilter(filter_):
            return filter_.parent == EGRESS and bool(typed_faults(actual))
    return False


def _drops(actual: Snapshot) -> tuple[Finding, ...]:
    shaped = {htb.parent.minor - 1 for htb in actual.htbs}
    queues = [queue for queue in actual.dropping_queues if queue not in shaped]
    if not queues:
        return ()
    message = f"tx queue {', '.join(map(str, queues))} of {actual.device.name} has no qdisc"
    return (Finding(QUEUE_DROPS, message, evidence={"queues": tuple(map(str, queues))}),)


def _differs(actual: Snapshot, lines: tuple[str, ...]) -> Finding:
    message = f"{len(lines)} difference{'s' if len(lines) > 1 else ''} on {actual.device.name}: {lines[0]}"
    more = f", and {len(lines) - 1} more" if len(lines) > 1 else ""
    return Finding(TREE_DIFFERS, message + more, evidence={"count": len(lines), "first": lines[:_LINES_MAX]})


def _steering(observed: Observed) -> Judged:
    actual, proof = observed.node.snapshot, observed.node.proof
    if isinstance(actual, Unknown):
        return Judged(unknown=actual.reason)
    if not is_ours(actual.root):
        return Judged(skipped="there is no tree of ours to steer to")
    if not isinstance(actual.root, MqQdisc):
        return Judged("shape single: every packet of the device passes the one HTB, whoever is on the hook")
    faults = typed_faults(actual)
    if faults:
        lost = proof.reason if proof and not proof.is_proven else "the proof's frames arrived nevertheless"
        return Judged(
            findings=tuple(Finding(_FAULTS[f.kind], f.message, evidence={"proof": lost}) for f in faults),
        )
    if proof is None:
        return Judged(unknown="no classifier of ours says which marks to prove")
    if not actual.device.is_up:
        return Judged(unknown="the link is down, so no frame can prove the steering")
    if not proof.is_proven:
        return Judged(findings=(Finding(STEERING_UNPROVEN, proof.reason),))
    cautions = "".join(f"; {line}" for line in steering_cautions(actual))
    way = steering_in_force(actual)
    return Judged(f"proven just now by {way}, {_chain(actual)}, XPS {_xps(actual)}{cautions}")


def _chain(actual: Snapshot) -> str:
    match actual.tcx:
        case TcxState(supported=True, programs=programs) if programs:
            return f"tcx in order: {', '.join(p.name or str(p.program_id) for p in programs)}"
        case TcxState(supported=True):
            return "nobody at tcx"
        case TcxState():
            return "the kernel has no tcx"
        case _:
            return "tcx not read"


def _xps(actual: Snapshot) -> str:
    if actual.xps is None:
        return "not read"
    return f"on queue {', '.join(map(str, sorted(actual.xps)))}, which this way overrides" if actual.xps else "off"


def _words(root: Root) -> str:
    return "none" if root is None else f"{root.kind} {root.handle}"


CHECKS = (
    Check(
        "owner",
        "Is the device's root qdisc ours, and does nobody else claim it?",
        Phase.STATIC,
        (TREE_FOREIGN, BANDWIDTH_MANAGER_ON),
        _owner,
    ),
    Check(
        "tree",
        "Is the tree there, and the one that was promised?",
        Phase.STATIC,
        (TREE_ABSENT, TREE_DIFFERS, QUEUE_DROPS, FILTER_FOREIGN),
        _tree,
    ),
    Check(
        "steering",
        "Do marked packets come to the queue that shapes them?",
        Phase.STATIC,
        (STEERING_ABSENT, STEERING_SHADOWED, STEERING_LEFT_OVER, XPS_OVERRIDES, QUEUE_DEAD, STEERING_UNPROVEN),
        _steering,
    ),
)
