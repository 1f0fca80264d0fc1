"""The mechanism that the fleet has today: pacing at the NIC, keyed by the pod that a packet comes from.

The fleet's CNI stamps a pod's packets with departure times and an fq qdisc on the device
holds them back. What matters of it is where it acts and what it goes by: on packets that
cross the device, by their pod. An HTB class for each pod's address has the same two
properties on every kernel, and the same blind spot: a gateway on the node sends with the
node's own address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyroute2 import IPRoute

from kura_shaper.kernel.plugins import tc
from kura_shaper.lab.isolation import inside
from kura_shaper.lab.topology import NIC

if TYPE_CHECKING:
    from kura_shaper.lab.topology import Lab, Pod
    from kura_shaper.units import Rate

_ROOT, _CLASS = 0x0001_0000, 0x0001_0010
_BURST_BYTES = 131_072
_ETH_P_IP = 0x0800


def install(lab: Lab, pod: Pod, ceiling: Rate) -> None:
    """Hold a pod's packets to a ceiling at the node's NIC.

    The library rounds the bucket by a microsecond's worth, which is nothing against a GSO packet.
    Raises KernelRefusedError.
    """
    with inside(lab.topology.node.path), IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=NIC)
        # No default class: what comes from no annotated pod is not held back at all.
        tc(ip, "add", "htb", index, handle=_ROOT, default=0)
        tc(
            ip,
            "add-class",
            "htb",
            index,
            handle=_CLASS,
            parent=_ROOT,
            rate=ceiling.bytes_per_second,
            ceil=ceiling.bytes_per_second,
            burst=_BURST_BYTES,
            cburst=_BURST_BYTES,
        )
        address = int.from_bytes(pod.addresses.v4.packed, "big")
        tc(
            ip,
            "add-filter",
            "u32",
            index,
            parent=_ROOT,
            prio=1,
            protocol=_ETH_P_IP,
            target=_CLASS,
            keys=[f"{address:#010x}/0xffffffff+12"],
        )


def remove(lab: Lab) -> None:
    """Take it away again, as switching the CNI's bandwidth manager off does."""
    with inside(lab.topology.node.path), IPRoute() as ip:
        (index,) = ip.link_lookup(ifname=NIC)
        tc(ip, "del", "htb", index, handle=_ROOT)
