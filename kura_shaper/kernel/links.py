"""Network devices by name, read through pyroute2."""

from __future__ import annotations

from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from kura_shaper.errors import StateUnknownError, UsageError
from kura_shaper.tree.model import Device

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_NAME_BYTES_MAX = 15


def check_device_name(name: str) -> str:
    """Return the name when the kernel could have such a device. Raises UsageError.

    The rules are those of dev_valid_name in net/core/dev.c.
    """
    encoded = name.encode(errors="surrogateescape")
    wrong = not encoded or len(encoded) > _NAME_BYTES_MAX or name in (".", "..")
    if wrong or any(c in "/:" or c.isspace() or not c.isprintable() for c in name):
        raise UsageError(
            f"--device {name[:40]!r} can't be the name of a network device",
            remedy="1 to 15 characters without '/', ':' or blanks; `ip link` shows the names",
        )
    return name


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
    return _device(by_name[name])


def _device(link: Any) -> Device:
    return Device(
        name=str(link.get("ifname")),
        ifindex=int(link["index"]),
        mtu_bytes=int(link.get("mtu") or 1500),
        gso_max_bytes=max(int(link.get(k) or 0) for k in ("gso_max_size", "gso_ipv4_max_size")) or 65536,
        tx_queue_len_packets=int(link.get("txqlen") or 0),
        tx_queues=int(link.get("num_tx_queues") or 1),
        is_loopback=bool(link["flags"] & _IFF_LOOPBACK),
        is_up=bool(link["flags"] & _IFF_UP),
    )
