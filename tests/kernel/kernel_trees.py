"""Trees that the kernel tests put on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.tenants.document import Gateway, Tenant, TenantsDocument
from kura_shaper.tenants.marks import PROOF_CLASS, SHAPED_QUEUES_MAX
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, Wanted, build
from kura_shaper.tree.model import EGRESS, Device, Handle, HtbClass, Leaf, LeafKind, OtherQdisc, ticks_of_bytes
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.tree.snapshot import Snapshot

MBIT, GBIT = 10**6, 10**9
ROOT_HANDLE = Handle(0x20)
HOST, BUDGET, GATEWAY, UNATTRIBUTED = (Handle(0x20, minor) for minor in (0x02, 0x03, 0x10, 0x11))
ACME, ZETA = Handle(0x20, 0x2A7), Handle(0x20, 0x2A8)
GATEWAY_PORT, PEER_PORT = 443, 7443
# The same two tenants, for the command.
DOCUMENT = """\
apiVersion: kura-shaper/v1
kind: Tenants
region: us-east
gateway: {https_ports: [443], peer_ports: [7443]}
tenants:
  - {name: acme, class: 0x2a7, floor: 25M, ceiling: 1500M}
  - {name: zeta, class: 0x2a8, floor: 0, ceiling: 40G}
"""


def tenant(classid: Handle, *, floor: int = 25 * MBIT, ceiling: int = 1500 * MBIT) -> Tenant:
    """Return a tenant that is named after its class."""
    return Tenant(f"tenant-{classid.minor:x}", classid.minor, Rate(floor), Rate(ceiling))


def document(*tenants: Tenant) -> TenantsDocument:
    """Return a document, of two tenants when none are given."""
    chosen = tenants or (tenant(ACME), tenant(ZETA, floor=0, ceiling=40 * GBIT))
    return TenantsDocument("test", chosen, gateway=Gateway((GATEWAY_PORT,), (PEER_PORT,)))


def wanted(
    device: Device,
    capabilities: Capabilities,
    *tenants: Tenant,
    budget: int = 10 * GBIT,
    shape: ShapeChoice = ShapeChoice.SINGLE,
    shaped_queues: int = 1,
) -> Wanted:
    """Return the wanted tree of a device with the best leaf that the kernel has."""
    settings = TreeSettings(Rate(budget), shape=shape, shaped_queues=shaped_queues, leaf=LeafKind.FQ_CODEL)
    return build(document(*tenants), device, settings=settings, capabilities=capabilities)


def htb_class(
    classid: Handle,
    *,
    parent: Handle = ROOT_HANDLE,
    floor: int = 10 * MBIT,
    ceil: int = 100 * MBIT,
    burst_bytes: int = 65_536,
    quantum_bytes: int = 1514,
    prio: int = 0,
) -> HtbClass:
    """Return a class with buckets of the same size for floor and ceil."""
    return HtbClass(
        classid=classid,
        parent=parent,
        floor=Rate(floor),
        ceil=Rate(ceil),
        burst_ticks=ticks_of_bytes(Rate(floor), burst_bytes),
        cburst_ticks=ticks_of_bytes(Rate(ceil), burst_bytes),
        quantum_bytes=quantum_bytes,
        prio=prio,
    )


def differences(made: Wanted, actual: Snapshot) -> list[str]:
    """Return what is not on the device as wanted, or is there beside it."""
    tree = made.tree
    hooks = {f.parent for f in actual.filters} - {htb.handle for htb in tree.htbs} - {EGRESS}
    pairs: list[tuple[str, object, object]] = [
        ("root", tree.root, actual.root),
        ("queues", {q.parent: q for q in tree.queues}.items() <= actual.queues.items(), True),
        ("htbs", tree.htbs, actual.htbs),
        ("classes", {c.classid: c for c in tree.classes}, dict(actual.classes)),
        ("leaves", {leaf.parent: leaf for leaf in tree.leaves}, leaves_of_choice(actual)),
        ("filters", tuple(sorted(tree.filters, key=lambda f: f.key)), actual.filters),
        ("filters elsewhere", hooks, set()),
    ]
    return [f"{name}: wanted {want}, found {found}" for name, want, found in pairs if want != found]


def leaves_of_choice(actual: Snapshot) -> dict[Handle, Leaf | OtherQdisc]:
    """Return the leaves but the kernel's own below a proof's class, which needs none."""
    proofs = range(PROOF_CLASS, PROOF_CLASS + SHAPED_QUEUES_MAX)
    return {classid: leaf for classid, leaf in actual.leaves.items() if classid.minor not in proofs}
