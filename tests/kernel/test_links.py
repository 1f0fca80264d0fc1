"""A device is read with what it is, what it stands on and what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kernel_devices import (
    add_device,
    delete_link,
    make_wire_again,
    rename_link,
    set_link,
    set_live_tx_queues,
)

from kura_shaper.errors import UsageError
from kura_shaper.kernel.links import read_device
from kura_shaper.tree.devices import device_notes, device_problems

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ended, Network

pytestmark = pytest.mark.privileged


def codes(name: str) -> list[str]:
    """Return the codes of all that is said of a device."""
    device = read_device(name)
    problems = [problem.code for problem in device_problems(device)]
    return [*problems, *(note.code for note in device_notes(device))]


def test_a_veth_stands_on_nothing_although_it_names_its_other_end(network: Network) -> None:
    assert (network.device.kind, network.device.below, network.device.ports) == ("veth", "", ())
    add_device("here0", "veth", peer={"ifname": "here1"})
    assert read_device("here0").below == ""


def test_the_tx_queues_are_the_live_ones(network: Network) -> None:
    assert network.device.tx_queues == 4
    set_live_tx_queues(network, 3)
    assert read_device("nic0").tx_queues == 3


def test_without_a_sysfs_the_tx_queues_are_those_that_the_device_was_made_with(
    network: Network, in_child: Callable[[Callable[[], int | None]], Ended], drop_capabilities: Callable[[], None]
) -> None:
    set_live_tx_queues(network, 3)

    def work() -> None:
        drop_capabilities()
        print(read_device("nic0").tx_queues)

    ended = in_child(work)
    assert (ended.status, ended.stdout) == (0, "4\n"), ended.stderr


@pytest.mark.parametrize("kind", ["bridge", "bond"])
def test_a_master_and_its_ports_name_each_other(network: Network, kind: str) -> None:
    master = add_device("master0", kind)
    assert read_device("master0").ports == ()
    for end in ("b0", "a0"):
        add_device(end, "veth", peer={"ifname": f"{end}peer"})
        set_link(end, state="down", master=master)
    found = read_device("master0")
    assert (found.kind, found.ports, found.master, found.below) == (kind, ("a0", "b0"), "", "")
    assert read_device("a0").master == "master0"
    assert "has-ports" in codes("master0")
    assert "has-ports" not in codes("a0")


@pytest.mark.parametrize(("kind", "options"), [("vlan", {"vlan_id": 7}), ("macvlan", {"macvlan_mode": "bridge"})])
@pytest.mark.case("E2")
def test_a_stacked_device_names_the_one_below(network: Network, kind: str, options: dict[str, object]) -> None:
    """Case E2."""
    add_device("top0", kind, link=network.device.ifindex, **options)
    found = read_device("top0")
    assert (found.kind, found.below) == (kind, "nic0")
    assert "stacked" in codes("top0")


def test_a_device_below_in_another_namespace_has_no_name_here(network: Network) -> None:
    add_device("moved0", "macvlan", link=network.device.ifindex, macvlan_mode="bridge")
    set_link("moved0", net_ns_fd=network.world_descriptor)
    with network.in_world():
        # The number alone would name the wrong device.
        assert read_device("up0").ifindex == network.device.ifindex
        found = read_device("moved0")
    assert (found.kind, found.below) == ("macvlan", "")
    assert device_problems(found)[0].code == "stacked"


@pytest.mark.parametrize("kind", ["dummy", "ifb"])
def test_a_device_without_a_wire_is_noted(network: Network, kind: str) -> None:
    add_device("thing0", kind)
    assert read_device("thing0").kind == kind
    assert "no-wire" in codes("thing0")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("vxlan", {"vxlan_id": 7, "vxlan_port": 4789}),
        ("gre", {"gre_local": "10.70.0.1", "gre_remote": "10.70.0.9"}),
        ("wireguard", {}),
    ],
)
def test_a_tunnel_is_refused(network: Network, kind: str, options: dict[str, object]) -> None:
    add_device("tun0", kind, **options)
    assert read_device("tun0").kind == kind
    assert "tunnel" in codes("tun0")


def test_the_loopback_device_and_a_plain_one_are_told_apart(network: Network) -> None:
    assert codes("lo") == ["loopback"]
    assert codes("nic0") == []


def test_a_device_that_is_down_or_has_no_queue_length_is_noted(network: Network) -> None:
    set_link("nic0", state="down", txqlen=0)
    assert codes("nic0") == ["link-down", "txqueuelen-0"]


def test_a_renamed_device_keeps_its_index_and_a_new_one_of_its_name_does_not(network: Network) -> None:
    former = network.device
    rename_link("nic0", "other0")
    assert read_device("other0").ifindex == former.ifindex
    with pytest.raises(UsageError, match="no such network device here"):
        read_device("nic0")
    delete_link("other0")
    make_wire_again(network)
    assert network.device.ifindex != former.ifindex
    assert network.device.tx_queues == 4
