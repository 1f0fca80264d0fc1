"""Worlds that are broken in one way each, and the one finding that `verify` then has: what stands still."""

from __future__ import annotations

import ctypes
import socket
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from conftest import run_in_child
from kernel_devices import set_live_tx_queues
from kernel_traffic import NODE
from kernel_trees import GATEWAY_PORT, PEER_PORT
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from verify_rig import STATIC, TENANTS, VerifyRig, gateway, ip, only, tc

from kura_shaper.clock import SystemClock
from kura_shaper.kernel import bpf
from kura_shaper.kernel.descriptor import closing
from kura_shaper.kernel.device import KernelTrafficControl
from kura_shaper.kernel.errors import KernelRefusedError
from kura_shaper.kernel.executor import execute
from kura_shaper.kernel.links import read_device
from kura_shaper.kernel.sysfs import DeviceSysfs
from kura_shaper.tenants.file import parse_tenants
from kura_shaper.tree.build import ShapeChoice, build
from kura_shaper.tree.diff import plan
from kura_shaper.tree.ebpf import steering_program
from kura_shaper.tree.model import SteeringKind
from kura_shaper.tree.snapshot import Snapshot
from kura_shaper.units import Rate
from kura_shaper.verify.values import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Network

    from kura_shaper.tree.build import Capabilities

pytestmark = pytest.mark.privileged

_XDP, _XDP_PASS, _SOL_XDP, _XDP_TX_RING = 6, 2, 283, 3
_CLONE_NEWNS, _CLONE_NEWPID, _MS_REC_PRIVATE = 0x00020000, 0x20000000, 0x4000 | 0x40000
LIBC = ctypes.CDLL(None, use_errno=True)
_NO_MATCH, _DROP = "1,6 0 0 0", "1,6 0 0 2"


@pytest.fixture
def rig(network: Network, capabilities: Capabilities) -> Iterator[VerifyRig]:
    """A node whose gateway serves; the tree comes with `shape`."""
    with gateway():
        yield VerifyRig(network, capabilities)


@pytest.fixture
def mq(rig: VerifyRig) -> VerifyRig:
    """The same with a tree in shape mq, steered by a filter on the egress hook."""
    kind = next((k for k in (SteeringKind.SKBEDIT, SteeringKind.BPF) if k in rig.capabilities.steering), None)
    if kind is None:
        pytest.skip("this kernel can't steer by a filter")
    rig.shape(ShapeChoice.MQ, steering=kind)
    return rig


def test_a_healthy_node_has_no_finding_in_either_shape(rig: VerifyRig) -> None:
    rig.shape()
    report = rig.verify()
    assert report.findings == ()
    assert report.unknown == ()
    assert report.exit_code == 0


def test_a_healthy_node_in_shape_mq_has_its_steering_proven(mq: VerifyRig) -> None:
    report = mq.verify()
    assert report.findings == ()
    (steering,) = [result for result in report.results if result.check.name == "steering"]
    assert steering.outcome is Outcome.HOLDS
    assert "proven just now" in steering.words


@pytest.mark.finding("tree-absent")
def test_no_tree_at_all(rig: VerifyRig) -> None:
    only(rig.verify(), "tree-absent")


@pytest.mark.finding("tree-foreign")
def test_the_root_qdisc_of_somebody_else(rig: VerifyRig) -> None:
    tc("qdisc replace dev nic0 root handle 7: pfifo")
    only(rig.verify(), "tree-foreign")


@pytest.mark.finding("bandwidth-manager-on")
def test_what_the_bandwidth_manager_leaves_behind_while_it_is_on(rig: VerifyRig, tmp_path: Path) -> None:
    rig.shape()
    pin = tmp_path / "cilium_throttle"
    assert rig.verify(throttle_map=pin).findings == ()
    pin.touch()
    only(rig.verify(throttle_map=pin), "bandwidth-manager-on")


@pytest.mark.finding("tree-differs")
@pytest.mark.parametrize(
    "change",
    [
        "class change dev nic0 parent 20:3 classid 20:2a7 htb rate 25mbit ceil 400mbit",
        "filter del dev nic0 parent 20: prio 100",
        "class add dev nic0 parent 20:3 classid 20:3aa htb rate 1mbit ceil 100mbit",
    ],
)
def test_a_tree_that_somebody_changed(rig: VerifyRig, change: str) -> None:
    rig.shape()
    tc(change)
    only(rig.verify(), "tree-differs")


@pytest.mark.finding("tree-differs")
def test_another_budget_than_the_one_that_was_promised(rig: VerifyRig) -> None:
    rig.shape()
    rig.budget = Rate(200_000_000)
    only(rig.verify(), "tree-differs")


@pytest.mark.finding("queue-drops")
def test_a_tx_queue_without_a_qdisc(mq: VerifyRig) -> None:
    tc("qdisc replace dev nic0 parent 1f:4 handle 99: pfifo")
    tc("qdisc del dev nic0 parent 1f:4")
    only(mq.verify(), "queue-drops")


@pytest.mark.finding("filter-foreign")
def test_a_filter_ahead_of_the_classifier(rig: VerifyRig) -> None:
    rig.shape()
    tc("filter add dev nic0 parent 20: protocol all prio 1 bpf bytecode", _NO_MATCH)
    only(rig.verify(), "filter-foreign")


@pytest.mark.finding("steering-absent")
def test_nothing_that_steers(mq: VerifyRig) -> None:
    tc("filter del dev nic0 egress")
    only(mq.verify(), "steering-absent")


@pytest.mark.finding("steering-shadowed")
def test_a_filter_ahead_of_the_steering(mq: VerifyRig) -> None:
    tc("filter add dev nic0 egress protocol all prio 1 bpf bytecode", _NO_MATCH)
    only(mq.verify(), "steering-shadowed")


@pytest.mark.finding("steering-left-over")
def test_a_program_of_an_earlier_run_that_steers_as_well(mq: VerifyRig) -> None:
    if SteeringKind.TCX not in mq.capabilities.steering:
        pytest.skip("this kernel lacks tcx")
    program = steering_program(mq.document.marks, [GATEWAY_PORT], placement={}, shaped_queues=1, live_queues=4)
    bpf.steer_by_tcx(program, mq.network.device.ifindex)
    only(mq.verify(), "steering-left-over")


@pytest.mark.finding("xps-overrides")
def test_xps_that_is_set_again(rig: VerifyRig) -> None:
    if SteeringKind.BPF not in rig.capabilities.steering:
        pytest.skip("this kernel can't steer by a program, and XPS overrides no other way")
    rig.shape(ShapeChoice.MQ, steering=SteeringKind.BPF)
    with DeviceSysfs("nic0", rig.network.device.ifindex) as sysfs:
        try:
            sysfs.set_xps_mask(2, 1)
        except KernelRefusedError:
            pytest.skip("this kernel lacks XPS")
    only(rig.verify(), "xps-overrides")


@pytest.mark.finding("queue-dead")
def test_shaped_queues_that_are_not_live_any_more(rig: VerifyRig) -> None:
    kinds = rig.capabilities.steering & {SteeringKind.SKBEDIT, SteeringKind.BPF}
    if not kinds:
        pytest.skip("this kernel can't steer by a filter")
    rig.shape(ShapeChoice.MQ, queues=3, steering=min(kinds, key=list(SteeringKind).index))
    set_live_tx_queues(rig.network, 2)
    only(rig.verify(), "queue-dead")


@pytest.mark.finding("steering-unproven")
def test_something_behind_the_steering_that_takes_the_frames_away(mq: VerifyRig) -> None:
    tc("filter add dev nic0 egress protocol all prio 50 bpf da bytecode", _DROP)
    only(mq.verify(), "steering-unproven")


@pytest.mark.finding("promises-impossible")
def test_a_budget_that_can_not_hold_even_a_trickle_for_everyone(rig: VerifyRig) -> None:
    rig.shape()
    rig.budget = Rate(100_000)
    only(rig.verify(), "promises-impossible")


@pytest.mark.case("F03")
@pytest.mark.finding("floors-oversubscribed")
def test_floors_that_add_up_to_more_than_the_budget(rig: VerifyRig) -> None:
    text = TENANTS.replace("floor: 25M", "floor: 50M").replace("floor: 0", "floor: 80M")
    rig.document = parse_tenants(text, file="tenants.yaml")
    rig.shape()
    only(rig.verify(), "floors-oversubscribed")


@pytest.mark.finding("mark-collision")
def test_a_neighbour_that_uses_the_bits_of_the_mark(rig: VerifyRig) -> None:
    rig.shape()
    ip("link add cali12345 type veth peer name other0")
    only(rig.verify(), "mark-collision")


@pytest.mark.finding("mark-routed")
def test_a_routing_rule_that_takes_a_tenants_mark(rig: VerifyRig) -> None:
    rig.shape()
    ip("rule add fwmark 0x80000/0xff0000 lookup 52")
    assert rig.verify().findings == (), "no tenant has that value"
    ip("rule add fwmark 0x2a70000/0xffff0000 lookup 52")
    only(rig.verify(), "mark-routed")


@pytest.mark.finding("route-elsewhere")
def test_a_default_route_by_another_device(rig: VerifyRig) -> None:
    rig.shape()
    ip("route add default via 10.70.0.2")
    assert rig.verify().findings == ()
    ip("link add other0 type veth peer name other1")
    ip("link set other0 up")
    ip("-6 route add default dev other0")
    only(rig.verify(), "route-elsewhere")
    other = read_device("other0")
    made = build(rig.document, other, settings=rig.settings, capabilities=rig.capabilities)
    control = KernelTrafficControl(rig.network.client(), other, clock=SystemClock())
    execute(plan(made, Snapshot(other, None)).operations, control, clock=SystemClock())
    assert rig.verify().findings == (), "it has a tree of its own"


@pytest.mark.finding("xdp-attached")
def test_an_xdp_program_that_could_redirect_to_the_device(rig: VerifyRig) -> None:
    rig.shape()
    ip("link add other0 type veth peer name other1")
    with closing(_xdp_program()) as program, IPRoute() as route:
        (index,) = route.link_lookup(ifname="other0")
        try:
            route.link("set", index=index, xdp_fd=program)
        except NetlinkError:
            pytest.skip("this kernel can't attach XDP to a veth")
    only(rig.verify(), "xdp-attached")


def _xdp_program() -> int:
    """Load a program that lets everything pass."""
    code = ctypes.create_string_buffer(struct.pack("=BBhi BBhi", 0xB7, 0, 0, _XDP_PASS, 0x95, 0, 0, 0))
    licence = ctypes.create_string_buffer(b"GPL")
    attributes = struct.pack(
        "=IIQQIIQII16s", _XDP, 2, ctypes.addressof(code), ctypes.addressof(licence), *(0,) * 5, b""
    )
    return bpf.bpf_call(bpf._PROG_LOAD, attributes, doing="loading a program for a test")


@pytest.mark.finding("af-xdp-socket")
def test_a_socket_that_sends_past_every_qdisc(rig: VerifyRig) -> None:
    rig.shape()
    try:
        made = socket.socket(44, socket.SOCK_RAW, 0)
    except OSError:
        pytest.skip("this kernel lacks AF_XDP")
    with made:
        made.setsockopt(_SOL_XDP, _XDP_TX_RING, struct.pack("=I", 64))
        only(rig.verify(), "af-xdp-socket")
    assert rig.verify().findings == ()


@pytest.mark.finding("gateway-port-closed")
def test_a_gateway_port_that_nobody_listens_on(network: Network, capabilities: Capabilities) -> None:
    rig = VerifyRig(network, capabilities)
    rig.shape()
    with gateway([PEER_PORT]):
        report = rig.verify()
    only(report, "gateway-port-closed")
    assert [finding.evidence["port"] for finding in report.findings] == [GATEWAY_PORT]


@pytest.mark.case("F71")
@pytest.mark.finding("gateway-port-foreign")
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_another_process_on_a_gateway_port_is_named(
    network: Network, capabilities: Capabilities, kind: socket.SocketKind
) -> None:
    rig = VerifyRig(network, capabilities)
    rig.shape()
    with gateway() if kind is socket.SOCK_DGRAM else gateway([PEER_PORT]), socket.socket(type=kind) as made:
        made.bind((NODE[socket.AF_INET], GATEWAY_PORT))
        if kind is socket.SOCK_STREAM:
            made.listen()
        report = rig.verify()
    only(report, "gateway-port-foreign")
    (finding,) = report.findings
    assert finding.evidence["port"] == GATEWAY_PORT
    assert "python" in str(finding.evidence["program"])


def test_a_server_that_only_the_node_itself_can_reach_is_nobodys_business(rig: VerifyRig) -> None:
    rig.shape()
    with socket.socket(type=socket.SOCK_DGRAM) as made:
        made.bind(("127.0.0.1", GATEWAY_PORT))
        assert rig.verify().findings == ()


@pytest.mark.finding("gateway-cant-mark")
def test_a_gateway_without_the_capability(
    network: Network, capabilities: Capabilities, drop_capabilities: Callable[[], None]
) -> None:
    rig = VerifyRig(network, capabilities)
    rig.shape()
    with gateway(before=drop_capabilities):
        only(rig.verify(), "gateway-cant-mark")


def test_an_accepted_finding_is_shown_and_does_not_count(rig: VerifyRig) -> None:
    rig.shape()
    ip("link add cali12345 type veth peer name other0")
    report = rig.verify(replace(STATIC, accepted=frozenset({"mark-collision"})))
    assert report.findings == ()
    assert [finding.code.name for finding in report.accepted] == ["mark-collision"]
    assert report.exit_code == 0


def test_what_can_not_be_read_is_never_a_pass(network: Network, capabilities: Capabilities) -> None:
    """In a container that sees no other processes, nobody can say whose a port is."""
    rig = VerifyRig(network, capabilities)
    rig.shape()

    def inside() -> int:
        assert LIBC.mount(b"none", b"/", b"", _MS_REC_PRIVATE, None) == 0
        assert LIBC.mount(b"proc", b"/proc", b"proc", 0, None) == 0
        report = rig.verify()
        print([result.check.name for result in report.unknown], [finding.code.name for finding in report.findings])
        return report.exit_code

    def outside() -> int:
        assert LIBC.unshare(_CLONE_NEWNS | _CLONE_NEWPID) == 0
        ended = run_in_child(inside)
        print(ended.stdout, ended.stderr)
        return ended.status

    with gateway():
        ended = run_in_child(outside)
    assert ended.status == 4, (ended.stdout, ended.stderr)
    assert "['gateway-ports'] []" in ended.stdout
