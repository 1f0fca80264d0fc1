"""How packets come to the tx queue whose HTB is to shape them, in shape mq.

An mq root has a tree for each tx queue, so a tenant whose flows are hashed over N queues
would get N times its ceiling, silently. Everything that is to be shaped is therefore put on
a shaped queue before the kernel chooses one, and the host's traffic on the others:

1. what carries a mark or leaves from a gateway port goes to the first shaped queue;
2. then what belongs to a tenant (or a proof) of a further queue goes to that one;
3. the host's packets spread over the queues that are not shaped, by their flow's hash.

The filters of the egress hook all let the chain go on, so what others hang there still runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kura_shaper.tenants.marks import PROOF_CLASS
from kura_shaper.tree.classifier import ETH_P_ALL, hook_program
from kura_shaper.tree.ebpf import steering_program
from kura_shaper.tree.model import (
    EGRESS,
    BpfMatch,
    DirectBpf,
    Filter,
    FwMatch,
    HostTraffic,
    MqQdisc,
    QueueMapping,
    Shape,
    Steering,
    SteeringKind,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kura_shaper.tenants.document import TenantsDocument
    from kura_shaper.tree.snapshot import Snapshot
    from kura_shaper.units import Rate

SHAPED_PRIORITY, TENANT_PRIORITY, HOST_PRIORITY = 11, 12, 13
OUR_HOOK_PRIORITIES = frozenset({SHAPED_PRIORITY, TENANT_PRIORITY, HOST_PRIORITY})


@dataclass(frozen=True, slots=True)
class InForce:
    """What a device already has that a new plan must not turn over without need.

    placement maps tenants' class ids to the index of their shaped queue, shares are the queues'
    parts of the budget, () when one of them is missing. foreign_tcx names programs of others ahead
    of the egress hook, has_foreign_filter is whether filters of others stand ahead of ours on it,
    hook the kind of what is at the hook. dropping_queues have no qdisc at all.
    """

    shape: Shape | None = None
    placement: Mapping[int, int] = field(default_factory=dict)
    shares: tuple[Rate, ...] = ()
    shaped_queues: int = 0
    steering: SteeringKind | None = None
    dropping_queues: tuple[int, ...] = ()
    hook: str = ""
    foreign_tcx: tuple[str, ...] = ()
    has_foreign_filter: bool = False


def choose_steering(
    kinds: Iterable[SteeringKind], in_force: InForce, *, host_traffic: HostTraffic
) -> tuple[SteeringKind | None, str]:
    """Return the way to steer on a device, and why that one, or why there is none."""
    proven = frozenset(kinds)
    if host_traffic is HostTraffic.INSIDE:
        return None, "host traffic under the budget needs one tree for all queues"
    if not proven and in_force.steering:
        return in_force.steering, "it is in force, though nothing was proven on this kernel just now"
    if not proven:
        return None, "no way of steering was proven on this kernel"
    if in_force.steering is SteeringKind.TCX and SteeringKind.TCX in proven:
        # Nothing can get ahead of it unseen, and another way would cost the device's queue to put in place.
        return SteeringKind.TCX, "it is in force"
    ahead = _ahead(in_force)
    if ahead:
        if SteeringKind.TCX in proven:
            return SteeringKind.TCX, f"{ahead}, so ours goes first as a tcx link"
        return None, f"{ahead} and may end the chain before ours, and this kernel has no tcx"
    if in_force.hook == "ingress":
        if SteeringKind.TCX in proven:
            return SteeringKind.TCX, "an ingress qdisc holds the hook's place, so ours is a tcx link"
        return None, "an ingress qdisc holds the place of clsact"
    kind = min(proven, key=list(SteeringKind).index)
    if kind is SteeringKind.SKBEDIT:
        return kind, "it was seen to reach its queue"
    return kind, "this kernel has no act_skbedit"


def _ahead(in_force: InForce) -> str:
    if in_force.foreign_tcx:
        return f"tcx program {', '.join(in_force.foreign_tcx)} runs ahead of the egress hook"
    return "a filter of somebody else's comes first on the egress hook" if in_force.has_foreign_filter else ""


def limits_of(kind: SteeringKind) -> str:
    """Return what a way of steering can't do, "" when nothing."""
    if kind is SteeringKind.SKBEDIT:
        return ""
    return (
        "what was open before (TCP on kernels up to 6.12, connected UDP on every kernel) stays on its queue,"
        " unshaped, until it is idle or new; XPS must stay off on every queue"
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tx queues are shaped: the first ones, so that a change of the live count moves no tenant."""

    shaped_queues: int
    live_queues: int
    placement: Mapping[int, int]

    @property
    def all_placed(self) -> dict[int, int]:
        """The queue of each class id that has its own: the tenants' and the proofs'."""
        return {PROOF_CLASS + queue: queue for queue in range(self.shaped_queues)} | dict(self.placement)


def steering(kind: SteeringKind, document: TenantsDocument, layout: Layout) -> tuple[Steering, tuple[Filter, ...]]:
    """Return the wanted steering and its filters on the egress hook (none for tcx).

    Raises UsageError for more gateway ports or tenants than a program can tell apart.
    """
    if kind is SteeringKind.SKBEDIT:
        return Steering(kind), tuple(_skbedit_filters(document, layout))
    program = steering_program(
        document.marks,
        document.gateway.ports,
        placement=layout.all_placed,
        shaped_queues=layout.shaped_queues,
        live_queues=layout.live_queues,
    )
    if kind is SteeringKind.TCX:
        return Steering(kind, program), ()
    match = DirectBpf(program.name, program)
    return Steering(kind, program), (Filter(EGRESS, SHAPED_PRIORITY, ETH_P_ALL, 1, match),)


def _skbedit_filters(document: TenantsDocument, layout: Layout) -> Iterable[Filter]:
    marks, ports = document.marks, document.gateway.ports
    shaped = hook_program(marks, ports, matches_host=False)
    yield Filter(EGRESS, SHAPED_PRIORITY, ETH_P_ALL, 1, shaped, QueueMapping(0))
    for class_id, queue in sorted(layout.all_placed.items()):
        if queue:
            mark = marks.mark(class_id)
            yield Filter(EGRESS, TENANT_PRIORITY, ETH_P_ALL, mark, FwMatch(mark, marks.mask), QueueMapping(queue))
    if layout.live_queues > layout.shaped_queues:
        host = hook_program(marks, ports, matches_host=True)
        spread = QueueMapping(layout.shaped_queues, layout.live_queues - 1)
        yield Filter(EGRESS, HOST_PRIORITY, ETH_P_ALL, 1, host, spread)


class FaultKind(StrEnum):
    """What keeps packets from their queue."""

    ABSENT = "absent"
    SHADOWED = "shadowed"
    LEFT_OVER = "left over"
    DEAD_QUEUE = "dead queue"
    XPS = "xps"


@dataclass(frozen=True, slots=True)
class SteeringFault:
    """One reason not to trust the steering; message is one line."""

    kind: FaultKind
    message: str


def steering_faults(actual: Snapshot) -> tuple[str, ...]:
    """Return why steering on a tree of ours in shape mq can't be trusted, a line each; none when nothing speaks
    against it."""
    return tuple(fault.message for fault in typed_faults(actual))


def typed_faults(actual: Snapshot) -> tuple[SteeringFault, ...]:
    """Return the same, each with its kind."""
    if not isinstance(actual.root, MqQdisc):
        return ()
    found = steering_in_force(actual)
    if found is None:
        return (SteeringFault(FaultKind.ABSENT, "nothing steers packets to the shaped queues"),)
    return (*_chain_faults(actual, found), *_queue_faults(actual, found))


def steering_in_force(actual: Snapshot) -> SteeringKind | None:
    """Return what of ours steers on a device."""
    ours = [f for f in actual.filters if f.parent == EGRESS and f.priority == SHAPED_PRIORITY]
    if any(isinstance(f.match, BpfMatch) and f.action for f in ours):
        return SteeringKind.SKBEDIT
    if any(isinstance(f.match, DirectBpf) for f in ours):
        return SteeringKind.BPF
    if actual.tcx and any(program.is_ours for program in actual.tcx.programs):
        return SteeringKind.TCX
    return None


def _chain_faults(actual: Snapshot, kind: SteeringKind) -> Iterable[SteeringFault]:
    programs = actual.tcx.programs if actual.tcx else ()
    if sum(program.is_ours for program in programs) > (kind is SteeringKind.TCX):
        words = "a tcx program of ours is left over from another run and steers as well: `kura-shaper uninstall` first"
        yield SteeringFault(FaultKind.LEFT_OVER, words)
    if kind is SteeringKind.TCX:
        if not programs[0].is_ours:
            name = programs[0].name or programs[0].program_id
            yield SteeringFault(FaultKind.SHADOWED, f"tcx program {name} comes before ours and may end the chain")
        return
    foreign = [p.name or str(p.program_id) for p in programs if not p.is_ours]
    if foreign:
        words = f"tcx program {', '.join(foreign)} runs ahead of the egress hook and may end the chain before ours"
        yield SteeringFault(FaultKind.SHADOWED, words)
    if has_foreign_filter(actual):
        words = "a filter of somebody else's comes before ours on the egress hook and may end the chain"
        yield SteeringFault(FaultKind.SHADOWED, words)


def steering_cautions(actual: Snapshot) -> tuple[str, ...]:
    """Return what runs after our steering and could send packets to another queue, unseen by a proof; a line each."""
    kind = steering_in_force(actual)
    if kind is None:
        return ()
    behind = [p.name or str(p.program_id) for p in (actual.tcx.programs if actual.tcx else ()) if not p.is_ours]
    after = sorted({f.priority for f in actual.filters if f.parent == EGRESS and f.priority > HOST_PRIORITY})
    lines = [f"tcx program {', '.join(behind)} runs after ours"] if behind and kind is SteeringKind.TCX else []
    lines += [f"filter prio {priority} of somebody else's runs after ours on the egress hook" for priority in after]
    return tuple(f"{line} and could choose another queue for some packets, which a proof can't see" for line in lines)


def is_ours_at_hook(found: Filter) -> bool:
    """Whether a filter at the egress hook is one that we put there: by its priority, kind and what it does."""
    if found.ethertype != ETH_P_ALL:
        return False
    if isinstance(found.match, DirectBpf):
        return found.priority == SHAPED_PRIORITY
    kinds = {SHAPED_PRIORITY: BpfMatch, TENANT_PRIORITY: FwMatch, HOST_PRIORITY: BpfMatch}
    return found.action is not None and isinstance(found.match, kinds.get(found.priority, ()))


def has_foreign_filter(actual: Snapshot) -> bool:
    """Whether filters of others stand ahead of ours on the egress hook."""
    return any(f.parent == EGRESS and f.priority < SHAPED_PRIORITY for f in actual.filters)


def _queue_faults(actual: Snapshot, kind: SteeringKind) -> Iterable[SteeringFault]:
    shaped, live = len(actual.htbs), actual.device.tx_queues
    if live < shaped:
        words = f"{shaped} queues are shaped and only {live} are live: the kernel ignores a queue beyond them"
        yield SteeringFault(FaultKind.DEAD_QUEUE, words)
    if kind.needs_xps_off and actual.xps is None:
        yield SteeringFault(FaultKind.XPS, "XPS can't be read, and would override steering")
    if kind.needs_xps_off and actual.xps_rxqs:
        queues = ", ".join(str(queue) for queue in sorted(actual.xps_rxqs))
        words = f"XPS by rx queue (xps_rxqs) is set on tx queue {queues} and overrides steering: write 0 to it"
        yield SteeringFault(FaultKind.XPS, words)
    if kind.needs_xps_off and actual.xps:
        queues = ", ".join(str(queue) for queue in sorted(actual.xps))
        yield SteeringFault(FaultKind.XPS, f"XPS is set on tx queue {queues} and overrides steering")
