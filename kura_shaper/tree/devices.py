"""Which devices a tree may stand on.

A promise is kept where bytes leave the node, so the tree belongs on the device where they wait for the
wire. A device that hands its packets to another one has no queue of its own: a tree there is refused,
and the device to name instead is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kura_shaper.tree.notes import Note

if TYPE_CHECKING:
    from kura_shaper.tree.model import Device

# Kinds by the kernel's own names (rtnl_link_ops.kind).
_MASTERS = frozenset({"bond", "team", "bridge"})
_STACKED = frozenset({"vlan", "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec"})
_TUNNELS = frozenset(
    {"vxlan", "geneve", "bareudp", "gre", "gretap", "ip6gre", "ip6gretap", "erspan", "ip6erspan"}
    | {"ipip", "sit", "ip6tnl", "vti", "vti6", "xfrm", "wireguard", "ovpn", "gtp"}
)
_NO_WIRE = {
    "dummy": "drops what it sends: good for trying things out, nothing there reaches a wire",
    "ifb": "has no wire of its own: only what a filter redirects to it is shaped",
}


@dataclass(frozen=True, slots=True)
class DeviceProblem:
    """Why no tree may stand on a device. code is stable."""

    code: str
    message: str
    remedy: str


def device_problems(device: Device) -> tuple[DeviceProblem, ...]:
    """Return every reason not to put a tree on this device. Empty: go ahead."""
    name, kind = device.name, device.kind
    problems = []
    if device.is_loopback:
        problems.append(
            DeviceProblem("loopback", f"{name} is the loopback device", "name the device that bytes leave by")
        )
    if device.ports or kind in _MASTERS:
        problems.append(_has_ports(device))
    if kind in _STACKED:
        problems.append(_stacked(device))
    if kind in _TUNNELS:
        message = f"{name} is a tunnel ({kind}): its packets leave by another device, where their marks may be lost"
        problems.append(DeviceProblem("tunnel", message, "shape the device of the route to its other end"))
    return tuple(problems)


def _has_ports(device: Device) -> DeviceProblem:
    what = f"{device.name} is a {device.kind}" if device.kind else f"{device.name} has ports"
    if not device.ports:
        return DeviceProblem("has-ports", f"{what} without ports: bytes are queued at ports", "add ports first")
    ports = ", ".join(device.ports)
    return DeviceProblem("has-ports", f"{what}: bytes are queued at its ports, {ports}", f"shape its ports: {ports}")


def _stacked(device: Device) -> DeviceProblem:
    # The packet stays the same buffer on its way down, so its mark and its socket arrive with it.
    below = device.below
    remedy = f"shape {below}, which its packets leave by; marks survive that hop"
    if not below:
        below = "a device of another network namespace"
        remedy = "shape that device, in its own namespace; marks survive the hop"
    return DeviceProblem("stacked", f"{device.name} is a {device.kind} on top of {below}", remedy)


def device_notes(device: Device) -> tuple[Note, ...]:
    """Return what a person should know before a tree stands on this device."""
    name, notes = device.name, []
    if device.kind in _NO_WIRE:
        notes.append(Note("no-wire", f"{name} is a {device.kind} device and {_NO_WIRE[device.kind]}"))
    if not device.is_up:
        message = f"{name} is down: it can be programmed, but steering can't be proven until it is up"
        notes.append(Note("link-down", message))
    if device.tx_queue_len_packets <= 0:
        # The kernel sizes the fifo of a new class by it, until the leaf takes its place in the same send.
        message = f"{name} has a txqueuelen of 0: a class that is added drops packets until its leaf is there"
        notes.append(Note("txqueuelen-0", f"{message}; `ip link set {name} txqueuelen 1000` mends it"))
    return tuple(notes)
