"""Whether bytes can leave the node past the qdiscs, or by another device. What really does is for the wire to say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kura_shaper.tree.snapshot import Unknown
from kura_shaper.verify.values import Check, Code, Finding, Judged, Phase, Severity

if TYPE_CHECKING:
    from kura_shaper.verify.observed import NodeReading, Observed

ROUTE_ELSEWHERE = Code(
    "route-elsewhere",
    Severity.ERROR,
    "a default route leaves by a device that no tree is on",
    "shape that device too (`kura-shaper apply --device`), or mend the route",
)
XDP_ATTACHED = Code(
    "xdp-attached",
    Severity.WARNING,
    "an XDP program is attached: it may transmit or redirect frames that no qdisc sees",
    "find out what it does (`bpftool net`); compare with `bytes-outside` under load; accept it when it only filters",
)
AF_XDP_SOCKET = Code(
    "af-xdp-socket",
    Severity.ERROR,
    "an AF_XDP socket can send on the device: its frames pass every qdisc, with and without zero copy",
    "find its process and move it to another device, or take it out of the promise",
)
HARDWARE_FORWARDS = Code(
    "hardware-forwards",
    Severity.WARNING,
    "hardware carries out filters on this node: what they forward no qdisc sees",
    "look where they redirect to (`tc -s filter show`); turn hw-tc-offload off if it is this device's port",
)
PORT_SHARED = Code(
    "port-shared",
    Severity.WARNING,
    "virtual functions share the device's port: their bytes are on the wire and not in the budget",
    "limit them in hardware (`ip link set DEVICE vf N max_tx_rate`), or take them out of the budget",
)


def _routes(observed: Observed) -> Judged:
    devices, name = observed.node.default_devices, observed.node.device.name
    if isinstance(devices, Unknown):
        return Judged(unknown=devices.reason)
    others = [device for device in devices if device != name]
    bare = [device for device in others if device not in observed.node.other_trees]
    if bare:
        also = "also " if name in devices else ""
        message = f"default routes {also}leave by {', '.join(bare)}, where no tree of ours is"
        return Judged(findings=(Finding(ROUTE_ELSEWHERE, message, evidence={"devices": tuple(devices)}),))
    if not devices:
        return Judged("no default route here: clients are reached by routes of their own")
    also = f", and by {', '.join(others)}, with trees of their own: verify each" if others else ""
    return Judged(f"default routes leave by {name if name in devices else 'other devices'}{also}")


def _past(observed: Observed) -> Judged:
    node = observed.node
    parts = (node.links, node.xdp_sockets, node.hardware_filters, node.port)
    unknown = "; ".join(part.reason for part in parts if isinstance(part, Unknown))
    findings = (*_xdp(node), *_xdp_sockets(node), *_hardware(node), *_port(node))
    offload = ""
    if not isinstance(node.port, Unknown):
        on = "on, with no filter in hardware" if node.port.has_tc_offload else "off"
        offload = f", hw-tc-offload {on}, no virtual functions"
    seen = f"no XDP program, no AF_XDP socket that sends, no filter in hardware{offload}"
    return Judged(seen, findings, unknown=unknown)


def _xdp(node: NodeReading) -> tuple[Finding, ...]:
    if isinstance(node.links, Unknown):
        return ()
    names = tuple(link.name for link in node.links if link.has_xdp)
    if not names:
        return ()
    message = f"an XDP program is attached to {', '.join(names[:5])}"
    return (Finding(XDP_ATTACHED, message, evidence={"devices": names[:20]}),)


def _xdp_sockets(node: NodeReading) -> tuple[Finding, ...]:
    if isinstance(node.xdp_sockets, Unknown):
        return ()
    near = [one for one in node.xdp_sockets if one.ifindex in (0, node.device.ifindex)]
    if not near:
        return ()
    is_told = all(one.ifindex for one in near)
    where = f"on {node.device.name}" if is_told else "here; this kernel does not tell on which device"
    zero_copy = sum(one.is_zero_copy for one in near)
    message = f"{len(near)} AF_XDP socket{'s' if len(near) > 1 else ''} {where}"
    return (Finding(AF_XDP_SOCKET, message, evidence={"sockets": len(near), "zero_copy": zero_copy}),)


def _hardware(node: NodeReading) -> tuple[Finding, ...]:
    if isinstance(node.hardware_filters, Unknown) or not node.hardware_filters:
        return ()
    links = () if isinstance(node.links, Unknown) else node.links
    names = {link.ifindex: link.name for link in links}
    where = sorted({names.get(one.ifindex, str(one.ifindex)) for one in node.hardware_filters})
    message = f"{len(node.hardware_filters)} filters are carried out by hardware, on {', '.join(where[:5])}"
    return (Finding(HARDWARE_FORWARDS, message, evidence={"devices": tuple(where[:20])}),)


def _port(node: NodeReading) -> tuple[Finding, ...]:
    if isinstance(node.port, Unknown) or not node.port.virtual_functions:
        return ()
    count = node.port.virtual_functions
    message = f"{count} virtual function{'s' if count > 1 else ''} share the port of {node.device.name}"
    return (Finding(PORT_SHARED, message, evidence={"virtual_functions": count}),)


CHECKS = (
    Check(
        "routes",
        "Do bytes for the world leave by this device, and no other?",
        Phase.STATIC,
        (ROUTE_ELSEWHERE,),
        _routes,
    ),
    Check(
        "byways",
        "Can nothing send on this device past its qdiscs?",
        Phase.STATIC,
        (XDP_ATTACHED, AF_XDP_SOCKET, HARDWARE_FORWARDS, PORT_SHARED),
        _past,
    ),
)
