"""Network devices by name, read through pyroute2."""

from __future__ import annotations

import socket
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.kernel.sysfs import DeviceSysfs, check_device_name
from kura_shaper.tree.model import Device

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_PAIRS = frozenset({"veth", "netkit"})


def read_device(name: str) -> Device:
    """Return a device of this network namespace.

    Raises UsageError when there is none of that name, StateUnknownError when links can't be read.
    """
    check_device_name(name)
    try:
        with IPRoute() as ip:
            links = ip.get_links()
    except (NetlinkError, OSError) as error:
        raise StateUnknownError(f"network devices can't be read: {error}") from error
    by_name = {link.get("ifname"): link for link in links}
    if name not in by_name:
        known = ", ".join(sorted(str(n) for n in by_name)[:12])
        raise UsageError(f"--device {name!r}: no such network device here", remedy=f"there are: {known}")
    return _device(by_name[name], links)


def _device(link: Any, links: Any) -> Device:
    name, index = str(link.get("ifname")), int(link["index"])
    names = {int(other["index"]): str(other.get("ifname")) for other in links}
    return Device(
        name=name,
        ifindex=index,
        mtu_bytes=int(link.get("mtu") or 1500),
        gso_max_bytes=max(int(link.get(k) or 0) for k in ("gso_max_size", "gso_ipv4_max_size")) or 65536,
        tx_queue_len_packets=int(link.get("txqlen") or 0),
        tx_queues=_live_tx_queues(name, index) or int(link.get("num_tx_queues") or 1),
        is_loopback=bool(link["flags"] & _IFF_LOOPBACK),
        is_up=bool(link["flags"] & _IFF_UP),
        kind=_kind(link),
        ports=tuple(sorted(names[int(other["index"])] for other in links if other.get("master") == index)),
        below=names.get(_index_below(link), ""),
        master=names.get(int(link.get("master") or 0), ""),
    )


def _kind(link: Any) -> str:
    info = link.get("linkinfo")
    return str(info.get("kind") or "") if info else ""


def _index_below(link: Any) -> int:
    """Return the index of the device that a link stands on, 0 when it stands on none of this namespace.

    The same attribute names the other end of a veth; the link's own namespace goes unsaid.
    """
    is_pair = _kind(link) in _PAIRS
    is_elsewhere = link.get("link_netnsid") is not None
    return 0 if is_pair or is_elsewhere else int(link.get("link") or 0)


def _live_tx_queues(name: str, ifindex: int) -> int:
    """Return the count, 0 when it can't be known: then what the device was made with has to do."""
    try:
        with DeviceSysfs(name, ifindex) as sysfs:
            return sysfs.live_tx_queues()
    except StateUnknownError:
        return 0


def egress_devices() -> tuple[str, ...]:
    """Return the devices that bytes for the world wait at: those of the default routes, or what these stand on.

    A route by a bond leads to its ports, by a VLAN to the device below. Raises StateUnknownError.
    """
    try:
        with IPRoute() as ip:
            routes = [*ip.get_default_routes(family=socket.AF_INET), *ip.get_default_routes(family=socket.AF_INET6)]
            links = {int(link["index"]): link for link in ip.get_links()}
    except (NetlinkError, OSError) as error:
        raise StateUnknownError(f"the routes can't be read: {error}") from error
    found: dict[str, None] = {}
    for route in routes:
        for index in _ways_out(route):
            if index in links:
                found.update(dict.fromkeys(_queues_of(_device(links[index], tuple(links.values())), links)))
    return tuple(found)


def _ways_out(route: Any) -> list[int]:
    hops = route.get("multipath") or ()
    return [int(hop["oif"]) for hop in hops] or ([int(route.get("oif"))] if route.get("oif") else [])


def _queues_of(device: Device, links: Any, *, depth: int = 8) -> list[str]:
    """Return where a device's packets are queued: at itself, its ports, or the device that it stands on."""
    names = list(device.ports) or ([device.below] if device.kind in {"vlan", "macvlan"} and device.below else [])
    if not names or not depth or device.is_loopback:
        return [] if device.is_loopback else [device.name]
    below = [link for link in links.values() if str(link.get("ifname")) in names]
    found = (_queues_of(_device(link, tuple(links.values())), links, depth=depth - 1) for link in below)
    return [name for part in found for name in part]
