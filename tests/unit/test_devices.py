"""A tree stands where bytes wait for the wire; elsewhere the device to name instead is said."""

from __future__ import annotations

import pytest

from kura_shaper.tree.devices import DeviceProblem, device_notes, device_problems
from kura_shaper.tree.model import Device
from kura_shaper.tree.notes import Weight


@pytest.mark.parametrize("kind", ["", "veth", "tun", "netkit", "dummy", "ifb", "dsa"])
@pytest.mark.parametrize("is_up", [True, False])
def test_a_tree_may_stand_where_bytes_wait_for_the_wire(kind: str, *, is_up: bool) -> None:
    assert device_problems(Device("eth0", 2, kind=kind, is_up=is_up, master="bond0")) == ()


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        (
            Device("lo", 1, is_loopback=True),
            DeviceProblem("loopback", "lo is the loopback device", "name the device that bytes leave by"),
        ),
        (
            Device("bond0", 5, kind="bond", ports=("eth0", "eth1")),
            DeviceProblem(
                "has-ports",
                "bond0 is a bond: bytes are queued at its ports, eth0, eth1",
                "shape its ports: eth0, eth1",
            ),
        ),
        (
            Device("bond0", 5, kind="bond"),
            DeviceProblem("has-ports", "bond0 is a bond without ports: bytes are queued at ports", "add ports first"),
        ),
        (
            # Whatever holds ports hands them its packets, also where its driver does not say what it is.
            Device("switch", 5, ports=("eth0",)),
            DeviceProblem(
                "has-ports", "switch has ports: bytes are queued at its ports, eth0", "shape its ports: eth0"
            ),
        ),
        (
            Device("eth0.7", 6, kind="vlan", below="eth0"),
            DeviceProblem(
                "stacked",
                "eth0.7 is a vlan on top of eth0",
                "shape eth0, which its packets leave by; marks survive that hop",
            ),
        ),
        (
            Device("eth0", 6, kind="macvlan"),
            DeviceProblem(
                "stacked",
                "eth0 is a macvlan on top of a device of another network namespace",
                "shape that device, in its own namespace; marks survive the hop",
            ),
        ),
        (
            Device("wg0", 7, kind="wireguard"),
            DeviceProblem(
                "tunnel",
                "wg0 is a tunnel (wireguard): its packets leave by another device, where their marks may be lost",
                "shape the device of the route to its other end",
            ),
        ),
    ],
)
@pytest.mark.case("E1")
def test_a_device_that_hands_its_packets_on_is_refused_with_what_to_shape_instead(
    device: Device, problem: DeviceProblem
) -> None:
    """Case E1."""
    assert device_problems(device) == (problem,)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        *((kind, "has-ports") for kind in ("bond", "team", "bridge")),
        *((kind, "stacked") for kind in ("vlan", "macvlan", "ipvlan")),
        *((kind, "tunnel") for kind in ("vxlan", "gre", "wireguard", "ipip", "sit", "geneve")),
    ],
)
def test_each_kind_is_refused_by_its_code(kind: str, code: str) -> None:
    assert [problem.code for problem in device_problems(Device("x", 9, kind=kind))] == [code]


def test_a_device_is_told_every_reason_at_once() -> None:
    vrf_port = Device("vlan7", 6, kind="vlan", below="eth0", ports=("tap0",))
    assert [problem.code for problem in device_problems(vrf_port)] == ["has-ports", "stacked"]


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (Device("eth0", 2), {}),
        (Device("d0", 2, kind="dummy"), {"no-wire": "d0 is a dummy device and drops what it sends"}),
        (Device("ifb0", 2, kind="ifb"), {"no-wire": "only what a filter redirects to it is shaped"}),
        (Device("eth0", 2, is_up=False), {"link-down": "eth0 is down: it can be programmed, but steering can't"}),
        (
            Device("d0", 2, kind="dummy", is_up=False, tx_queue_len_packets=0),
            {"no-wire": "", "link-down": "", "txqueuelen-0": "`ip link set d0 txqueuelen 1000` mends it"},
        ),
    ],
)
def test_what_a_device_lacks_is_noted_and_fails_nothing(device: Device, says: dict[str, str]) -> None:
    notes = device_notes(device)
    assert [note.code for note in notes] == list(says)
    assert all(says[note.code] in note.message and note.weight is Weight.INFO for note in notes)
