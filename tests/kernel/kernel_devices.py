"""What happens to devices while a tree stands on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from conftest import NODE, WORLD, _configure, _make_wire
from pyroute2 import IPRoute
from pyroute2.ethtool.ioctl import IoctlEthtool
from pyroute2.netlink.exceptions import NetlinkError

from kura_shaper.kernel.links import read_device

if TYPE_CHECKING:
    from conftest import Network

_EOPNOTSUPP = 95


def set_live_tx_queues(network: Network, count: int) -> None:
    """Give `nic0` so many live tx queues, at most those that it was made with (ethtool -L)."""
    door: Any = IoctlEthtool(network.device.name)
    try:
        channels = door.get_channels()
        channels.tx_count = count
        door.set_channels(channels)
    finally:
        door.close()


def add_device(name: str, kind: str, **options: Any) -> int:
    """Make a device and return its index; the test is skipped where the kernel has no such devices."""
    with IPRoute() as ip:
        try:
            ip.link("add", ifname=name, kind=kind, **options)
        except NetlinkError as error:
            if error.code == _EOPNOTSUPP:
                pytest.skip(f"this kernel lacks {kind} devices")
            raise
        (index,) = ip.link_lookup(ifname=name)
        return int(index)


def set_link(name: str, **changes: Any) -> None:
    """Change a device: state="down", ifname="other", master=index, txqlen=0, mtu=9000."""
    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=name)
        ip.link("set", index=index, **changes)


def rename_link(name: str, new: str) -> None:
    """Rename a device, also while it is up."""
    set_link(name, state="down")
    set_link(name, ifname=new)
    set_link(new, state="up")


def delete_link(name: str) -> None:
    """Remove a device; a veth's other end goes with it."""
    with IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=name)
        ip.link("del", index=index)


def make_wire_again(network: Network) -> None:
    """Make `nic0` and the world's end of it anew, after it was deleted. It gets another index."""
    _make_wire(network.world_descriptor)
    with network.in_world():
        _configure("up0", WORLD)
    _configure("nic0", NODE)
    network.device = read_device("nic0")
