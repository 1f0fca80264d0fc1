"""What else can bring bytes out of a device, past its qdiscs or on another way: read, not judged.

A qdisc sees what goes through the stack's `dev_queue_xmit`. An XDP program may transmit or redirect
frames of its own accord, filters and flow tables that the hardware carries out forward without the
CPU, a virtual function has its own way to the same port, and a route or a rule may choose another
device altogether. (net/core/dev.c, net/core/filter.c: xdp_do_redirect, net/sched/cls_api.c)
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from pyroute2 import IPRoute
from pyroute2.ethtool.ioctl import IoctlEthtool
from pyroute2.netlink.exceptions import NetlinkError

from kura_shaper.errors import StateUnknownError
from kura_shaper.kernel import wire
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.errors import KernelRefusedError, NotThereError
from kura_shaper.kernel.sysfs import DeviceSysfs
from kura_shaper.tree.model import EGRESS, HOOK, INGRESS, ROOT

if TYPE_CHECKING:
    from kura_shaper.kernel.sockets import Address
    from kura_shaper.tree.model import Device

# The attribute that holds a classifier's flags, by kind (include/uapi/linux/pkt_cls.h).
_FLAGS = {"bpf": 9, "flower": 22, "matchall": 3, "u32": 11}
_IN_HARDWARE = 1 << 2
_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
_BASIC = 1  # TCA_STATS_BASIC


@dataclass(frozen=True, slots=True)
class Link:
    """A device of this network namespace, as far as it matters who else is here; has_xdp: a program is attached."""

    name: str
    ifindex: int
    kind: str = ""
    has_xdp: bool = False


@dataclass(frozen=True, slots=True)
class MarkRule:
    """A rule of policy routing that a mark decides: (mark & mask) == value looks in that table."""

    priority: int
    family: int
    value: int
    mask: int
    table: int

    def matches(self, mark: int) -> bool:
        """Whether a packet with this mark is routed by it."""
        return mark & self.mask == self.value

    def __str__(self) -> str:
        version = "IPv6" if self.family == socket.AF_INET6 else "IPv4"
        return f"{version} rule {self.priority} (fwmark {self.value:#x}/{self.mask:#x} lookup {self.table})"


@dataclass(frozen=True, slots=True)
class HardwareFilter:
    """A filter that hardware carries out."""

    ifindex: int
    kind: str
    priority: int


@dataclass(frozen=True, slots=True)
class Port:
    """What is behind a device: its link's speed in bit/s (0: unknown), virtual functions, tc in hardware."""

    speed_bits_per_second: int = 0
    virtual_functions: int = 0
    has_tc_offload: bool = False


def read_links() -> tuple[Link, ...]:
    """Return the devices of this network namespace. Raises StateUnknownError."""
    try:
        with IPRoute() as ip:
            return tuple(_link(link) for link in ip.get_links())
    except (NetlinkError, OSError) as error:
        raise StateUnknownError(f"network devices can't be read: {error}") from error


def _link(link: Any) -> Link:
    info, xdp = link.get("linkinfo"), link.get("xdp")
    attached = xdp.get_attr("IFLA_XDP_ATTACHED") if xdp else None
    return Link(
        name=str(link.get("ifname")),
        ifindex=int(link["index"]),
        kind=str(info.get("kind") or "") if info else "",
        has_xdp=attached is not None,  # the library has a word for each way of attaching, and None for none
    )


def read_mark_rules() -> tuple[MarkRule, ...]:
    """Return the rules of policy routing that a mark decides. Raises StateUnknownError."""
    try:
        with IPRoute() as ip:
            rules = [*ip.get_rules(family=socket.AF_INET), *ip.get_rules(family=socket.AF_INET6)]
    except (NetlinkError, OSError) as error:
        raise StateUnknownError(f"the routing rules can't be read: {error}") from error
    return tuple(_rule(rule) for rule in rules if rule.get("fwmark"))


def _rule(rule: Any) -> MarkRule:
    mask = rule.get("fwmask")
    return MarkRule(
        priority=int(rule.get("priority") or 0),
        family=int(rule["family"]),
        value=int(rule.get("fwmark")),
        mask=0xFFFFFFFF if mask is None else int(mask),
        table=int(rule.get("table") or rule["table"]),
    )


def way_to(address: Address, *, mark: int = 0) -> int:
    """Return the index of the device that a packet of ours to an address leaves by, 0 when there is no way.

    Raises StateUnknownError.
    """
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with IPRoute() as ip:
            (route,) = ip.route("get", dst=str(ip_address(address)), family=family, mark=mark)
            return int(route.get("oif") or 0)
    except NetlinkError:
        return 0
    except (OSError, ValueError) as error:
        raise StateUnknownError(f"the route to {address} can't be read: {error}") from error


def read_port(device: Device) -> Port:
    """Return what is behind a device. What the device does not tell is left at 0. Raises StateUnknownError."""
    with DeviceSysfs(device.name, device.ifindex) as sysfs:
        speed, functions = sysfs.speed_mbps(), sysfs.virtual_functions()
    return Port(speed * 1_000_000, functions, _has_tc_offload(device.name))


def _has_tc_offload(name: str) -> bool:
    # A driver without features is one that can't.
    with suppress(Exception):
        door: Any = IoctlEthtool(name)
        try:
            return any(row[0] == "hw-tc-offload" and row[1] for row in door.get_features())
        finally:
            door.close()
    return False


def read_hardware_filters(links: tuple[Link, ...]) -> tuple[HardwareFilter, ...]:
    """Return the filters at the hooks of any device here that hardware carries out.

    Raises KernelRefusedError, StateUnknownError.
    """
    hooked: dict[int, str] = {}
    found: list[HardwareFilter] = []

    def hook(data: memoryview, start: int, end: int) -> None:
        _, ifindex, _, parent, _ = wire.TCMSG.unpack_from(data, start)
        if parent == HOOK.u32:
            begin, stop = wire.spans(data, start + wire.TCMSG.size, end).get(wire.TCA_KIND, (0, 0))
            hooked[ifindex] = bytes(data[begin:stop]).rstrip(b"\0").decode("ascii", "replace")

    def one(data: memoryview, start: int, end: int) -> None:
        offloaded = hardware_filter(data, start, end)
        if offloaded:
            found.append(offloaded)

    with TcClient() as client:
        client.dump(wire.dump_request(wire.Message.GETQDISC), hook)
        known = {link.ifindex for link in links}
        for ifindex, kind in hooked.items():
            if ifindex not in known:
                continue
            for place in (INGRESS, EGRESS) if kind == "clsact" else (HOOK,):
                with suppress(NotThereError):  # a pod's device that went meanwhile
                    client.dump(wire.dump_request(wire.Message.GETTFILTER, ifindex, place.u32), one)
    return tuple(found)


def hardware_filter(data: memoryview, start: int, end: int) -> HardwareFilter | None:
    """Return the filter whose tcmsg begins at start when hardware carries it out."""
    _, ifindex, _, _, info = wire.TCMSG.unpack_from(data, start)
    spans = wire.spans(data, start + wire.TCMSG.size, end)
    begin, stop = spans.get(wire.TCA_KIND, (0, 0))
    kind = bytes(data[begin:stop]).rstrip(b"\0").decode("ascii", "replace")
    options = wire.spans(data, *spans.get(wire.TCA_OPTIONS, (0, 0)))
    at, flags_end = options.get(_FLAGS.get(kind, -1), (0, 0))
    if flags_end - at < _U32.size or not _U32.unpack_from(data, at)[0] & _IN_HARDWARE:
        return None
    return HardwareFilter(ifindex, kind, info >> 16)


def read_root_bytes(client: TcClient, ifindex: int) -> int:
    """Return the bytes that passed a device's root qdisc, whatever it is.

    Raises StateUnknownError, also when it has none that counts.
    """
    # Without ECHO the kernel tells everybody who listens for changes, and not who asked.
    flags = wire.Flags.REQUEST | wire.Flags.ECHO
    request = wire.message(wire.Message.GETQDISC, flags, ifindex=ifindex, handle=0, parent=ROOT.u32, info=0, body=b"")
    try:
        data = client.get(request)
    except KernelRefusedError as error:
        raise StateUnknownError(f"the root qdisc can't be read: {error.message}") from error
    spans = wire.spans(data, wire.TCMSG.size, len(data))
    stats = wire.spans(data, *spans.get(wire.TCA_STATS2, (0, 0)))
    at, stop = stats.get(_BASIC, (0, 0))
    if stop - at < _U64.size:
        raise StateUnknownError("the device has no root qdisc that counts")
    return int(_U64.unpack_from(data, at)[0])
