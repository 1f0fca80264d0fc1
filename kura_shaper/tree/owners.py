"""Whoever else has a hand on a device's way out, by stable names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.tree.model import Leaf, LeafKind, MqQdisc
from kura_shaper.tree.preflight import is_ours

if TYPE_CHECKING:
    from kura_shaper.tree.snapshot import Snapshot

BANDWIDTH_MANAGER = "cilium-bandwidth-manager"


def foreign_owners(actual: Snapshot) -> tuple[str, ...]:
    """Return who that is: of the root qdisc, and of programs at the egress hook."""
    found = []
    root = actual.root
    if root is not None and not is_ours(root) and not actual.has_default_root:
        found.append(BANDWIDTH_MANAGER if _is_bandwidth_manager(actual) else "root")
    programs = actual.tcx.programs if actual.tcx else ()
    if any(not program.is_ours for program in programs):
        found.append("tcx")
    return tuple(found)


def _is_bandwidth_manager(actual: Snapshot) -> bool:
    """Cilium's bandwidth manager puts an mq of its own with an fq on every queue."""
    if not isinstance(actual.root, MqQdisc) or not actual.queues:
        return False
    return all(
        (found.parameters.kind if isinstance(found, Leaf) else found.kind) == LeafKind.FQ
        for found in actual.queues.values()
    )
