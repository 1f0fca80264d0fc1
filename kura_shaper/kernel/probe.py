"""What this kernel accepts, found out by doing it on a device that is thrown away.

A version number or a config file says little: modules are blacklisted, back-ported or
not installed. The device is a veth pair in a network namespace of its own, so nothing is
left behind whatever happens; where no namespace is granted (CAP_NET_ADMIN alone), a pair in
the present one, removed again. Ways of steering are tried with a whole small tree, and taken
only when frames came to the class that they are steered to.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from kura_shaper.clock import SystemClock
from kura_shaper.errors import RefusedError
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.errors import NoPermissionError, UnsupportedError, refusal
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.kernel.links import read_device
from kura_shaper.kernel.netns import in_new_namespace
from kura_shaper.kernel.prove import prove_steering
from kura_shaper.tenants.document import TenantsDocument
from kura_shaper.tenants.marks import MarkLayout
from kura_shaper.tree import params
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, build
from kura_shaper.tree.classifier import ClassifierKind, filters
from kura_shaper.tree.diff import plan, plan_removal
from kura_shaper.tree.model import ROOT, Device, Handle, HtbQdisc, Leaf, LeafKind, SteeringKind
from kura_shaper.tree.operations import AddClass, AddRoot, DeleteHook, DeleteRoot, RemoveTcx, SetFilter, SetLeaf
from kura_shaper.tree.snapshot import Snapshot
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from kura_shaper.tree.operations import Operation

_LOOPBACK_IFINDEX = 1
_TX_QUEUES = 4
_PREFIX = "ksp"
_LEFT_BEHIND = re.compile(f"{_PREFIX}([0-9a-f]{{6}})[0-9a-f]{{4}}")
_QDISC = HtbQdisc(Handle(1), ROOT, 2, params.DIRECT_QLEN_PACKETS)
_CLASSID, _LEAF = Handle(1, 2), Handle(2)
_NOBODY = TenantsDocument("probe", ())


def probe() -> Capabilities:
    """Return what the kernel was seen to accept, to show again, and to do.

    Raises KernelRefusedError when it does not even take an HTB, NoPermissionError without CAP_NET_ADMIN.
    """
    try:
        return in_new_namespace(_probe_in_own_namespace)
    except NoPermissionError:
        return _probe_on_veth()


def _probe_in_own_namespace() -> Capabilities:
    try:
        return _probe_on_veth()
    except UnsupportedError:  # no veth: what needs no second end can be tried still
        return _probe_on(Device("lo", _LOOPBACK_IFINDEX))


def _probe_on_veth() -> Capabilities:
    # A device name holds 15 characters: the process, so that a killed one's can be told, and a random part.
    name = f"{_PREFIX}{os.getpid():06x}{secrets.token_hex(2)}"
    try:
        with IPRoute() as ip:
            _sweep(ip)
            peer = {"ifname": f"{name}p", "num_rx_queues": _TX_QUEUES}
            ip.link("add", ifname=name, kind="veth", num_tx_queues=_TX_QUEUES, peer=peer)
            try:
                for end in (f"{name}p", name):
                    (index,) = ip.link_lookup(ifname=end)
                    ip.link("set", index=index, state="up")
                return _probe_on(read_device(name))
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
        found = Capabilities(
            leaves=frozenset(kind for kind in LeafKind if _takes(control, [_leaf(kind, device)])),
            classifiers=frozenset(kind for kind in ClassifierKind if _takes(control, _filters(kind))),
        )
        steers = (kind for kind in SteeringKind if device.tx_queues > 1 and _steers(control, device, kind, found))
        return replace(found, steering=frozenset(steers))


def _steers(control: KernelTrafficControl, device: Device, kind: SteeringKind, found: Capabilities) -> bool:
    """Whether frames come to their queue on a tree of shape mq that is steered in this way."""
    settings = TreeSettings(Rate(10**9), shape=ShapeChoice.MQ)
    try:
        wanted = build(_NOBODY, device, settings=settings, capabilities=replace(found, steering=frozenset({kind})))
    except RefusedError:
        return False
    clock = SystemClock()
    outcomes = execute(plan(wanted, Snapshot(device, None)).operations, control, clock=clock)
    is_there = all(outcome.status is Status.DONE for outcome in outcomes)
    is_proven = is_there and prove_steering(control, _NOBODY.marks, clock=clock).is_proven
    # Without CAP_SYS_ADMIN no snapshot tells of a program that was attached, and its pin outlives the device.
    control.send([*plan_removal(control.snapshot()).operations, RemoveTcx(), DeleteHook()])
    return is_proven


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
