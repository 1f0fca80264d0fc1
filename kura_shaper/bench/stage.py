"""Where it is measured: two network namespaces that nobody else has, a device, and a tree on it.

The namespaces have no name. One is this thread's, the other is held by a descriptor, so they and
all in them are gone with the process, even when it is killed. Each tree gets a fresh device.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from kura_shaper.errors import RefusedError, StateUnknownError
from kura_shaper.kernel.client import TcClient
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.errors import refusal
from kura_shaper.kernel.executor import Status, execute
from kura_shaper.kernel.links import read_device
from kura_shaper.kernel.netns import in_new_namespace, inside, open_namespace, own_namespace
from kura_shaper.kernel.prove import prove_steering
from kura_shaper.tenants.document import Tenant, TenantsDocument
from kura_shaper.tenants.marks import TENANT_CLASS_MIN
from kura_shaper.tree import params
from kura_shaper.tree.build import Capabilities, ShapeChoice, TreeSettings, build
from kura_shaper.tree.classifier import bpf_program
from kura_shaper.tree.diff import plan
from kura_shaper.tree.model import MQ_HANDLE, LeafKind, MqQdisc, Shape
from kura_shaper.tree.operations import AddRoot
from kura_shaper.tree.snapshot import Snapshot, Unknown
from kura_shaper.units import Rate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kura_shaper.clock import Clock
    from kura_shaper.tree.model import Device

NIC, FAR_END = "nic0", "up0"
TX_QUEUES = 4
NODE_ADDRESS, FAR_ADDRESS = "10.70.0.1", "10.70.0.2"
# The far end has another one, so that it drops what comes before it looks further.
_NOBODYS_ADDRESS = "02:00:00:00:00:01"
PLAIN, DEFAULT, BY_HAND = "plain", "default", "tc"


@dataclass(frozen=True, slots=True)
class Form:
    """One of the things that are compared. Ours have a shape."""

    name: str
    shape: ShapeChoice | None = None
    shaped_queues: int = 1

    @property
    def has_limit(self) -> bool:
        """Whether it can hold a rate."""
        return self.name not in (PLAIN, DEFAULT)


@dataclass(frozen=True, slots=True)
class Promise:
    """What a tree is made for: so many tenants, each with the whole limit as its ceiling."""

    tenants: int
    limit: Rate | None

    @property
    def rate(self) -> Rate:
        """The limit, or a rate that never holds back."""
        return self.limit or params.LINE_RATE

    @property
    def document(self) -> TenantsDocument:
        """The document that says so."""
        ids = range(TENANT_CLASS_MIN, TENANT_CLASS_MIN + self.tenants)
        return TenantsDocument("bench", tuple(Tenant(f"t{n:x}", n, Rate(0), self.rate) for n in ids))

    @property
    def marks(self) -> tuple[int, ...]:
        """The tenants' marks."""
        document = self.document
        return tuple(document.marks.mark(tenant.class_id) for tenant in document.tenants)


@contextmanager
def namespaces() -> Iterator[int]:
    """Be on the node; yield a descriptor of the far end's namespace. Raises KernelRefusedError without privilege."""
    with own_namespace():
        far = in_new_namespace(open_namespace)
        try:
            yield far
        finally:
            os.close(far)


@contextmanager
def fresh_device(far: int) -> Iterator[Device]:
    """Make a device that is up and leads to the far end. Raises KernelRefusedError where the kernel has no veth."""
    try:
        with IPRoute() as ip:
            peer = {"ifname": FAR_END, "net_ns_fd": far, "num_rx_queues": TX_QUEUES}
            ip.link("add", ifname=NIC, kind="veth", num_tx_queues=TX_QUEUES, peer=peer)
            with inside(far), IPRoute() as there:
                (index,) = there.link_lookup(ifname=FAR_END)
                there.link("set", index=index, state="up")
            (index,) = ip.link_lookup(ifname=NIC)
            ip.addr("add", index=index, address=NODE_ADDRESS, prefixlen=24)
            ip.link("set", index=index, state="up")
            ip.neigh("add", dst=FAR_ADDRESS, lladdr=_NOBODYS_ADDRESS, ifindex=index, state="permanent")
            try:
                yield read_device(NIC)
            finally:
                ip.link("del", index=index)
    except NetlinkError as error:
        raise refusal(error.code, doing="making a veth pair to measure on") from error


def put(form: Form, device: Device, promise: Promise, *, capabilities: Capabilities, clock: Clock) -> str:
    """Put a form's tree on a device and return what it is made of.

    Raises RefusedError, UsageError when it can't be had here, and says why.
    """
    if form.name == PLAIN:
        return "no qdisc"
    if form.name == BY_HAND:
        return _put_by_hand(promise, capabilities)
    with TcClient() as client:
        control = KernelTrafficControl(client, device, clock=clock)
        if form.shape is None:
            for error in control.send([AddRoot(MqQdisc(MQ_HANDLE))]):
                if error is not None:
                    raise error
            return "mq, the kernel's default qdisc on each queue"
        return _put_ours(form, control, promise, capabilities=capabilities, clock=clock)


def _put_ours(
    form: Form, control: KernelTrafficControl, promise: Promise, *, capabilities: Capabilities, clock: Clock
) -> str:
    actual = control.snapshot()
    if isinstance(actual, Unknown):
        raise StateUnknownError(actual.reason)
    shape = form.shape or ShapeChoice.SINGLE
    settings = TreeSettings(promise.rate, shape=shape, shaped_queues=form.shaped_queues)
    document = promise.document
    wanted = build(document, actual.device, settings=settings, capabilities=capabilities)
    outcomes = execute(plan(wanted, Snapshot(actual.device, None)).operations, control, clock=clock)
    failed = next((outcome for outcome in outcomes if outcome.status is not Status.DONE), None)
    if failed is not None:
        raise RefusedError(f"{failed.operation.describe()}: {failed.status} {failed.detail}".rstrip())
    tree = wanted.tree
    made_of = f"htb, {tree.leaves[0].parameters.kind} leaves"
    if tree.shape is Shape.MQ and tree.steering:
        proof = prove_steering(control, document.marks, clock=clock)
        if not proof.is_proven:
            raise RefusedError(f"steering was not proven: {proof.reason}")
        made_of = f"mq, {form.shaped_queues} of {TX_QUEUES} queues shaped, {made_of}, steering by {tree.steering.kind}"
    return made_of


def _put_by_hand(promise: Promise, capabilities: Capabilities) -> str:
    """Make the tree that an operator would write with tc, with tc's own buckets. Raises RefusedError."""
    has_fq_codel = LeafKind.FQ_CODEL in capabilities.leaves
    _tc_batch([*_tree_lines(promise, has_fq_codel=has_fq_codel)])
    leaf = "fq_codel" if has_fq_codel else "tc's pfifo"
    try:
        _tc_batch(_fw_lines(promise))
    except RefusedError:
        # No cls_fw: the one program that needs no eBPF, and ours is as short as it gets.
        _tc_batch([_bpf_line(promise)])
        return f"htb, {leaf} leaves, one cls_bpf program, tc's own buckets"
    return f"htb, {leaf} leaves, an fw filter for each tenant, tc's own buckets"


def _tree_lines(promise: Promise, *, has_fq_codel: bool) -> Iterator[str]:
    limit, most = f"{promise.rate.bits_per_second}bit", f"{params.LINE_RATE.bits_per_second}bit"
    yield f"qdisc add dev {NIC} root handle 1: htb default 2"
    yield f"class add dev {NIC} parent 1: classid 1:1 htb rate {most}"
    yield f"class add dev {NIC} parent 1:1 classid 1:2 htb rate 50mbit ceil {most}"
    yield f"class add dev {NIC} parent 1:1 classid 1:3 htb rate {limit} ceil {limit}"
    for tenant in promise.document.tenants:
        yield f"class add dev {NIC} parent 1:3 classid 1:{tenant.class_id:x} htb rate 1mbit ceil {limit}"
        if has_fq_codel:
            yield f"qdisc add dev {NIC} parent 1:{tenant.class_id:x} fq_codel"


def _fw_lines(promise: Promise) -> list[str]:
    document = promise.document
    return [
        f"filter add dev {NIC} parent 1: protocol all prio 1 handle {document.marks.mark(t.class_id):#x}"
        f"/{document.marks.mask:#x} fw classid 1:{t.class_id:x}"
        for t in document.tenants
    ]


def _bpf_line(promise: Promise) -> str:
    lines = bpf_program(promise.document.marks, (), 1).instructions
    code = ",".join((str(len(lines)), *(" ".join(map(str, line)) for line in lines)))
    return f"filter add dev {NIC} parent 1: protocol all prio 1 bpf bytecode '{code}'"


def _tc_batch(lines: list[str]) -> None:
    """Raises RefusedError when there is no tc, or it refuses."""
    command = shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if command is None:
        raise RefusedError("the command tc is missing", remedy="install iproute2")
    text = "\n".join([*lines, ""])
    done = subprocess.run([command, "-batch", "-"], input=text, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise RefusedError(f"tc: {' '.join(done.stderr.split())[:200]}")
