"""What this kernel accepts, found out by doing it on a device that is thrown away.

A version number or a config file says little: modules are blacklisted, back-ported or
not installed. The device is the loopback of a network namespace of its own, so nothing
is left behind whatever happens; where no namespace is granted (CAP_NET_ADMIN alone), a
veth pair in the present one, removed again.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from kura_shaper.clock import SystemClock
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.errors import NoPermissionError, refusal
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.kernel.netns import in_new_namespace
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.tree import params
from kura_shaper.tree.build import Capabilities
from kura_shaper.tree.classifier import ClassifierKind, filters
from kura_shaper.tree.model import ROOT, Device, Handle, HtbQdisc, Leaf, LeafKind
from kura_shaper.tree.operations import AddClass, AddRoot, DeleteRoot, SetFilter, SetLeaf
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.tree.operations import Operation

_LOOPBACK_IFINDEX = 1
_PREFIX = "ksp"
_LEFT_BEHIND = re.compile(f"{_PREFIX}([0-9a-f]{{6}})[0-9a-f]{{4}}")
_QDISC = HtbQdisc(Handle(1), ROOT, 2, params.DIRECT_QLEN_PACKETS)
_CLASSID, _LEAF = Handle(1, 2), Handle(2)


def probe() -> Capabilities:
    """Return what the kernel was seen to accept and to show again.

    Raises KernelRefusedError when it does not even take an HTB, NoPermissionError without CAP_NET_ADMIN.
    """
    try:
        return in_new_namespace(lambda: _probe_on(Device("lo", _LOOPBACK_IFINDEX)))
    except NoPermissionError:
        return _probe_on_veth()


def _probe_on_veth() -> Capabilities:
    # A device name holds 15 characters: the process, so that a killed one's can be told, and a random part.
    name = f"{_PREFIX}{os.getpid():06x}{secrets.token_hex(2)}"
    try:
        with IPRoute() as ip:
            _sweep(ip)
            ip.link("add", ifname=name, kind="veth", peer={"ifname": f"{name}p"})
            try:
                (ifindex,) = ip.link_lookup(ifname=name)
                return _probe_on(Device(name, ifindex))
            finally:
                ip.link("del", ifname=name)
    except NetlinkError as error:
        raise refusal(error.code, doing="making a veth pair to try the kernel on") from error


def _sweep(ip: IPRoute) -> None:
    """Remove the pairs of processes that were killed before they could."""
    for link in ip.get_links():
        match = _LEFT_BEHIND.fullmatch(str(link.get("ifname")))
        if match and not Path(f"/proc/{int(match[1], 16)}").exists():
            ip.link("del", index=link["index"])


def _probe_on(device: Device) -> Capabilities:
    with TcClient() as client:
        control = KernelTrafficControl(client, device, clock=SystemClock())
        return Capabilities(
            leaves=frozenset(kind for kind in LeafKind if _takes(control, [_leaf(kind, device)])),
            classifiers=frozenset(kind for kind in ClassifierKind if _takes(control, _filters(kind))),
        )


def _takes(control: KernelTrafficControl, operations: list[Operation]) -> bool:
    """Whether operations hold on a fresh HTB with one class. Raises when the HTB itself does not."""
    device = Device("", 0)
    spec = params.htb_class(_CLASSID, Handle(1), floor=Rate(10**6), ceil=Rate(10**9), prio=0, device=device)
    for refused in control.send([AddRoot(_QDISC), AddClass(spec)]):
        if refused is not None:
            raise refused
    outcomes = execute(operations, control, clock=SystemClock())
    control.send([DeleteRoot(_QDISC.handle)])
    return all(outcome.status is Status.DONE for outcome in outcomes)


def _leaf(kind: LeafKind, device: Device) -> SetLeaf:
    return SetLeaf(Leaf(_LEAF, _CLASSID, params.leaf_parameters(kind, Rate(10**9), device)))


def _filters(kind: ClassifierKind) -> list[Operation]:
    wanted = filters(kind, MarkLayout(), gateway_ports=[443], class_ids=[0x100], root=_QDISC.handle)
    return [SetFilter(filter_) for filter_ in wanted]
